"""Observations with every token of a layer, for methods that run h: it may read tokens that do not count for PACE.

Those are CLS, registers and distillation tokens. They lie beside the observed tokens, which stay what PACE sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pace.baselines.explainer import SplitModel
from pace.observations import ArrayLike, Batch, Observations

if TYPE_CHECKING:
    from pace.backbones import Backbone

Rows = int | slice | Sequence[int] | npt.NDArray[np.integer]

# Random inputs that show which tokens h reads, two of each scale. Where tokens are almost zero attention is even, so that no
# token is missed because attention to it underflows.
_PROBE_SCALES = (1.0, 1.0, 1e-3, 1e-3)


@dataclass(frozen=True, eq=False, repr=False)
class SplitObservations(Observations):
    """`Observations`, with the tokens between prefix and patches that these leave out.

    rest : (M, U, d), so that J + U are all T tokens of the layer
    cls_beside : whether the first of them is CLS, which is not a patch but can be attributed to
    """

    rest: ArrayLike = None
    cls_beside: bool = False

    @classmethod
    def of(cls, whole: Observations, counted: int, cls_beside: bool = False) -> SplitObservations:
        """From observations of all T tokens, of whose prefix the first `counted` count."""
        if cls_beside and counted:
            raise ValueError(f"cls_beside: CLS is the first token, and the first {counted} count")
        places = [*range(counted), *range(whole.prefix_tokens, whole.n_tokens)]
        beside = list(range(counted, whole.prefix_tokens))
        return cls._trusted(
            embeddings=_select(whole.embeddings, places),
            attention=_select(whole.attention, places),
            predictions=whole.predictions,
            grid=whole.grid,
            prefix_tokens=counted,
            rest=_select(whole.embeddings, beside),
            cls_beside=cls_beside,
        )

    def __getitem__(self, images: Rows) -> SplitObservations:
        part = super().__getitem__(images)
        rows = [int(images) % len(self)] if isinstance(images, (int, np.integer)) else images
        return self._trusted(**vars(part), rest=self.rest[rows], cls_beside=self.cls_beside)

    @classmethod
    def _trusted(cls, **values: Any) -> SplitObservations:
        made = object.__new__(cls)  # values that were checked when they were observed
        for name, value in values.items():
            object.__setattr__(made, name, value)
        made._check_shapes()
        return made


class EveryToken:
    """A backbone that keeps all tokens: those that do not count are in the prefix, with attention 0.

    Needed where h reads them: CLS on the last layer, registers on an inner one.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self.layer, self.device, self.preprocessing = backbone.layer, backbone.device, backbone.preprocessing
        height, width = self.preprocessing.size
        rows, columns = self.grid(height, width)
        with torch.no_grad():
            tokens = backbone.split(torch.zeros(1, 3, height, width, device=self.device))
        self.prefix_tokens = tokens.shape[1] - rows * columns

    def __call__(self, images: Tensor) -> Batch:
        batch = self._backbone.every_token(images)
        attention = batch.attention.clone()
        attention[:, self._backbone.prefix_tokens : self.prefix_tokens] = 0
        return Batch(batch.embeddings, attention, batch.predictions)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        return self._backbone.grid(height, width)

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


class Reading(NamedTuple):
    """Which of all T tokens (T,) some logit depends on, their dtype and dimensions, and the number of logits."""

    tokens: Tensor
    dtype: torch.dtype
    dim: int
    n_classes: int


def reading(backbone: SplitModel, size: tuple[int, int]) -> Reading:
    """What h reads for images of a size, found by its gradient."""
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


def reads_uncounted(backbone: Backbone) -> bool:
    """Whether h reads tokens of the layer that do not count, so that `EveryToken` has to observe them."""
    size = backbone.preprocessing.size
    rows, columns = backbone.grid(*size)
    read = reading(backbone, size).tokens
    return bool(read[backbone.prefix_tokens : len(read) - rows * columns].any())


@contextmanager
def differentiable() -> Iterator[None]:
    """Gradients inside, whatever the caller's mode."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _select(array: ArrayLike, places: list[int]) -> ArrayLike:
    """Some tokens of every image: at once from a tensor, lazily from what lies on disk."""
    return array[:, places] if isinstance(array, Tensor) else _Selected(array, places)


class _Selected:
    """Like the stored array behind it: slices and index arrays do not read yet, ``numpy.asarray`` does."""

    def __init__(self, array: ArrayLike, places: list[int]) -> None:
        self._array, self._places = array, places
        self.shape = (array.shape[0], len(places), *array.shape[2:])
        self.dtype = array.dtype

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, (int, np.integer)):
            return np.asarray(self._array[rows])[self._places]
        return _Selected(self._array[rows], self._places)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self._array, dtype)[:, self._places]
