"""Observations made on demand, straight from images: for sets whose embeddings fit nowhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pace.images import ImageSet, Perturb, normalize, to_float
from pace.images.imageset import short_hash
from pace.images.loading import decoded
from pace.observations import ArrayLike, Batch, Device, Lazy, Observations, Rows
from pace.observing.extract import crops_of, perturbation
from pace.observing.sources import BackboneLike, origin_of

_GPU_WORKERS = 8  # threads that decode for a GPU


def stream(backbone: BackboneLike, images: ImageSet, *, batch_size: int = 64, keep: bool = False) -> Observations:
    """The same as `observe`, but computed whenever it is read, as often as it is read.

    Memory does not grow with the number of images, unless `keep` stores in memory what was computed once: for several
    processes that each read their own share. `observations[images]` computes these images at once.
    """
    return _Stream(backbone, _Pixels(images, backbone), None, batch_size, keep)


def stream_pair(
    backbone: BackboneLike,
    images: ImageSet,
    *,
    perturb: Perturb | bool = True,
    seed: int = 0,
    batch_size: int = 64,
    keep: bool = False,
) -> tuple[Observations, Observations]:
    """The images as they are and perturbed, decoded once for both."""
    pixels, changed = _Pixels(images, backbone), perturbation(perturb, seed)
    return _Stream(backbone, pixels, None, batch_size, keep), _Stream(backbone, pixels, changed, batch_size, keep)


class _Pixels:
    """Decoded images; the last ones are cached, since the other view of a pair needs the same."""

    def __init__(self, images: ImageSet, backbone: BackboneLike):
        self.images, self._preprocessing = images, backbone.preprocessing
        self._workers = None if backbone.device.type == "cpu" else _GPU_WORKERS
        self._last: tuple[npt.NDArray[np.int64], Tensor] | None = None

    def __call__(self, numbers: npt.NDArray[np.int64]) -> Tensor:
        if self._last is None or not np.array_equal(self._last[0], numbers):
            ((_, pixels),) = decoded(self.images, [numbers.tolist()], self._preprocessing, self._workers)
            self._last = numbers, pixels
        return self._last[1]


class _Stream(Observations, Lazy):
    """One view of the images."""

    def __init__(
        self, backbone: BackboneLike, pixels: _Pixels, perturb: Perturb | None, batch_size: int, keep: bool
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size: expected 1 or more; found {batch_size}")
        self._backbone, self._pixels, self._perturb, self._batch_size = backbone, pixels, perturb, batch_size
        self.grid, self.prefix_tokens = backbone.grid(*backbone.preprocessing.size), backbone.prefix_tokens
        self._kept: Batch | None = None
        count = len(pixels.images)
        self._known = np.zeros(count if keep else 0, bool)
        example = self._compute(pixels(np.array([0])), np.array([0]))  # tells the shapes
        if keep:
            # Memory that is not written to is not used yet, so the shares of other processes cost nothing here.
            self._kept = example.map(lambda part: torch.from_numpy(np.empty((count, *part.shape[1:]), np.float32)))
        embeddings, attention, predictions = (
            None if part is None else _Promised(partial(self._part, name), (count, *part.shape[1:]))
            for name, part in example._asdict().items()
        )
        crops = _Promised(self._crops, (count, 4)) if hasattr(perturb, "crops") else None
        layout = self.grid, self.prefix_tokens
        more: Any = {"crops": crops, "origin": origin_of(backbone), "check": False}
        super().__init__(embeddings, attention, predictions, *layout, **more)

    def prepare(self, images: Rows) -> Callable[[], Batch]:
        """Decodes at once, so that it can be done beside the model; the result then runs the backbone."""
        numbers = self._numbers(images)
        if (kept := self._kept) is not None and self._known[numbers].all():
            return lambda: kept.map(lambda part: part[numbers])
        pixels = self._pixels(numbers)
        return lambda: self._compute(pixels, numbers)

    def forget(self) -> None:
        self._known[:] = False

    def identity(self) -> str:
        backbone, perturb = self._backbone, self._perturb
        view = "none" if perturb is None else getattr(perturb, "fingerprint", lambda: repr(perturb))()
        model = [backbone.fingerprint(), str(backbone.preprocessing)]
        return short_hash([*model, self._pixels.images.fingerprint(), view])

    def batch(self, images: Rows, device: Device = None, dtype: torch.dtype | None = None) -> Batch:
        return self.prepare(images)().map(lambda part: part.to(device=device, dtype=dtype))

    def __getitem__(self, images: int | Rows) -> Observations:
        chosen = [int(images)] if isinstance(images, (int, np.integer)) else images
        crops = self._crops(chosen)
        more: Any = {"crops": crops, "origin": self.origin, "check": False}
        return Observations(*self.batch(chosen), self.grid, self.prefix_tokens, **more)

    def _numbers(self, images: Rows) -> npt.NDArray[np.int64]:
        return np.arange(*images.indices(len(self))) if isinstance(images, slice) else np.asarray(images, np.int64)

    def _part(self, name: str, images: Rows) -> Tensor:
        part: Tensor = getattr(self.batch(images, "cpu", torch.float32), name)
        return part

    def _crops(self, images: Rows) -> npt.NDArray[np.float32] | None:
        """Without the images and without the model."""
        return crops_of(self._perturb, self._numbers(images), self._backbone.preprocessing.size)

    def _compute(self, pixels: Tensor, numbers: npt.NDArray[np.int64]) -> Batch:
        found = []
        for start in range(0, len(numbers), self._batch_size):
            rows = slice(start, start + self._batch_size)
            batch = to_float(pixels[rows].to(self._backbone.device))
            view = batch if self._perturb is None else self._perturb(batch, numbers[rows])
            found.append(self._backbone(normalize(view, self._backbone.preprocessing)))
        embeddings, attention, predictions = zip(*found, strict=True)
        classes = None if predictions[0] is None else torch.cat(predictions)
        whole = Batch(torch.cat(embeddings), torch.cat(attention), classes)
        Observations(*whole, self.grid, self.prefix_tokens)  # refuses values that are not finite
        if self._kept is not None:
            self._kept.put(numbers, whole)
            self._known[numbers] = True
        return whole


class _Promised:
    """One array of a stream: its shape is known, its values are computed when they are read."""

    dtype = np.dtype(np.float32)

    def __init__(self, read: Callable[[Rows], ArrayLike], shape: tuple[int, ...]):
        self._read, self.shape = read, shape

    def __getitem__(self, images: Rows) -> ArrayLike:
        return self._read(images)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self[:], dtype)
