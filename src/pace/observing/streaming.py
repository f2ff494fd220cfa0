"""Observations straight from images, made when they are asked for: for sets whose embeddings nothing could hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pace.images import ImageSet, Perturb, Perturbation, normalize
from pace.images.imageset import short_hash
from pace.model.feeding import Images, changed
from pace.observations import Batch, Observations
from pace.observing.extract import BackboneLike
from pace.observing.pipeline import decoded

_GPU_WORKERS = 8  # threads that decode for a GPU

_Numbers = npt.NDArray[np.int64]


def stream(
    backbone: BackboneLike,
    images: ImageSet,
    *,
    perturb: Perturb | bool | None = None,
    seed: int = 0,
    batch_size: int = 64,
    keep: bool = False,
) -> Observations:
    """What the backbone says about every image, as `pace.extract.observe` would, but only when and as often as it is read.

    Memory does not grow with the number of images, unless `keep` keeps in memory whatever was looked at once: that is for
    several processes, of which each reads its own share. `observations[images]` looks at these at once.
    """
    perturbation = Perturbation(seed) if perturb is True else perturb or None
    return _Stream(backbone, _Pixels(images, backbone), perturbation, batch_size, keep)


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
    if not perturb:
        raise ValueError(f"perturb: expected True or a perturbation; found {perturb!r}")
    pixels = _Pixels(images, backbone)
    perturbation = Perturbation(seed) if perturb is True else perturb
    return (
        _Stream(backbone, pixels, None, batch_size, keep),
        _Stream(backbone, pixels, perturbation, batch_size, keep),
    )


class _Pixels:
    """Decoded images; the last ones are remembered, since the other view of a pair asks for the same."""

    def __init__(self, images: ImageSet, backbone: BackboneLike):
        self.images, self._preprocessing = images, backbone.preprocessing
        self._workers = None if backbone.device.type == "cpu" else _GPU_WORKERS
        self._last: tuple[_Numbers, Tensor] | None = None

    def __call__(self, numbers: _Numbers) -> Tensor:
        if self._last is None or not np.array_equal(self._last[0], numbers):
            ((_, pixels),) = decoded(self.images, [numbers.tolist()], self._preprocessing, self._workers)
            self._last = numbers, pixels
        return self._last[1]


class _Stream(Observations):
    """One view of the images. It is `Lazy` to whoever feeds a fit."""

    def __init__(
        self, backbone: BackboneLike, pixels: _Pixels, perturb: Perturb | None, batch_size: int, keep: bool
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size: expected 1 or more; found {batch_size}")
        facts = {"_backbone": backbone, "_pixels": pixels, "_perturb": perturb, "_batch_size": batch_size}
        facts |= {"grid": backbone.grid(*backbone.preprocessing.size), "prefix_tokens": backbone.prefix_tokens}
        facts |= {"_kept": None, "_seen": np.zeros(len(pixels.images) if keep else 0, bool)}
        for name, value in facts.items():
            object.__setattr__(self, name, value)
        example = self._look(pixels(np.array([0])), np.array([0]))  # tells the shapes
        for name, part in zip(Batch._fields, example, strict=True):
            array = None if part is None else _Promised(self, name, (len(pixels.images), *part.shape[1:]))
            object.__setattr__(self, name, array)
        if keep:
            # Memory that is not written to yet is not taken yet, so the shares of other processes cost nothing here.
            count = len(pixels.images)
            kept = changed(example, lambda part: torch.from_numpy(np.empty((count, *part.shape[1:]), np.float32)))
            object.__setattr__(self, "_kept", kept)

    _backbone: BackboneLike
    _pixels: _Pixels
    _perturb: Perturb | None
    _batch_size: int
    _seen: npt.NDArray[np.bool_]
    _kept: Batch | None

    def prepare(self, images: Images) -> Callable[[], Batch]:
        numbers = np.arange(*images.indices(len(self))) if isinstance(images, slice) else np.asarray(images)
        if (kept := self._kept) is not None and self._seen[numbers].all():
            return lambda: changed(kept, lambda part: part[numbers])
        pixels = self._pixels(numbers)
        return lambda: self._look(pixels, numbers)

    def forget(self) -> None:
        self._seen[:] = False

    def identity(self) -> str:
        images, perturb = self._pixels.images, self._perturb
        perturbation = "none" if perturb is None else getattr(perturb, "fingerprint", lambda: repr(perturb))()
        backbone = self._backbone
        seen_by = [backbone.fingerprint(), backbone.layer, str(backbone.preprocessing)]
        return short_hash([*seen_by, images.fingerprint(), perturbation])

    def batch(
        self,
        images: slice | Sequence[int] | npt.NDArray[np.integer],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Batch:
        chosen: Any = images if isinstance(images, slice) else np.asarray(images, np.int64)
        return changed(self.prepare(chosen)(), lambda part: part.to(device=device, dtype=dtype))

    def __getitem__(self, images: int | slice | Sequence[int] | npt.NDArray[np.integer]) -> Observations:
        chosen = [int(images)] if isinstance(images, (int, np.integer)) else images
        return Observations(*self.batch(chosen), self.grid, self.prefix_tokens)

    def _look(self, pixels: Tensor, numbers: _Numbers) -> Batch:
        found = []
        for start in range(0, len(numbers), self._batch_size):
            rows = slice(start, start + self._batch_size)
            batch = pixels[rows].to(self._backbone.device).float() / 255
            view = batch if self._perturb is None else self._perturb(batch, numbers[rows])
            found.append(self._backbone(normalize(view, self._backbone.preprocessing)))
        embeddings, attention, predictions = zip(*found, strict=True)
        whole = Batch(
            torch.cat(embeddings), torch.cat(attention), None if predictions[0] is None else torch.cat(predictions)
        )
        Observations(*whole, self.grid, self.prefix_tokens)  # refuses what is not finite or does not fit
        if self._kept is not None:
            for room, value in zip(self._kept, whole, strict=True):
                if room is not None and value is not None:
                    room[numbers] = value.to("cpu", torch.float32)
            self._seen[numbers] = True
        return whole


class _Promised:
    """One array of a stream: its shape is known, its values are looked up when they are asked for."""

    dtype = np.dtype(np.float32)

    def __init__(self, stream: _Stream, name: str, shape: tuple[int, ...]):
        self._stream, self._name, self.shape = stream, name, shape

    def __getitem__(self, images: Any) -> Tensor:
        part: Tensor = getattr(self._stream.batch(images, "cpu", torch.float32), self._name)
        return part
