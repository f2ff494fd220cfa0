"""Work done beside the model: images are copied to its device ahead of it, results are copied back and kept behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any, TypeVar

import torch
from torch import Tensor

from pace.images import to_float
from pace.images.loading import one_core_each

_AHEAD = 2  # batches on the device before they are needed; it bounds the memory, like the next
_BEHIND = 3  # results that were computed but are not kept yet

T = TypeVar("T")


def ahead(items: Generator[T]) -> Generator[T]:
    """The same items, made by a thread before they are needed."""
    end: Any = object()
    with closing(items), ThreadPoolExecutor(1, "pace-ahead", one_core_each) as pool:
        pending = deque(pool.submit(next, items, end) for _ in range(_AHEAD))
        try:
            while (item := pending.popleft().result()) is not end:
                pending.append(pool.submit(next, items, end))
                yield item
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def uploaded(
    batches: Generator[tuple[Sequence[int], Tensor]], device: torch.device
) -> Generator[tuple[Sequence[int], Callable[[], Tensor]]]:
    """Starts copying each batch to the device; calling the result waits for the copy and gives floats in [0, 1]."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    with closing(batches):
        for rows, batch in batches:
            yield rows, _upload(batch, device, stream)


def _upload(batch: Tensor, device: torch.device, stream: Any) -> Callable[[], Tensor]:
    if stream is None or batch.is_cuda:
        there = batch.to(device)
        return lambda: to_float(there)
    with torch.cuda.stream(stream):
        there = batch.pin_memory().to(device, non_blocking=True)
        copied = stream.record_event()

    def result() -> Tensor:
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)
        there.record_stream(current)
        return to_float(there)

    return result


class Behind:
    """Keeps results while the model goes on: in order, by one thread, and at most a few behind the model."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._pending: deque[Future[None]] = deque()
        self._failed = False
        if self._cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Behind:
        # Beside a GPU the processor is free, and one core alone fills new memory too slowly.
        self._pool = ThreadPoolExecutor(1, "pace-behind", None if self._cuda else one_core_each)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()  # keeps what was computed, also after an error in the model

    def keep(self, keep: Callable[..., None], *parts: Tensor | None) -> None:
        """Call `keep` with the parts once they are in main memory."""
        while len(self._pending) >= _BEHIND:
            self._pending.popleft().result()
        computed = torch.cuda.current_stream(self._device).record_event() if self._cuda else None
        self._pending.append(self._pool.submit(self._keep, keep, parts, computed))

    def _keep(self, keep: Callable[..., None], parts: Sequence[Tensor | None], computed: Any) -> None:
        if self._failed:  # keeping a later result after a lost one would leave a hole
            return
        try:
            keep(*self._downloaded(parts, computed))
        except BaseException:
            self._failed = True
            raise

    def _downloaded(self, parts: Sequence[Tensor | None], computed: Any) -> list[Tensor | None]:
        if not self._cuda:
            return [None if part is None else part.detach() for part in parts]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(computed)
            # `non_blocking` puts them in pinned memory, which torch then uses again for the next.
            here = [None if part is None else part.detach().to("cpu", non_blocking=True) for part in parts]
            copied = self._stream.record_event(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
        copied.synchronize()
        return here

    def wait(self) -> None:
        while self._pending:
            self._pending.popleft().result()
