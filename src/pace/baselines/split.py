"""Observations with the tokens beside them that do not count but that h may read: CLS, registers, a distillation token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pace.observations import ArrayLike, Observations

Rows = int | slice | Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, eq=False, repr=False)
class SplitObservations(Observations):
    """`Observations` for every use, and the tokens between their prefix and their patches that they leave out.

    rest : (M, U, d), so that J + U are all T tokens of the layer
    cls_beside : whether the first of them is CLS, which is no patch, but what attributions may attribute to
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
        return cls._made(
            embeddings=_some(whole.embeddings, places),
            attention=_some(whole.attention, places),
            predictions=whole.predictions,
            grid=whole.grid,
            prefix_tokens=counted,
            rest=_some(whole.embeddings, beside),
            cls_beside=cls_beside,
        )

    def __getitem__(self, images: Rows) -> SplitObservations:
        part = super().__getitem__(images)
        rows = [int(images) % len(self)] if isinstance(images, (int, np.integer)) else images
        return self._made(**vars(part), rest=self.rest[rows], cls_beside=self.cls_beside)

    @classmethod
    def _made(cls, **values: Any) -> SplitObservations:
        made = object.__new__(cls)  # values that were checked when they were observed
        for name, value in values.items():
            object.__setattr__(made, name, value)
        made._check_shapes()
        return made


def _some(array: ArrayLike, places: list[int]) -> ArrayLike:
    """Some tokens of every image: of a tensor at once, of what lies on a disk when it is asked for."""
    return array[:, places] if isinstance(array, Tensor) else _Some(array, places)


class _Some:
    """Like the stored array behind it, slices and index arrays do not read yet; ``numpy.asarray`` does."""

    def __init__(self, array: ArrayLike, places: list[int]) -> None:
        self._array, self._places = array, places
        self.shape = (array.shape[0], len(places), *array.shape[2:])
        self.dtype = array.dtype

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, (int, np.integer)):
            return np.asarray(self._array[rows])[self._places]
        return _Some(self._array[rows], self._places)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self._array, dtype)[:, self._places]
