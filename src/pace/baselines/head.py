"""h of f = h ∘ g, as a function of the tokens that observations keep.

M images · B of them in a batch · J observed tokens, and CLS · T ≥ J tokens of the model · R ≤ J that h reads · d channels

Often h reads few of its tokens: after the last block most models use CLS alone. The gradient shows which, and only those are
processed. Tokens that do not count and that h does not read have no effect. Registers that it reads are passed through
unchanged, and nothing is attributed to them. CLS is attributed to whether it counts as a patch or not, since the prediction is
read from it. Observations without tokens that h reads are an error rather than a wrong explanation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from pace.baselines.explainer import SplitModel
from pace.baselines.tokens import SplitObservations, differentiable, reading
from pace.observations import ArrayLike, Observations

# Values of tokens that go through h at once, on a CPU and on a GPU; more where it reads one token, which is cheap.
_AT_ONCE_CPU, _AT_ONCE, _LIGHT = 1 << 22, 1 << 26, 4


@dataclass(frozen=True)
class Part:
    """Some images: their place, the tokens that h reads of them (B, R, d), and their predicted classes (B,).

    Its functions take tokens (B S, R, d), S variants of every image, image by image, and add to each what h reads of that
    image but does not count, `uncounted` (B, U, d).
    """

    images: slice
    tokens: Tensor
    targets: Tensor
    head: Head
    uncounted: Tensor | None = None

    def logits(self, tokens: Tensor) -> Tensor:
        """(B S, N)."""
        each = len(tokens) // len(self.targets)
        return self.head(tokens, None if self.uncounted is None else self.uncounted.repeat_interleave(each, 0))

    def logit(self, tokens: Tensor) -> Tensor:
        """h_ŷ (B S,), the logit to be explained."""
        targets = self.targets.repeat_interleave(len(tokens) // len(self.targets))
        return self.logits(tokens).gather(1, targets[:, None]).squeeze(1)

    def gradient(self, tokens: Tensor) -> Tensor:
        """∂h_ŷ/∂e (B S, R, d)."""
        with differentiable():
            tokens = tokens.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.logit(tokens).sum(), tokens)
        return gradient


class Head:
    """Logits of tokens (B, R, d), and the tokens of observations that it takes.

    n_tokens, prefix_tokens : J, and how many of them come before the patches
    reads : (R,) which of the J tokens h reads
    """

    def __init__(self, backbone: SplitModel, observations: Observations) -> None:
        self._backbone, self.device = backbone, backbone.device
        self._size = _image_size(backbone, observations)
        read, self._dtype, dim, self.n_classes = reading(backbone, self._size)
        self._total = len(read)
        self._shape = _shape_of(observations)
        self.n_tokens, observed_dim, self.prefix_tokens = self._shape
        if observed_dim != dim or self.n_tokens > self._total:
            raise ValueError(
                f"observations have {self.n_tokens} tokens of {observed_dim} dimensions, but this layer has {self._total} of "
                f"{dim}; observe with the backbone that is explained"
            )
        counts = torch.ones_like(read)  # of all T tokens, those between prefix and patches do not count
        counts[self.prefix_tokens : self.prefix_tokens + self._total - self.n_tokens] = False
        self.reads = read[counts].nonzero().squeeze(1)
        # The tokens that h reads, by place among all T: those that count, and those that are passed through unchanged.
        self._counted, self._uncounted = ((read & some).nonzero().squeeze(1) for some in (counts, ~counts))
        self._require_uncounted(observations)
        if not len(self.reads):
            raise ValueError(
                "the model reads none of the observed tokens of this layer, so nothing can be attributed to them"
            )
        self._places = torch.cat([self._counted, self._uncounted])
        self._held: WeakKeyDictionary[Observations, Tensor] = WeakKeyDictionary()

    def __call__(self, tokens: Tensor, uncounted: Tensor | None = None) -> Tensor:
        """Logits (B, N), float32. What h does not read can be filled with anything."""
        if uncounted is not None:
            tokens = torch.cat([tokens, uncounted], 1)
        tokens = tokens.to(self._dtype)
        if len(self._places) == 1:
            whole = tokens.expand(-1, self._total, -1)  # a view: a hundred thousand masks fit into memory
        elif len(self._counted) == self._total:
            whole = tokens
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
        found = _shape_of(observations)
        if found != self._shape:
            raise ValueError(
                f"observations have {found[0]} tokens ({found[2]} before the patches) of {found[1]} dimensions; the "
                f"explainer was fitted with {self._shape[0]} ({self._shape[2]}) of {self._shape[1]}"
            )
        self._require_uncounted(observations)
        for start in range(0, len(observations), size):
            images = slice(start, min(start + size, len(observations)))
            with torch.inference_mode(False):  # tensors that gradients may be taken with
                tokens = self._tokens(observations, images)
                uncounted = self._load(observations, images, self._uncounted) if len(self._uncounted) else None
                if observations.predictions is not None:
                    targets = predicted(observations.predictions[images]).to(self.device)
                else:
                    targets = self(tokens, uncounted).argmax(1)
            yield Part(images, tokens, targets, self, uncounted)

    def classes(self, observations: Observations) -> Tensor:
        """ŷ (M,), the predicted class of every image."""
        return torch.cat([part.targets for part in self.parts(observations, self.rows())])

    def _require_uncounted(self, observations: Observations) -> None:
        if len(self._uncounted) and not isinstance(observations, SplitObservations):
            raise ValueError(
                f"the model reads {len(self._uncounted)} tokens of this layer that the observations leave out (CLS, which "
                f"only counts with count_cls=True, or registers): use EveryToken(backbone).observe(images)"
            )

    def _tokens(self, observations: Observations, images: slice) -> Tensor:
        if len(self._places) > 1:
            return self._load(observations, images, self._counted)
        # One token per image is small; without keeping it, a hundred runs would read all tokens a hundred times.
        if observations not in self._held:
            step = max(1, _AT_ONCE // (observations.n_tokens * observations.dim))
            parts = [slice(start, min(start + step, len(observations))) for start in range(0, len(observations), step)]
            self._held[observations] = torch.cat([self._load(observations, part, self._counted) for part in parts])
        return self._held[observations][images]

    def _load(self, observations: Observations, images: slice, places: Tensor) -> Tensor:
        """The tokens (B, n, d) at some places among all T, from the observed ones and those beside them."""
        start, beside = observations.prefix_tokens, self._total - observations.n_tokens
        in_rest = (places >= start) & (places < start + beside)
        found = torch.empty(images.stop - images.start, len(places), observations.dim, device=self.device)
        if in_rest.any():
            assert isinstance(observations, SplitObservations)
            found[:, in_rest] = self._pick(_tensor(observations.rest[images]), places[in_rest] - start)
        if not in_rest.all():  # else the patches need not be loaded from disk
            observed = places[~in_rest]
            observed = torch.where(observed < start, observed, observed - beside)
            found[:, ~in_rest] = self._pick(observations.batch(images).embeddings, observed)
        return found

    def _pick(self, tokens: Tensor, places: Tensor) -> Tensor:
        return tokens[:, places.to(tokens.device)].to(self.device, torch.float32)


def _shape_of(observations: Observations) -> tuple[int, int, int]:
    """Tokens, their dimensions, and how many of them come before the patches; CLS is one of them, counted or beside."""
    cls = int(isinstance(observations, SplitObservations) and observations.cls_beside)
    return observations.n_tokens + cls, observations.dim, observations.prefix_tokens + cls


def predicted(predictions: ArrayLike) -> Tensor:
    """The predicted classes (M,) of distributions (M, N)."""
    return _tensor(predictions).argmax(1)


def _tensor(array: ArrayLike) -> Tensor:
    return array if isinstance(array, Tensor) else torch.from_numpy(np.array(array))


def _image_size(backbone: SplitModel, observations: Observations) -> tuple[int, int]:
    """The size of the images that the observations are of, from their grid."""
    height, width = backbone.preprocessing.size
    if observations.grid is None:
        return height, width
    rows, columns = backbone.grid(height, width)
    size = height * observations.grid[0] // rows, width * observations.grid[1] // columns
    if backbone.grid(*size) != observations.grid:
        raise ValueError(f"observations have a grid of {observations.grid}, which this backbone's layer cannot have")
    return size
