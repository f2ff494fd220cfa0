"""Work beside the model: images are decoded and copied ahead of it, results are stored behind it."""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import cache, partial
from importlib import import_module
from itertools import cycle
from mmap import mmap
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pace.images import ImageSet, PreprocessingLike, prepare

CAN_FORK = sys.platform == "linux"
_AHEAD = 2  # batches ready before they are needed: bounds the memory, like the next
_RESULTS = 3  # results between the model and where they are kept: computed, being copied, being kept
_COPIERS = 4  # threads that fill memory while a GPU works
_WORTH_SHARING = 1 << 20  # bytes that a copier is called for
_MOST_WORKERS = 16
_ENOUGH_THREADS = 2  # they decode faster than models run on a CPU; more would only get in its way
_MANY = 1000  # images for which processes are worth their start
_PIECE = 8  # images that a process loads at once
_PER_WORKER = 2  # pieces that a process has before it

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


class _Pieces(Dataset[bool]):
    """Loads a few images at a time into memory that all processes share, so that no pixel has to be sent.

    The memory is inherited and has no name: containers have little of the other kind.
    """

    def __init__(self, load: Callable[[int], Tensor], places: Tensor) -> None:
        self._load, self._places = load, places

    def __getitem__(self, piece: tuple[int, Sequence[int]]) -> bool:
        place, rows = piece
        try:
            for room, row in zip(self._places[place], rows, strict=False):
                room.copy_(self._load(row))
        except Exception:  # the reader meets it again, in its own process, where it can be raised as it is
            return False
        return True


def by_processes(
    load: Callable[[int], Tensor], chunks: Iterable[Sequence[int]], size: tuple[int, int], workers: int, pinned: bool
) -> Generator[tuple[Sequence[int], Tensor]]:
    chunks = list(chunks)
    parts = [rows[start : start + _PIECE] for rows in chunks for start in range(0, len(rows), _PIECE)]
    workers = max(1, min(workers, len(parts)))
    count = _PER_WORKER * workers + 1  # as many as are given out ahead, and the one that is read meanwhile
    places = torch.frombuffer(mmap(-1, count * _PIECE * 3 * math.prod(size)), dtype=torch.uint8)
    places = places.view(count, _PIECE, 3, *size)
    pieces = [(number % count, rows) for number, rows in enumerate(parts)]
    loader = DataLoader(
        _Pieces(load, places),
        batch_size=None,
        sampler=pieces,
        num_workers=workers,
        prefetch_factor=_PER_WORKER,
        multiprocessing_context="fork",  # starts at once, and asks nothing of the user's script
    )
    # Started here, by the caller, and not when the first batch is drawn, which another thread may do: a process that
    # is forked off a thread of a pool fails when it ends, since it tries to join itself.
    results = zip(pieces, loader, strict=True)

    def batches() -> Generator[tuple[Sequence[int], Tensor]]:
        for rows in chunks:
            batch = torch.empty((len(rows), 3, *size), dtype=torch.uint8, pin_memory=pinned)
            for room in torch.split(batch, _PIECE):
                (place, part), loaded = next(results)
                room.numpy()[:] = (
                    places[place, : len(part)].numpy() if loaded else torch.stack([*map(load, part)]).numpy()
                )
            yield rows, batch

    return batches()


def _alone() -> None:
    """Helper threads compute on one processor each: with teams of their own they would fight the model's for them."""
    torch.get_num_threads()  # torch sets a thread up at its first use, which would undo the next line
    _openmp().limit(limits=1)


@cache
def _openmp() -> Any:
    """Found once: looking through all loaded libraries takes longer than a batch does on a GPU."""
    return import_module("threadpoolctl").ThreadpoolController().select(user_api="openmp")


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Team:
    """Copies within main memory: by several threads beside a GPU, which fills fresh memory faster than one can touch it."""

    def __init__(self, for_gpu: bool) -> None:
        self._size = min(_COPIERS, _processors()) if for_gpu else 1

    def __enter__(self) -> Team:
        self._pool = ThreadPoolExecutor(self._size, "pace-copy", _alone)  # starts threads when they are first needed
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def copy(self, room: Tensor, part: Tensor) -> None:
        pieces = min(self._size, part.nbytes // _WORTH_SHARING)
        if pieces < 2:
            room.copy_(part)
            return
        jobs = [
            self._pool.submit(to.copy_, what) for to, what in zip(room.chunk(pieces), part.chunk(pieces), strict=True)
        ]
        for job in jobs:
            job.result()


class Link:
    """Copies to the device; on CUDA on a stream of their own, beside the computation."""

    def __init__(self, device: torch.device, team: Team) -> None:
        self.device, self._team = device, team
        self.cuda = device.type == "cuda"
        if self.cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def upload(self, images: Tensor) -> Callable[[], Tensor]:
        """Start the copy; the result waits for it and gives floats in [0, 1]."""
        if not self.cuda or images.device.type != "cpu":
            there = images.to(self.device)
            return lambda: _float(there)
        pinned = images
        if not images.is_pinned():
            pinned = torch.empty(images.shape, dtype=images.dtype, device="cpu", pin_memory=True)
            self._team.copy(pinned, images)
        with torch.cuda.stream(self._stream):
            there = pinned.to(self.device, non_blocking=True)
            copied = self._stream.record_event()

        def result() -> Tensor:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(copied)
            there.record_stream(current)
            return _float(there)

        return result


_WHITE = torch.tensor(255, dtype=torch.float32, device="cpu")


def _float(images: Tensor) -> Tensor:
    return images / _WHITE if images.dtype == torch.uint8 else images.float()  # one pass, not one to convert before it


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


class Ring:
    """A few sets of buffers in main memory that results pass through in turn, pinned and on a stream of their own on CUDA.

    They are made once. New ones would have to be pinned or touched for the first time with every batch, and torch gives
    pinned memory out again only when all copies that were started since have ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._sets: cycle[dict[int, Tensor]] = cycle([{} for _ in range(_RESULTS)])
        if self._cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def take(self, *parts: Tensor | None) -> Callable[[], list[Tensor | None]]:
        """Start copying into the set whose turn it is; the result waits for the copy."""
        buffers, waiting = next(self._sets), list(parts)
        if not self._cuda:
            here = self._fill(buffers, waiting)
            return lambda: here
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            here = self._fill(buffers, waiting)
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # others need the processor
            copied.record()

        def result() -> list[Tensor | None]:
            copied.synchronize()
            waiting.clear()  # the device had to keep them until now
            return here

        return result

    def _fill(self, buffers: dict[int, Tensor], parts: Sequence[Tensor | None]) -> list[Tensor | None]:
        here: list[Tensor | None] = []
        for place, part in enumerate(parts):
            if part is None:
                here.append(None)
                continue
            room = buffers.get(place)
            if room is None or (room.dtype, room.shape[1:]) != (part.dtype, part.shape[1:]) or len(room) < len(part):
                room = buffers[place] = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=self._cuda)
            here.append(room[: len(part)].copy_(part.detach(), non_blocking=self._cuda))
        return here


class Behind:
    """Results leave the device and are kept while the model goes on: in order, by one thread, at most a few behind it."""

    def __init__(self, device: torch.device) -> None:
        self._ring = Ring(device)
        self._pending: deque[Future[None]] = deque()
        self._broken = False

    def __enter__(self) -> Behind:
        self._pool = ThreadPoolExecutor(1, "pace-behind", _alone)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()  # what was computed is still kept

    def keep(self, keep: Callable[[list[Any]], None], *parts: Tensor | None) -> None:
        """Call `keep` with the parts once they are in main memory; it must not hold on to them."""
        while len(self._pending) >= _RESULTS:  # then the next buffers of the ring are still in use
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(self._run, keep, self._ring.take(*parts)))

    def _run(self, keep: Callable[[list[Any]], None], arrived: Callable[[], list[Any]]) -> None:
        if self._broken:  # a later result after a lost one would leave a hole
            return
        try:
            keep(arrived())
        except BaseException:
            self._broken = True
            raise

    def wait(self) -> None:
        while self._pending:
            self._pending.popleft().result()


def fresh(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Room for a large tensor. numpy's memory comes in huge pages, much faster to touch for the first time than torch's."""
    return torch.from_numpy(np.empty(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(*shape)
