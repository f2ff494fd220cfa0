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
    image but does not count, `beside` (B, U, d).
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
                "the model reads none of the observed tokens of this layer, so nothing can be attributed to them"
            )
        self._places = read.nonzero().squeeze(1)  # among all tokens
        # Of those read, how many come before those that do not count.
        self._before = int(taken[: self.prefix_tokens].sum())
        self._held: WeakKeyDictionary[Observations, Tensor] = WeakKeyDictionary()

    def __call__(self, tokens: Tensor, beside: Tensor | None = None) -> Tensor:
        """Logits (B, N), float32. What h does not read can be filled with anything."""
        if beside is not None:
            tokens = torch.cat([tokens[:, : self._before], beside, tokens[:, self._before :]], 1)
        tokens = tokens.to(self._dtype)
        if len(self._places) == 1:
            whole = tokens.expand(-1, self._total, -1)  # a view: a hundred thousand masks fit into memory
        elif len(self._places) == self._total:
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
                f"only counts with count_cls=True, or registers): use EveryToken(backbone).observe(images)"
            )

    def _tokens(self, observations: Observations, images: slice) -> Tensor:
        held = self._held.get(observations)
        if held is not None:
            return held[images]
        if len(self._places) > 1:
            return self._load(observations, images)
        # One token per image is small; without keeping it, a hundred runs would read all tokens a hundred times.
        step = max(1, _AT_ONCE // (observations.n_tokens * observations.dim))
        held = torch.cat([self._load(observations, slice(i, i + step)) for i in range(0, len(observations), step)])
        self._held[observations] = held
        return held[images]

    def _load(self, observations: Observations, images: slice) -> Tensor:
        cls = _cls_beside(observations)
        observed = self.reads[self.reads >= cls] - cls
        found = [_beside(observations, images, self.reads[self.reads < cls])] if cls else []
        if len(observed) or not cls:  # else only CLS is read, and the patches need not be loaded from disk
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


def _cls_beside(observations: Observations) -> int:
    """1 where CLS lies beside the observed tokens, as the first of those that do."""
    return int(isinstance(observations, SplitObservations) and observations.cls_beside)


def _shape_of(observations: Observations) -> tuple[int, int, int]:
    """Tokens, their dimensions, and how many of them come before the patches; CLS is one of them, counted or beside."""
    cls = _cls_beside(observations)
    return observations.n_tokens + cls, observations.dim, observations.prefix_tokens + cls


def _beside(observations: Observations, images: slice, places: Tensor) -> Tensor:
    """Some of the tokens that lie beside the observed ones."""
    assert isinstance(observations, SplitObservations)  # ensured by `check`
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
        raise ValueError(f"observations have a grid of {observations.grid}, which this backbone's layer cannot have")
    return size
