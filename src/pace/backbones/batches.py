"""Batches of pixels for training: images decoded and resized ahead of the model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from pace.images import ImageSet, PreprocessingLike, prepare

_MOST_WORKERS = 16
_CACHE_BYTES = 4 << 30  # images are decoded once and kept as uint8 when they fit in this


class Pixels:
    """A set of images at the model's size, as uint8: kept in memory if they fit, else decoded whenever they are used."""

    def __init__(
        self, images: ImageSet, preprocessing: PreprocessingLike, workers: int | None = None, keep: bool = True
    ) -> None:
        self._images, self._preprocessing = images, preprocessing
        self._workers = workers or min(os.cpu_count() or 1, _MOST_WORKERS)
        self._kept: Tensor | None = None
        shape = (len(images), 3, *preprocessing.size)
        if keep and torch.Size(shape).numel() <= _CACHE_BYTES:
            kept = torch.empty(shape, dtype=torch.uint8)
            for rows, batch in self.batches(range(len(images)), 64):
                kept[rows[0] : rows[-1] + 1] = batch
            self._kept = kept

    def batches(self, order: Sequence[int], size: int) -> Iterator[tuple[Sequence[int], Tensor]]:
        """The images `order`, `size` at a time: their numbers and pixels (B, 3, H, W)."""
        parts = [order[start : start + size] for start in range(0, len(order), size)]
        if self._kept is not None:
            kept = self._kept
            return ((rows, kept[torch.as_tensor(rows)]) for rows in parts)
        return self._decoded(parts)

    def _decoded(self, parts: Iterable[Sequence[int]]) -> Iterator[tuple[Sequence[int], Tensor]]:
        pool = ThreadPoolExecutor(self._workers)
        try:
            waiting: tuple[Sequence[int], Iterator[Tensor]] | None = None
            for rows in (*parts, None):
                following = None if rows is None else (rows, pool.map(self._pixels, rows))  # starts right away
                if waiting is not None:
                    yield waiting[0], torch.stack(list(waiting[1]))
                waiting = following
        finally:
            pool.shutdown(cancel_futures=True)

    def _pixels(self, row: int) -> Tensor:
        return prepare(self._images[row], self._preprocessing).mul_(255).round_().to(torch.uint8)


def as_floats(pixels: Tensor, device: torch.device) -> Tensor:
    """On the device, in [0, 1]."""
    return pixels.to(device, non_blocking=True).float() / 255
