"""h of f = h ∘ g, as a function of the tokens that observations keep, and observations with every token that it reads.

M images · B of them in a batch · J observed tokens, and CLS · T ≥ J tokens of the model · R ≤ J that h reads · d channels

h may read tokens that do not count for PACE: CLS, registers, distillation tokens. `EveryToken` observes them beside the others,
which stay what PACE sees. Registers are passed through h unchanged, and nothing is attributed to them. CLS is attributed to
whether it counts as a patch or not, since the prediction is read from it. Often h reads few tokens: after the last block most
models use CLS alone. The gradient shows which, and only those are processed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pace.backbones import Backbone
from pace.observations import ArrayLike, Batch, Observations

# Random inputs that show which tokens h reads. Near zero attention is even, so that none underflows and is missed.
_PROBE_SCALES = (1.0, 1.0, 1e-3, 1e-3)
# Values of tokens that go through h at once, on a CPU and on a GPU; more where it reads one token, which is cheap.
_AT_ONCE_CPU, _AT_ONCE, _LIGHT = 1 << 22, 1 << 26, 4


class SplitObservations(Observations):
    """`Observations`, with the tokens between prefix and patches that these leave out.

    rest : (M, U, d), so that J + U are all T tokens of the layer
    cls_beside : whether the first of them is CLS, which is not a patch but can be attributed to
    """

    def __init__(self, *args: Any, rest: ArrayLike, cls_beside: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rest, self.cls_beside = rest, cls_beside

    @classmethod
    def of(cls, whole: Observations, counted: int, cls_beside: bool = False) -> SplitObservations:
        """From observations of all T tokens, of whose prefix the first `counted` count."""
        places = [*range(counted), *range(whole.prefix_tokens, whole.n_tokens)]
        embeddings, attention = (_select(some, np.s_[:, places]) for some in (whole.embeddings, whole.attention))
        rest = _select(whole.embeddings, np.s_[:, counted : whole.prefix_tokens])
        values = embeddings, attention, whole.predictions, whole.grid, counted
        more: Any = {"crops": whole.crops, "origin": whole.origin, "check": False}
        return cls(*values, rest=rest, cls_beside=cls_beside, **more)

    def __getitem__(self, images: Any) -> SplitObservations:
        part = super().__getitem__(images)
        rest = self.rest[[images] if isinstance(images, (int, np.integer)) else images]
        return SplitObservations(**vars(part), rest=rest, cls_beside=self.cls_beside, check=False)


class EveryToken:
    """A backbone that keeps all tokens, for models that read them: those that do not count are in the prefix, attention 0."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone, self.grid = backbone, backbone.grid
        self.layer, self.blocks, self.device = backbone.layer, backbone.blocks, backbone.device
        self.attention_layer, self.preprocessing = backbone.attention_layer, backbone.preprocessing
        size = self.preprocessing.size
        with torch.no_grad():
            tokens = backbone.split(torch.zeros(1, 3, *size, device=self.device))
        self.prefix_tokens = tokens.shape[1] - math.prod(self.grid(*size))

    def __call__(self, images: Tensor) -> Batch:
        batch = self._backbone.every_token(images)
        attention = batch.attention.clone()
        attention[:, self._backbone.prefix_tokens : self.prefix_tokens] = 0
        return Batch(batch.embeddings, attention, batch.predictions)

    def fingerprint(self) -> str:
        return f"{self._backbone.fingerprint()}, every token"

    def observe(self, images: Any, **options: Any) -> SplitObservations:
        """What the backbone itself observes, with the tokens it leaves out beside it; options as of `pace.extract.observe`."""
        from pace.observing.extract import observe

        return self.counted(observe(self, images, **options))

    def counted(self, whole: Observations) -> SplitObservations:
        """The same from observations made with this backbone."""
        counted = self._backbone.prefix_tokens
        return SplitObservations.of(whole, counted, cls_beside=self._backbone.has_cls and not counted)


@dataclass(frozen=True)
class Part:
    """Some images: their place, the tokens that h reads of them (B, R, d), `uncounted` (B, U, d), and predicted classes (B,).

    Its functions take tokens (B S, R, d), S variants of every image, image by image, and add the uncounted ones to each.
    """

    images: slice
    tokens: Tensor
    uncounted: Tensor
    targets: Tensor
    head: Head

    def logits(self, tokens: Tensor) -> Tensor:
        """(B S, N)."""
        return self.head(tokens, self.uncounted.repeat_interleave(len(tokens) // len(self.targets), 0))

    def logit(self, tokens: Tensor) -> Tensor:
        """h_ŷ (B S,), the logit to be explained."""
        targets = self.targets.repeat_interleave(len(tokens) // len(self.targets))
        return self.logits(tokens).gather(1, targets[:, None]).squeeze(1)

    def masked(self, masks: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """h_ŷ (B, S) of S masks (S, …), as many at once as fit; `change` turns some of them into tokens (B, s, R, d)."""
        some_at_once = torch.split(masks, max(1, self.head.rows() // len(self.targets)))
        return torch.cat([self.logit(change(some).flatten(0, 1)).view(-1, len(some)) for some in some_at_once], 1)

    def gradient(self, tokens: Tensor) -> Tensor:
        """∂h_ŷ/∂e (B S, R, d)."""
        with torch.enable_grad():
            tokens = tokens.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.logit(tokens).sum(), tokens)
        return gradient


class Head:
    """Logits of tokens (B, R, d), and the tokens of observations that it takes.

    n_tokens, prefix_tokens : J, and how many of them come before the patches
    reads : (R,) which of the J tokens h reads
    """

    def __init__(self, backbone: Backbone, observations: Observations) -> None:
        self._backbone, self.device = backbone, backbone.device
        self._size = height, width = backbone.preprocessing.size
        if observations.grid is not None:
            rows, columns = backbone.grid(height, width)
            self._size = height * observations.grid[0] // rows, width * observations.grid[1] // columns
        read, self._dtype, dim, self.n_classes = _reading(backbone, self._size)
        self._total = len(read)
        self._shape = _shape_of(observations)
        self.n_tokens, observed_dim, self.prefix_tokens = self._shape
        if observed_dim != dim or self.n_tokens > self._total:
            found = f"{self.n_tokens} tokens of {observed_dim} dimensions, but this layer has {self._total} of {dim}"
            raise ValueError(f"observations have {found}; observe with the backbone that is explained")
        counts = torch.ones_like(read)  # of all T tokens, those between prefix and patches do not count
        counts[self.prefix_tokens : self.prefix_tokens + self._total - self.n_tokens] = False
        self.reads = read[counts].nonzero().squeeze(1)
        # The tokens that h reads, by place among all T: those that count, then those that are passed through unchanged.
        self._places = torch.cat([(read & some).nonzero().squeeze(1) for some in (counts, ~counts)])
        self._held: WeakKeyDictionary[Observations, Tensor] = WeakKeyDictionary()
        self._load(observations, slice(0, 1))  # refuses observations without what h reads
        if not len(self.reads):
            raise ValueError("the model reads none of the observed tokens, so nothing can be attributed to them")

    def __call__(self, tokens: Tensor, uncounted: Tensor | None = None) -> Tensor:
        """Logits (B, N), float32. What h does not read can be filled with anything."""
        tokens = (tokens if uncounted is None else torch.cat([tokens, uncounted], 1)).to(self._dtype)
        if len(self._places) == 1:
            whole = tokens.expand(-1, self._total, -1)  # a view: a hundred thousand masks fit into memory
        else:
            whole = tokens.new_zeros(len(tokens), self._total, tokens.shape[2]).index_copy(1, self._places, tokens)
        return self._backbone.forward_from(whole, self._size).float()

    def rows(self, gradients: bool = False) -> int:
        """How many inputs to pass to h at once."""
        tokens = self._total if gradients else len(self._places)
        values = (_AT_ONCE_CPU if self.device.type == "cpu" else _AT_ONCE) * (_LIGHT if len(self._places) == 1 else 1)
        return max(1, values // (tokens * self._shape[1]))

    def parts(self, observations: Observations, size: int) -> Iterator[Part]:
        """All images in order, `size` at a time."""
        if _shape_of(observations) != self._shape:
            words = "{} tokens of {} dimensions, {} before the patches".format
            found, fitted = words(*_shape_of(observations)), words(*self._shape)
            raise ValueError(f"observations have {found}; the explainer was fitted with {fitted}")
        for start in range(0, len(observations), size):
            images = slice(start, min(start + size, len(observations)))
            tokens, uncounted = self._tokens(observations, images).tensor_split([len(self.reads)], 1)
            if observations.predictions is not None:
                targets = predicted(observations.predictions[images]).to(self.device)
            else:
                targets = self(tokens, uncounted).argmax(1)
            yield Part(images, tokens, uncounted, targets, self)

    def classes(self, observations: Observations) -> Tensor:
        """ŷ (M,), the predicted class of every image."""
        return torch.cat([part.targets for part in self.parts(observations, self.rows())])

    def mean(self, observations: Observations) -> Tensor:
        """Mean token (R, d) at every place that h reads."""
        total = torch.zeros(len(self.reads), observations.dim, dtype=torch.float64, device=self.device)
        for part in self.parts(observations, self.rows()):
            total += part.tokens.sum(0, dtype=torch.float64)
        return (total / len(observations)).float()

    def _tokens(self, observations: Observations, images: slice) -> Tensor:
        if len(self._places) > 1:
            return self._load(observations, images)
        # One token per image is small; without keeping it, a hundred runs would read all tokens a hundred times.
        if observations not in self._held:
            step = max(1, _AT_ONCE // (observations.n_tokens * observations.dim))
            starts = range(0, len(observations), step)
            self._held[observations] = torch.cat([self._load(observations, slice(at, at + step)) for at in starts])
        return self._held[observations][images]

    def _load(self, observations: Observations, images: slice) -> Tensor:
        """The tokens (B, R + U, d) that h reads, those that count first."""
        tokens, start = observations.batch(images).embeddings, observations.prefix_tokens
        beside = self._total - observations.n_tokens
        if isinstance(observations, SplitObservations):
            rest = _tensor(observations.rest[images]).to(tokens)
        else:
            rest = tokens.new_zeros(len(tokens), beside, tokens.shape[2])
            missing = int(((self._places >= start) & (self._places < start + beside)).sum())
            if missing:
                raise ValueError(
                    f"the model reads {missing} tokens of this layer that the observations leave out (CLS, which only counts "
                    "with count_cls=True, or registers): use EveryToken(backbone).observe(images)"
                )
        whole = torch.cat([tokens[:, :start], rest, tokens[:, start:]], 1)
        return whole[:, self._places.to(whole.device)].to(self.device, torch.float32)


def reads_uncounted(backbone: Backbone) -> bool:
    """Whether h reads tokens of the layer that do not count, so that `EveryToken` has to observe them."""
    size = backbone.preprocessing.size
    read = _reading(backbone, size)[0]
    return bool(read[backbone.prefix_tokens : len(read) - math.prod(backbone.grid(*size))].any())


def predicted(predictions: ArrayLike) -> Tensor:
    """The predicted classes (M,) of distributions (M, N)."""
    return _tensor(predictions).argmax(1)


def _reading(backbone: Backbone, size: tuple[int, int]) -> tuple[Tensor, torch.dtype, int, int]:
    """For images of a size: which of all T tokens (T,) h reads, found by its gradient, their dtype and d, and N."""
    with torch.inference_mode(False), torch.enable_grad():
        with torch.no_grad():
            every = backbone.split(torch.zeros(1, 3, *size, device=backbone.device))
        generator = torch.Generator().manual_seed(0)
        scales = torch.tensor(_PROBE_SCALES)[:, None, None]
        probe = scales * torch.randn(len(scales), *every.shape[1:], generator=generator)
        probe = probe.to(backbone.device, every.dtype).requires_grad_()
        logits = backbone.forward_from(probe, size)
        (gradient,) = torch.autograd.grad(logits.float().square().sum(), probe)
    return gradient.abs().amax((0, 2)) > 0, every.dtype, every.shape[2], logits.shape[1]


def _shape_of(observations: Observations) -> tuple[int, int, int]:
    """Tokens, their dimensions, and how many of them come before the patches; CLS is one of them, counted or beside."""
    cls = int(isinstance(observations, SplitObservations) and observations.cls_beside)
    return observations.n_tokens + cls, observations.dim, observations.prefix_tokens + cls


def _tensor(array: ArrayLike) -> Tensor:
    return array if isinstance(array, Tensor) else torch.from_numpy(np.array(array))


def last_block(observations: Observations) -> Observations:
    """Of two blocks side by side the last, whose tokens go on into the rest of the model."""
    if observations.blocks == 1:
        return observations
    own = (..., slice(observations.dim // observations.blocks * (observations.blocks - 1), None))
    known = vars(observations) | {"embeddings": _select(observations.embeddings, own), "origin": None, "check": False}
    if isinstance(observations, SplitObservations):
        return SplitObservations(**known | {"rest": _select(observations.rest, own)})
    return Observations(**known)


def _select(array: ArrayLike, key: Any) -> ArrayLike:
    """Some tokens or numbers of every image: at once from a tensor, lazily from what lies on disk."""
    return array[key] if isinstance(array, Tensor) else _Selected(array, key)


class _Selected:
    """Like the stored array behind it: slices and index arrays do not read yet, ``numpy.asarray`` does."""

    def __init__(self, array: ArrayLike, key: Any) -> None:
        self._array, self._key, self.dtype = array, key, array.dtype
        self.shape = (array.shape[0], *np.empty((0, *array.shape[1:]))[key].shape[1:])

    def __getitem__(self, rows: Any) -> Any:
        return _Selected(self._array[rows], self._key)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        selected: npt.NDArray[Any] = np.asarray(self._array, dtype)[self._key]
        return selected
