"""Batches of pixels for training: images decoded and resized ahead of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pace.images import ImageSet, PreprocessingLike, to_float
from pace.images.loading import decoded

_CACHE_BYTES = 4 << 30  # images are decoded once and kept as uint8 when they fit in this


class Pixels:
    """A set of images at the model's size: kept in memory if they fit, else decoded whenever they are used."""

    def __init__(
        self,
        images: ImageSet,
        preprocessing: PreprocessingLike,
        device: torch.device,
        workers: int | None = None,
        keep: bool = True,
    ) -> None:
        self._images, self._preprocessing, self._device, self._workers = images, preprocessing, device, workers
        self._kept: Tensor | None = None
        shape = (len(images), 3, *preprocessing.size)
        if keep and torch.Size(shape).numel() <= _CACHE_BYTES:
            kept = torch.empty(shape, dtype=torch.uint8)
            for rows, batch in self._decoded(range(len(images)), 64):
                kept[rows[0] : rows[-1] + 1] = batch
            self._kept = kept

    def batches(self, order: Sequence[int], size: int) -> Iterator[tuple[Sequence[int], Tensor]]:
        """The images `order`, `size` at a time: their numbers, and their pixels (B, 3, H, W) in [0, 1] on the device."""
        for rows, pixels in self._decoded(order, size):
            yield rows, to_float(pixels.to(self._device, non_blocking=True))

    def _decoded(self, order: Sequence[int], size: int) -> Iterator[tuple[Sequence[int], Tensor]]:
        parts = [order[start : start + size] for start in range(0, len(order), size)]
        if self._kept is not None:
            kept = self._kept
            return ((rows, kept[torch.as_tensor(rows)]) for rows in parts)
        return decoded(self._images, parts, self._preprocessing, self._workers, self._device.type == "cuda")
