"""h of f = h ∘ g, as a function of the tokens that observations keep.

M images · B of them in a batch · J observed tokens, and CLS · T ≥ J tokens of the model · R ≤ J that h reads · d channels

Often h reads few of its tokens: after the last block most models go on with CLS alone. Which ones is found out by the
gradient, and only those are worked on. It also settles the tokens that do not count: where h does not read them they do not
matter; elsewhere registers go through it as they are, and nothing is attributed to them. CLS is attributed to whether it
counts as a patch or not: the prediction is read from it. Observations that have left out what h reads are an error rather
than a wrong explanation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from pace.baselines.explainer import SplitModel
from pace.baselines.split import SplitObservations
from pace.observations import ArrayLike, Observations

# Values of tokens that go through h at once, on a CPU and on a GPU; more where it reads one token, since it is then light.
_AT_ONCE_CPU, _AT_ONCE, _LIGHT = 1 << 22, 1 << 26, 4
# Random inputs by which it is found out what h reads, two of each scale. Where tokens are all but zero attention is even, so
# that none is overlooked because attention to it underflows.
_PROBE_SCALES = (1.0, 1.0, 1e-3, 1e-3)


@dataclass(frozen=True)
class Part:
    """Some images: where they are, the tokens that h reads of them (B, R, d), and their predicted classes (B,).

    Its functions take tokens (B S, R, d), S variants of every image, image by image, and put beside each what h reads of
    that image without its counting, `beside` (B, U, d).
    """

    images: slice
    tokens: Tensor
    targets: Tensor
    head: Head
    beside: Tensor | None = None

    def logits(self, tokens: Tensor) -> Tensor:
        """(B S, N)."""
        each = len(tokens) // len(self.targets)
        return self.head(tokens, None if self.beside is None else self.beside.repeat_interleave(each, 0))

    def logit(self, tokens: Tensor) -> Tensor:
        """h_ŷ (B S,), of the class to be explained."""
        targets = self.targets.repeat_interleave(len(tokens) // len(self.targets))
        return self.logits(tokens).gather(1, targets[:, None]).squeeze(1)

    def gradient(self, tokens: Tensor) -> Tensor:
        """∂h_ŷ/∂e (B S, R, d)."""
        with differentiable():
            tokens = tokens.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.logit(tokens).sum(), tokens)
        return gradient


@contextmanager
def differentiable() -> Iterator[None]:
    """Gradients inside, whatever the caller's mode."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


class Head:
    """Logits of tokens (B, R, d), and the tokens of observations that it takes.

    n_tokens, prefix_tokens : J, and how many of them come before the patches
    reads : (R,) which of the J tokens h reads
    """

    def __init__(self, backbone: SplitModel, observations: Observations) -> None:
        self._backbone = backbone
        self.device = backbone.device
        self._size = _image_size(backbone, observations)
        read, self._dtype, dim, self.n_classes = reading(backbone, self._size)
        self._total = len(read)
        self._shape = _shape_of(observations)
        self.n_tokens, _, self.prefix_tokens = self._shape
        kept = self._kept(dim)
        uncounted = torch.ones_like(read)
        uncounted[kept] = False
        self._beside = read[uncounted].nonzero().squeeze(1)  # among the tokens that do not count
        self._require_beside(observations)
        taken = read[kept]
        self.reads = taken.nonzero().squeeze(1)
        if not len(self.reads):
            raise ValueError(
                "the model reads none of the tokens that were observed of this layer: nothing can be attributed"
            )
        self._places = read.nonzero().squeeze(1)  # among all tokens
        # Of those read, how many come before those that do not count.
        self._before = int(taken[: self.prefix_tokens].sum())
        self._held: WeakKeyDictionary[Observations, Tensor] = WeakKeyDictionary()

    def __call__(self, tokens: Tensor, beside: Tensor | None = None) -> Tensor:
        """Logits (B, N), float32. What h does not read is filled with anything that costs nothing."""
        if beside is not None:
            tokens = torch.cat([tokens[:, : self._before], beside, tokens[:, self._before :]], 1)
        tokens = tokens.to(self._dtype)
        if len(self._places) == 1:
            whole = tokens.expand(-1, self._total, -1)  # a view: a hundred thousand coalitions fit
        elif len(self._places) == self._total:
            whole = tokens
        else:
            whole = tokens.new_zeros(len(tokens), self._total, tokens.shape[2]).index_copy(1, self._places, tokens)
        return self._backbone.forward_from(whole, self._size).float()

    def rows(self, gradients: bool = False) -> int:
        """How many inputs to give to h at once."""
        tokens = self._total if gradients else len(self._places)
        values = (_AT_ONCE_CPU if self.device.type == "cpu" else _AT_ONCE) * (_LIGHT if len(self._places) == 1 else 1)
        return max(1, values // (tokens * self._shape[1]))

    def parts(self, observations: Observations, size: int) -> Iterator[Part]:
        """All images in order, `size` at a time."""
        self.check(observations)
        for start in range(0, len(observations), size):
            images = slice(start, min(start + size, len(observations)))
            with torch.inference_mode(False):  # tensors that gradients may be taken with
                tokens, beside = self._tokens(observations, images), self._rest(observations, images)
                targets = self._targets(observations, images, tokens, beside)
            yield Part(images, tokens, targets, self, beside)

    def classes(self, observations: Observations) -> Tensor:
        """ŷ (M,), the predicted class of every image."""
        return torch.cat([part.targets for part in self.parts(observations, self.rows())])

    def check(self, observations: Observations) -> None:
        found = _shape_of(observations)
        if found != self._shape:
            raise ValueError(
                f"observations have {found[0]} tokens ({found[2]} before the patches) of {found[1]} dimensions; the "
                f"explainer was fitted with {self._shape[0]} ({self._shape[2]}) of {self._shape[1]}"
            )
        self._require_beside(observations)

    def _require_beside(self, observations: Observations) -> None:
        if len(self._beside) and not isinstance(observations, SplitObservations):
            raise ValueError(
                f"the model reads {len(self._beside)} tokens of this layer that the observations leave out (CLS, which "
                f"counts with count_cls=True only, or registers): use EveryToken(backbone).observe(images)"
            )

    def _tokens(self, observations: Observations, images: slice) -> Tensor:
        held = self._held.get(observations)
        if held is not None:
            return held[images]
        if len(self._places) > 1:
            return self._load(observations, images)
        # One token an image is little, and a hundred runs would read all the others a hundred times.
        step = max(1, _AT_ONCE // (observations.n_tokens * observations.dim))
        held = torch.cat([self._load(observations, slice(i, i + step)) for i in range(0, len(observations), step)])
        self._held[observations] = held
        return held[images]

    def _load(self, observations: Observations, images: slice) -> Tensor:
        cls = _cls_beside(observations)
        observed = self.reads[self.reads >= cls] - cls
        found = [_beside(observations, images, self.reads[self.reads < cls])] if cls else []
        if len(observed) or not cls:  # else nothing but CLS is read, and the patches may lie on a disk
            embeddings = observations.batch(images).embeddings
            found.append(embeddings[:, observed.to(embeddings.device)])
        return torch.cat([some.to(self.device, torch.float32) for some in found], 1)

    def _rest(self, observations: Observations, images: slice) -> Tensor | None:
        if not len(self._beside):
            return None
        places = self._beside + _cls_beside(observations)
        return _beside(observations, images, places).to(self.device, torch.float32)

    def _targets(self, observations: Observations, images: slice, tokens: Tensor, beside: Tensor | None) -> Tensor:
        if observations.predictions is None:
            with torch.no_grad():
                return self(tokens, beside).argmax(1)
        return predicted(observations.predictions[images]).to(self.device)

    def _kept(self, dim: int) -> Tensor:
        """Places (J,) of the tokens among all T: prefix tokens first, patches last."""
        tokens, found, prefix = self._shape
        if found != dim or tokens > self._total:
            raise ValueError(
                f"observations have {tokens} tokens of {found} dimensions, but this layer has {self._total} of {dim}; "
                "observe with the backbone that is explained"
            )
        if tokens == self._total:
            prefix = 0  # all of them, whatever they are
        places = torch.arange(self._total, device=self.device)
        return torch.cat([places[:prefix], places[self._total - (tokens - prefix) :]])


class Reading(NamedTuple):
    """What h takes: which of all T tokens (T,) some logit depends on, their type and dimensions; how many logits it gives."""

    tokens: Tensor
    dtype: torch.dtype
    dim: int
    n_classes: int


def reading(backbone: SplitModel, size: tuple[int, int]) -> Reading:
    """Found out by the gradient of h, for images of a size."""
    with differentiable():
        with torch.no_grad():
            every = backbone.split(torch.zeros(1, 3, *size, device=backbone.device))
        generator = torch.Generator().manual_seed(0)
        scales = torch.tensor(_PROBE_SCALES)[:, None, None]
        probe = scales * torch.randn(len(scales), *every.shape[1:], generator=generator)
        probe = probe.to(backbone.device, every.dtype).requires_grad_()
        logits = backbone.forward_from(probe, size)
        (gradient,) = torch.autograd.grad(logits.float().square().sum(), probe)
    return Reading(gradient.abs().amax((0, 2)) > 0, every.dtype, every.shape[2], logits.shape[1])


def _cls_beside(observations: Observations) -> int:
    """1 where CLS lies beside the observed tokens, before all others that do."""
    return int(isinstance(observations, SplitObservations) and observations.cls_beside)


def _shape_of(observations: Observations) -> tuple[int, int, int]:
    """Tokens, their dimensions, and how many of them come before the patches; CLS is one of them, counted or beside."""
    cls = _cls_beside(observations)
    return observations.n_tokens + cls, observations.dim, observations.prefix_tokens + cls


def _beside(observations: Observations, images: slice, places: Tensor) -> Tensor:
    """Some of the tokens that lie beside the observed ones."""
    assert isinstance(observations, SplitObservations)  # which `check` has seen to
    rest = observations.rest[images]
    rest = rest if isinstance(rest, Tensor) else torch.from_numpy(np.asarray(rest))
    return rest[:, places.to(rest.device)]


def predicted(predictions: ArrayLike) -> Tensor:
    """The predicted classes (M,) of distributions (M, N)."""
    return (predictions if isinstance(predictions, Tensor) else torch.from_numpy(np.array(predictions))).argmax(1)


def _image_size(backbone: SplitModel, observations: Observations) -> tuple[int, int]:
    """The size of the images that the observations are of, from their grid."""
    height, width = backbone.preprocessing.size
    if observations.grid is None:
        return height, width
    rows, columns = backbone.grid(height, width)
    size = height * observations.grid[0] // rows, width * observations.grid[1] // columns
    if backbone.grid(*size) != observations.grid:
        raise ValueError(f"observations have a grid of {observations.grid}, which this backbone's layer does not make")
    return size
