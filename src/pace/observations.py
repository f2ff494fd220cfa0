"""What a transformer computes for a set of images: the one data type between backbones and the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pace.terminal import one_line

# Anything with `shape` and slicing: a numpy array (memory-mapped or not), a tensor, an array in a store.
ArrayLike = Any
Rows = slice | Sequence[int] | npt.NDArray[np.integer]  # some of the images
Device = torch.device | str | None

_LARGEST = 1e12  # of any value: float32 holds sums of squares over the images only far below its own largest


class Batch(NamedTuple):
    """Some images of an `Observations` as tensors on one device."""

    embeddings: Tensor
    attention: Tensor
    predictions: Tensor | None

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same function applied to each of the tensors."""
        predictions = None if self.predictions is None else change(self.predictions)
        return Batch(change(self.embeddings), change(self.attention), predictions)

    def put(self, rows: Rows, batch: Batch) -> None:
        """Write a batch to some of the rows of this one."""
        for mine, other in zip(self, batch, strict=True):
            if mine is not None and other is not None:
                mine[rows] = other.to(mine)


@runtime_checkable
class Lazy(Protocol):
    """Observations made when they are asked for: `prepare` does what can be done beside the model, its result the rest."""

    def prepare(self, images: Rows) -> Callable[[], Batch]: ...
    def identity(self) -> str: ...
    def forget(self) -> None: ...  # the cache: the same images in another batch may be rounded differently


class Observations:
    """Token embeddings, CLS attention and predictions of M images: what PACE is fitted to.

    Arrays may be numpy, torch, or anything with ``shape`` and slicing; they are kept as given and read in batches.

    Parameters
    ----------
    embeddings : (M, J, d)
        Token embeddings e_mj of one layer. J includes the prefix tokens that are counted (CLS, if any).
    attention : (M, J)
        Attention a_mj of CLS to every token, mean over heads. Not negative; only proportions within an image matter.
    predictions : (M, N), optional
        The transformer's own output distribution ŷ_m (probabilities, not logits). Without it there is no L_f.
    grid : (rows, columns), optional
        Layout of the patch tokens, row by row. Needed for everything that is drawn on an image.
    prefix_tokens : int
        Tokens before the first patch (1 when CLS is counted, as in the paper).
    crops : (M, 4), optional
        For perturbed views: left, top, right, bottom of the part of the image that the view shows, as shares of the
        image's width and height (the image as the model sees it unperturbed). Left > right where the view is mirrored.
    origin : dict, optional
        What they were computed with: model (a fingerprint), block, attention block and preprocessing. A fit remembers it, and
        refuses to explain observations of another origin.
    check : bool
        False skips the check of the values, which reads all of them: for arrays that were checked before.
    """

    def __init__(
        self,
        embeddings: ArrayLike,
        attention: ArrayLike,
        predictions: ArrayLike | None = None,
        grid: tuple[int, int] | None = None,
        prefix_tokens: int = 0,
        *,
        crops: ArrayLike | None = None,
        origin: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> None:
        self.embeddings, self.attention = _as_array("embeddings", embeddings), _as_array("attention", attention)
        self.predictions = None if predictions is None else _as_array("predictions", predictions)
        if grid is not None and not (isinstance(grid, Sequence) and len(grid) == 2 and all(map(_is_whole, grid))):
            raise ValueError(f"grid: expected two whole numbers, rows and columns; found {one_line(repr(grid))}")
        self.grid = None if grid is None else (int(grid[0]), int(grid[1]))
        if not _is_whole(prefix_tokens):
            raise ValueError(f"prefix_tokens: expected a whole number; found {one_line(repr(prefix_tokens))}")
        self.prefix_tokens = int(prefix_tokens)
        self.crops = None if crops is None else _as_array("crops", crops)
        self.origin = None if origin is None else dict(origin)
        self._check_shapes()
        if check:
            self._check_values()

    def _check_shapes(self) -> None:
        shape = tuple(self.embeddings.shape)
        if len(shape) != 3 or 0 in shape:
            raise ValueError(f"embeddings: expected shape (images, tokens, dimensions), none of them 0; found {shape}")
        images, tokens, _ = shape
        if (found := tuple(self.attention.shape)) != (images, tokens):
            raise ValueError(f"attention: expected shape {shape[:2]} to match embeddings {shape}; found {found}")
        if self.predictions is not None and (len(found := tuple(self.predictions.shape)) != 2 or found[0] != images):
            raise ValueError(f"predictions: expected shape ({images}, classes); found {found}")
        if self.crops is not None and (found := tuple(self.crops.shape)) != (images, 4):
            raise ValueError(f"crops: expected shape ({images}, 4); found {found}")
        prefix = self.prefix_tokens
        if not 0 <= prefix < tokens:
            raise ValueError(f"prefix_tokens: expected 0 to {tokens - 1} for {tokens} tokens; found {prefix}")
        if self.grid is not None and (made := self.grid[0] * self.grid[1] + prefix) != tokens:
            patches = f"{self.grid[0]} x {self.grid[1]} patches and {prefix} prefix tokens"
            raise ValueError(f"grid: {patches} make {made} tokens, but embeddings have {tokens}")

    def _check_values(self) -> None:
        size = max(1, (1 << 24) // (self.n_tokens * self.dim))  # so that checking needs little memory
        for part, batch in self.batches(size):
            for field, values in batch._asdict().items():
                if values is not None:
                    _refuse(~torch.isfinite(values), part.start, field, "is NaN or infinite")
                    _refuse(values.abs() > _LARGEST, part.start, field, f"is beyond ±{_LARGEST:.0e}; scale it down")
            _refuse(batch.attention < 0, part.start, "attention", "is negative")
            _refuse(batch.attention.float().sum(1) <= 0, part.start, "attention", "is zero for every token")
            if (predictions := batch.predictions) is not None:
                off = (predictions.float().sum(1) - 1).abs() > 0.02  # rounding to float16 moves sums this far
                off |= (predictions < -1e-6).any(1)
                _refuse(off, part.start, "predictions", "is not a distribution; pass probabilities, not logits")
        if self.crops is not None:
            crops = as_tensor(self.crops[:])
            left, top, right, bottom = crops.T
            good = (crops > -1e-6).all(1) & (crops < 1 + 1e-6).all(1) & (left != right) & (top < bottom)
            _refuse(~good, 0, "crops", "is no part of it; pass left, top, right, bottom as shares, not pixels")

    def __len__(self) -> int:
        return int(self.embeddings.shape[0])

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, J, d); scikit-learn's splitters read the first."""
        return len(self), self.n_tokens, self.dim

    @property
    def blocks(self) -> int:
        """Of how many blocks the embeddings lie side by side, by their origin: the first tell parts, the last kinds."""
        return len((self.origin or {}).get("block", "").split(" and "))

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

    def batch(self, images: Rows, device: Device = None, dtype: torch.dtype | None = None) -> Batch:
        """Some images as tensors, copied only where necessary."""
        whole = Batch(self.embeddings, self.attention, self.predictions)
        return whole.map(lambda array: as_tensor(array[images]).to(device=device, dtype=dtype))

    def batches(
        self, size: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[slice, Batch]]:
        """All images in order, `size` at a time, with the slice each batch came from."""
        for start in range(0, len(self), size):
            part = slice(start, min(start + size, len(self)))
            yield part, self.batch(part, device, dtype)

    def __getitem__(self, images: int | Rows) -> Observations:
        """Observations of some of the images; an integer selects one image."""
        chosen = [int(images)] if isinstance(images, (int, np.integer)) else images
        part = Batch(self.embeddings, self.attention, self.predictions).map(lambda array: array[chosen])
        crops = None if self.crops is None else self.crops[chosen]
        return Observations(*part, self.grid, self.prefix_tokens, crops=crops, origin=self.origin, check=False)

    def __repr__(self) -> str:
        classes = f"{self.n_classes} classes" if self.n_classes else "no predictions"
        grid = f"{self.grid[0]} x {self.grid[1]}" if self.grid else "no grid"
        images = f"{len(self)} image{'s' * (len(self) != 1)}"
        return f"Observations({images}, {self.n_tokens} tokens ({grid}), d = {self.dim}, {classes})"


def _as_array(field: str, value: ArrayLike) -> ArrayLike:
    """The array as it is given, if it is one of real numbers."""
    expected = f"{field}: expected real numbers of at most 64 bits in a dense array or tensor; found"
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_meta or value.is_quantized or value.is_complex():
            kind = "a meta tensor, which has no values" if value.is_meta else f"{value.layout} of {value.dtype}"
            raise ValueError(f"{expected} {kind}")
        return value.detach()
    if not (hasattr(value, "shape") and hasattr(value, "__getitem__")) or hasattr(value, "tocsr"):  # or sparse
        try:
            value = np.asarray(value)
        except (ValueError, TypeError):
            raise ValueError(f"{expected} lists of different lengths, or of other things") from None
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype) and (dtype.kind not in "biuf" or dtype.itemsize > 8):
        raise ValueError(f"{expected} {dtype}")
    if np.ma.is_masked(value):
        raise ValueError(f"{expected} a masked array")
    return value


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def as_tensor(values: ArrayLike) -> Tensor:
    """The values where they are, copied only where torch cannot share their memory; whole numbers as float32."""
    if not isinstance(values, Tensor):
        array = np.asarray(values)
        # torch cannot share read-only memory (memory maps), negative strides or another order of bytes.
        values = torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
    part: Tensor = values
    return part if part.is_floating_point() else part.to(torch.float32)


def _refuse(wrong: Tensor, start: int, field: str, what: str) -> None:
    if wrong.any():
        image = start + int(wrong.reshape(len(wrong), -1).any(1).nonzero()[0])
        raise ValueError(f"{field} of image {image} {what}")
