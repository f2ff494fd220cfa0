"""What a transformer says about a set of images: the one type between backbones and the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Anything with `shape` and slicing: a numpy array (memory-mapped or not), a tensor, a lazily read store.
ArrayLike = Any

_CHECK_VALUES = 1 << 24  # values looked at together when input is checked, so that checking needs little memory


class Batch(NamedTuple):
    """Some images of an `Observations` as tensors on one device."""

    embeddings: Tensor
    attention: Tensor
    predictions: Tensor | None


@dataclass(frozen=True, eq=False, repr=False)
class Observations:
    """Token embeddings, CLS attention and predictions of M images, as PACE reads them.

    Arrays may be numpy, torch, or anything with ``shape`` and slicing; they are kept as given and read in batches.

    Parameters
    ----------
    embeddings : (M, J, d)
        Token embeddings e_mj of one layer. J counts the prefix tokens that are kept (CLS, if any).
    attention : (M, J)
        Attention a_mj of CLS to every token, mean over heads. Not negative; only its proportions within an image count.
    predictions : (M, N), optional
        The transformer's own output distribution ŷ_m (probabilities, not logits). Without it there is no L_f.
    grid : (rows, columns), optional
        Layout of the patch tokens, row by row. Needed for everything that is shown on an image.
    prefix_tokens : int
        Tokens before the first patch (1 when CLS is counted, as in the paper).
    """

    embeddings: ArrayLike
    attention: ArrayLike
    predictions: ArrayLike | None = None
    grid: tuple[int, int] | None = None
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("embeddings", "attention", "predictions"):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                object.__setattr__(self, name, value.detach())
            elif value is not None and not (hasattr(value, "shape") and hasattr(value, "__getitem__")):
                object.__setattr__(self, name, np.asarray(value))
        if self.grid is not None:
            if np.shape(self.grid) != (2,):
                raise ValueError(f"grid: expected (rows, columns); found {self.grid!r}")
            object.__setattr__(self, "grid", (int(self.grid[0]), int(self.grid[1])))
        self._check_shapes()
        self._check_values()

    def _check_shapes(self) -> None:
        shape = tuple(self.embeddings.shape)
        if len(shape) != 3 or 0 in shape:
            raise ValueError(f"embeddings: expected shape (images, tokens, dimensions), none of them 0; found {shape}")
        if tuple(self.attention.shape) != shape[:2]:
            raise ValueError(
                f"attention: expected shape {shape[:2]} to match embeddings {shape}; found {tuple(self.attention.shape)}"
            )
        if self.predictions is not None:
            found = tuple(self.predictions.shape)
            if len(found) != 2 or found[0] != shape[0] or found[1] == 0:
                raise ValueError(f"predictions: expected shape ({shape[0]}, classes); found {found}")
        if not 0 <= self.prefix_tokens < shape[1]:
            raise ValueError(
                f"prefix_tokens: expected 0 to {shape[1] - 1} for {shape[1]} tokens; found {self.prefix_tokens}"
            )
        if self.grid is not None and self.grid[0] * self.grid[1] + self.prefix_tokens != shape[1]:
            rows, columns = self.grid
            raise ValueError(
                f"grid: {rows} x {columns} patches and {self.prefix_tokens} prefix tokens make "
                f"{rows * columns + self.prefix_tokens} tokens, but embeddings have {shape[1]}"
            )

    def _check_values(self) -> None:
        step = max(1, _CHECK_VALUES // (self.n_tokens * self.dim))
        for start in range(0, len(self), step):
            batch = self.batch(slice(start, start + step))
            _refuse(~torch.isfinite(batch.embeddings), start, "embeddings", "is NaN or infinite")
            _refuse(~torch.isfinite(batch.attention), start, "attention", "is NaN or infinite")
            _refuse(batch.attention < 0, start, "attention", "is negative")
            _refuse(batch.attention.float().sum(1) <= 0, start, "attention", "is zero for every token")
            if batch.predictions is not None:
                _refuse(~torch.isfinite(batch.predictions), start, "predictions", "is NaN or infinite")
                off = (batch.predictions.float().sum(1) - 1).abs() > 0.02  # float16 rounds sums this far
                off |= (batch.predictions < -1e-6).any(1)
                _refuse(off, start, "predictions", "is not a distribution; pass probabilities, not logits")

    def __len__(self) -> int:
        return int(self.embeddings.shape[0])

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, J, d); scikit-learn's splitters read the first."""
        return len(self), self.n_tokens, self.dim

    @property
    def n_tokens(self) -> int:
        return int(self.embeddings.shape[1])

    @property
    def dim(self) -> int:
        return int(self.embeddings.shape[2])

    @property
    def n_classes(self) -> int:
        """N, the number of classes; 0 when there are no predictions."""
        return 0 if self.predictions is None else int(self.predictions.shape[1])

    def batch(
        self,
        images: slice | Sequence[int] | npt.NDArray[np.integer],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Batch:
        """Some images as tensors; nothing is copied that need not be."""

        def take(array: ArrayLike) -> Tensor:
            part = array[images]
            if not isinstance(part, Tensor):
                part = np.asarray(part)
                native = part.astype(part.dtype.newbyteorder("="), copy=False)
                # What torch cannot share is copied: read-only memory maps, negative strides.
                shared = native.flags.writeable and min(native.strides, default=0) >= 0
                part = torch.from_numpy(native if shared else native.copy())
            if not part.is_floating_point():
                part = part.to(torch.float32)
            return part.to(device=device, dtype=dtype)

        predictions = None if self.predictions is None else take(self.predictions)
        return Batch(take(self.embeddings), take(self.attention), predictions)

    def batches(
        self, size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[slice, Batch]]:
        """All images in order, `size` at a time, with the slice each batch came from."""
        for start in range(0, len(self), size):
            part = slice(start, min(start + size, len(self)))
            yield part, self.batch(part, device, dtype)

    def __getitem__(self, images: int | slice | Sequence[int] | npt.NDArray[np.integer]) -> Observations:
        """The same observations for some of the images; of one image, for an integer."""
        if isinstance(images, (int, np.integer)):
            index = int(images)
            if not -len(self) <= index < len(self):
                raise IndexError(f"image {index} of {len(self)}")
            images = slice(index % len(self), index % len(self) + 1)
        part = object.__new__(Observations)  # what was checked once is not checked again
        for name in ("embeddings", "attention", "predictions"):
            value = getattr(self, name)
            object.__setattr__(part, name, None if value is None else value[images])
        object.__setattr__(part, "grid", self.grid)
        object.__setattr__(part, "prefix_tokens", self.prefix_tokens)
        return part

    def __repr__(self) -> str:
        classes = f"{self.n_classes} classes" if self.n_classes else "no predictions"
        grid = f"{self.grid[0]} x {self.grid[1]}" if self.grid else "no grid"
        return f"Observations({len(self)} images, {self.n_tokens} tokens ({grid}), d = {self.dim}, {classes})"


def _refuse(wrong: Tensor, start: int, field: str, what: str) -> None:
    if wrong.any():
        image = start + int(wrong.reshape(len(wrong), -1).any(1).nonzero()[0])
        raise ValueError(f"{field} of image {image} {what}")
