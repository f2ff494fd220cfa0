"""Work beside the model: images are decoded and copied ahead of it, results are stored behind it."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pace.images import ImageSet, PreprocessingLike, prepare

CAN_FORK = sys.platform == "linux"
_AHEAD = 2  # batches ready before they are needed, and results waiting to be stored: bounds the memory
_MOST_WORKERS = 16
_ENOUGH_THREADS = 2  # they decode faster than models run on a CPU; more would only get in its way
_MANY = 1000  # images for which processes are worth their start
_PIECE = 8  # images that a process sends at once

T = TypeVar("T")


def decoded(
    images: ImageSet,
    chunks: Iterable[Sequence[int]],
    preprocessing: PreprocessingLike,
    workers: int | None = None,
    for_gpu: bool = False,
) -> Generator[tuple[Sequence[int], Tensor]]:
    """Every chunk of image numbers with its batch of prepared images, (B, 3, H, W) in uint8, decoded a little ahead.

    Threads do it for a CPU. A GPU is faster than Python's lock lets them be, so for many images it gets processes.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers: expected 1 or more; found {workers}")
    workers = workers or min(_processors(), _MOST_WORKERS if for_gpu else _ENOUGH_THREADS)
    load = partial(load_pixels, images, preprocessing)
    by = by_processes if for_gpu and CAN_FORK and len(images) >= _MANY else by_threads
    return by(load, chunks, preprocessing.size, workers, pinned=for_gpu)


def load_pixels(images: ImageSet, preprocessing: PreprocessingLike, row: int) -> Tensor:
    # Exact, since what was prepared was uint8 before; and a quarter of the bytes on every way from here to the device.
    return prepare(images[row], preprocessing).mul_(255).round_().to(torch.uint8)


def by_threads(
    load: Callable[[int], Tensor], chunks: Iterable[Sequence[int]], size: tuple[int, int], workers: int, pinned: bool
) -> Generator[tuple[Sequence[int], Tensor]]:
    def place(row: int, room: Tensor) -> None:
        room.copy_(load(row))

    def finished(rows: Sequence[int], batch: Tensor, jobs: Sequence[Future[None]]) -> tuple[Sequence[int], Tensor]:
        for job in jobs:
            job.result()
        return rows, batch

    pending: deque[tuple[Sequence[int], Tensor, list[Future[None]]]] = deque()
    with ThreadPoolExecutor(workers, "pace-decode", _alone) as pool:
        try:
            for rows in chunks:
                batch = torch.empty((len(rows), 3, *size), dtype=torch.uint8, pin_memory=pinned)
                jobs = [pool.submit(place, row, room) for row, room in zip(rows, batch, strict=True)]
                pending.append((rows, batch, jobs))
                if len(pending) > _AHEAD:
                    yield finished(*pending.popleft())
            while pending:
                yield finished(*pending.popleft())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class _Pieces(Dataset[Any]):
    """A few images at a time: small enough for the little shared memory that containers have."""

    def __init__(self, load: Callable[[int], Tensor]) -> None:
        self._load = load

    def __getitem__(self, rows: Any) -> Any:
        try:
            return torch.stack([self._load(row) for row in rows])
        except Exception:  # the reader meets it again, in its own process, where it can be raised as it is
            return None


def by_processes(
    load: Callable[[int], Tensor], chunks: Iterable[Sequence[int]], size: tuple[int, int], workers: int, pinned: bool
) -> Generator[tuple[Sequence[int], Tensor]]:
    chunks = list(chunks)
    pieces = [rows[start : start + _PIECE] for rows in chunks for start in range(0, len(rows), _PIECE)]
    loader = DataLoader(
        _Pieces(load),
        batch_size=None,
        sampler=pieces,
        num_workers=min(workers, len(pieces)),
        multiprocessing_context="fork",  # starts at once, and asks nothing of the user's script
    )
    # Started here, by the caller, and not when the first batch is drawn, which another thread may do: a process that
    # is forked off a thread of a pool fails when it ends, since it tries to join itself.
    results = zip(pieces, loader, strict=True)

    def batches() -> Generator[tuple[Sequence[int], Tensor]]:
        for rows in chunks:
            batch = torch.empty((len(rows), 3, *size), dtype=torch.uint8, pin_memory=pinned)
            for start in range(0, len(rows), _PIECE):
                part, result = next(results)
                result = torch.stack([load(row) for row in part]) if result is None else result
                batch.numpy()[start : start + _PIECE] = result.numpy()
            yield rows, batch

    return batches()


def _alone() -> None:
    """Helper threads compute on one processor each: with teams of their own they would fight the model's for them."""
    torch.get_num_threads()  # torch sets a thread up at its first use, which would undo the next line
    import_module("threadpoolctl").threadpool_limits(1, user_api="openmp")


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Link:
    """Copies between the processor and the device; on CUDA on streams of their own, beside the computation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        if self.cuda:
            self._up, self._down = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def upload(self, images: Tensor) -> Callable[[], Tensor]:
        """Start the copy; the result waits for it and gives floats in [0, 1]."""
        if not self.cuda or images.device.type != "cpu":
            there = images.to(self.device)
            return lambda: _float(there)
        pinned = images if images.is_pinned() else images.pin_memory()
        with torch.cuda.stream(self._up):
            there = pinned.to(self.device, non_blocking=True)
            copied = self._up.record_event()

        def result() -> Tensor:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            there.record_stream(current)
            return _float(there)

        return result

    def download(self, *parts: Tensor | None) -> Callable[[], list[Any]]:
        """Start the copy; the result waits for it."""
        if not self.cuda:
            return lambda: [None if part is None else part.cpu() for part in parts]
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        here: list[Any] = []
        with torch.cuda.stream(self._down):
            for part in parts:
                if part is None or not part.is_cuda:
                    here.append(part)
                    continue
                part.record_stream(self._down)
                room = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
                here.append(room.copy_(part, non_blocking=True))
            copied = self._down.record_event()

        def result() -> list[Any]:
            copied.synchronize()
            return here

        return result


def _float(images: Tensor) -> Tensor:
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def uploaded(batches: Generator[tuple[int, Tensor]], link: Link) -> Generator[tuple[int, Callable[[], Tensor]]]:
    with closing(batches):
        for start, batch in batches:
            yield start, link.upload(batch)


def ahead(items: Generator[T]) -> Generator[T]:
    """The same items, made before they are asked for by a thread of their own."""
    end: Any = object()
    with closing(items), ThreadPoolExecutor(1, "pace-ahead", _alone) as pool:
        pending = deque(pool.submit(next, items, end) for _ in range(_AHEAD))
        try:
            while (item := pending.popleft().result()) is not end:
                pending.append(pool.submit(next, items, end))
                yield item
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class Behind:
    """One thread that stores results while the model goes on, at most a few behind it."""

    def __enter__(self) -> Behind:
        self._pool = ThreadPoolExecutor(1, "pace-behind", _alone)
        self._pending: deque[Future[None]] = deque()
        self._broken = False
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()  # what was computed is still stored

    def do(self, job: Callable[[], None]) -> None:
        while len(self._pending) >= _AHEAD:
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(self._run, job))

    def _run(self, job: Callable[[], None]) -> None:
        if self._broken:  # a later result after a lost one would leave a hole
            return
        try:
            job()
        except BaseException:
            self._broken = True
            raise

    def wait(self) -> None:
        while self._pending:
            self._pending.popleft().result()
