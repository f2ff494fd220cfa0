"""Batches of an `ImageSet` at a model's size, decoded ahead of whoever uses them."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pace.images.decoding import UnreadableImageError
from pace.images.imageset import ImageSet
from pace.images.preparation import PreprocessingLike, resize_and_crop

_AHEAD = 2  # batches that threads decode before they are needed; it bounds the memory
_CPU_WORKERS = 2  # decode faster than models run on a CPU; more would only slow the model down
_GPU_WORKERS = 16
_MANY = 1000  # images for which starting processes pays off
_PIECE = 8  # images that a process decodes at a time

Batches = Generator[tuple[Sequence[int], Tensor]]


def decoded(
    images: ImageSet,
    chunks: Sequence[Sequence[int]],
    preprocessing: PreprocessingLike,
    workers: int | None = None,
    for_gpu: bool = False,
    ready: Mapping[int, Tensor] | None = None,
) -> Batches:
    """Every chunk of image numbers with its batch of resized images (B, 3, H, W), as uint8; some may be `ready`.

    Threads decode for a model on the CPU. A GPU is faster than Python's lock lets threads be, so for many images it gets
    processes, on Linux, where they start quickly and need no `if __name__ == "__main__"` in the user's script.
    """
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = workers or min(processors, _GPU_WORKERS if for_gpu else _CPU_WORKERS)

    def load(row: int) -> Tensor:
        if ready is not None and row in ready:
            return ready[row]
        return resize_and_crop(images[row], preprocessing)

    by = by_processes if for_gpu and sys.platform == "linux" and len(images) >= _MANY else by_threads
    return by(load, chunks, workers)


def by_threads(load: Callable[[int], Tensor], chunks: Sequence[Sequence[int]], workers: int) -> Batches:
    pool = ThreadPoolExecutor(workers, "pace-decode", one_core_each)
    started = deque(pool.map(load, rows) for rows in chunks[:_AHEAD])
    try:
        for number, rows in enumerate(chunks):
            started.extend(pool.map(load, later) for later in chunks[number + _AHEAD : number + _AHEAD + 1])
            yield rows, torch.stack(list(started.popleft()))
    finally:
        pool.shutdown(cancel_futures=True)


class _Pieces(Dataset[NDArray[np.uint8] | UnreadableImageError]):
    """A few images at a time, as an array: tensors would go through /dev/shm, which is tiny in many containers."""

    def __init__(self, load: Callable[[int], Tensor]) -> None:
        self._load = load

    def __getitem__(self, rows: Sequence[int]) -> NDArray[np.uint8] | UnreadableImageError:
        try:
            return torch.stack([self._load(row) for row in rows]).numpy()
        except UnreadableImageError as error:  # a DataLoader would raise a RuntimeError instead
            return error


def by_processes(load: Callable[[int], Tensor], chunks: Sequence[Sequence[int]], workers: int) -> Batches:
    pieces = [rows[start : start + _PIECE] for rows in chunks for start in range(0, len(rows), _PIECE)]
    workers = max(1, min(workers, len(pieces)))
    whole: dict[str, Any] = {"batch_size": None, "collate_fn": lambda piece: piece}
    # The iterator is made here, by the caller, since it forks: the batches may be drawn in a thread, where that fails.
    loader = DataLoader(_Pieces(load), sampler=pieces, num_workers=workers, multiprocessing_context="fork", **whole)
    found = iter(loader)

    def batches() -> Batches:
        for rows in chunks:
            parts = []
            for _ in range(0, len(rows), _PIECE):
                part = next(found)
                if isinstance(part, UnreadableImageError):
                    raise part
                parts.append(part)
            yield rows, torch.from_numpy(np.concatenate(parts))

    return batches()


def one_core_each() -> None:
    """Keeps a helper thread to one core: with OpenMP threads of its own it would compete with the model."""
    torch.get_num_threads()  # torch sets a thread up at its first use, which would undo the next line
    _openmp().limit(limits=1)


@cache
def _openmp() -> Any:
    """Looked up once: searching all loaded libraries takes longer than a batch takes on a GPU."""
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

    return ThreadpoolController().select(user_api="openmp")
