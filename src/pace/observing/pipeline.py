"""Work done beside the model: images are copied to its device ahead of it, results are copied back and kept behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pace.images import to_float
from pace.images.loading import Batches, one_core_each
from pace.observations import Batch

_AHEAD = 2  # batches on the device before they are needed; it bounds the memory, like the next
_BEHIND = 3  # results that were computed but are not kept yet


def uploaded(batches: Batches, device: torch.device) -> Generator[tuple[Sequence[int], Callable[[], Tensor]]]:
    """The same batches, copied to the device by a thread before they are needed.

    Calling what comes with the image numbers waits for the copy and gives floats in [0, 1].
    """
    stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def upload() -> tuple[Sequence[int], Callable[[], Tensor]] | None:
        for rows, batch in batches:
            here = batch if stream is None or batch.is_cuda else batch.pin_memory()
            with torch.cuda.stream(stream):  # does nothing if it is None
                there = here.to(device, non_blocking=True)
            return rows, partial(_arrived, there, None if stream is None else stream.record_event())
        return None

    with closing(batches), ThreadPoolExecutor(1, "pace-ahead", one_core_each) as pool:
        pending = deque(pool.submit(upload) for _ in range(_AHEAD))
        try:
            while (item := pending.popleft().result()) is not None:
                pending.append(pool.submit(upload))
                yield item
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _arrived(batch: Tensor, copied: Any) -> Tensor:
    if copied is not None:
        current = torch.cuda.current_stream(batch.device)
        current.wait_event(copied)
        batch.record_stream(current)
    return to_float(batch)


class Behind:
    """Keeps results while the model goes on: in order, by one thread, and at most a few behind the model."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        # Beside a GPU the processor is free, and one core alone fills new memory too slowly.
        self._pool = ThreadPoolExecutor(1, "pace-behind", None if self._cuda else one_core_each)
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Behind:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()  # keeps what was computed, also after an error in the model

    def keep(self, keep: Callable[[Batch, Tensor], None], batch: Batch, bounds: Tensor) -> None:
        """Call `keep` with both once they are in main memory."""
        self.wait(_BEHIND - 1)
        computed = torch.cuda.current_stream(self._device).record_event() if self._cuda else None
        self._pending.append(self._pool.submit(self._keep, keep, batch, bounds, computed))

    def wait(self, left: int = 0) -> None:
        """Wait until at most so many results are not kept yet."""
        while len(self._pending) > left:
            self._pending.popleft().result()

    def _keep(self, keep: Callable[[Batch, Tensor], None], batch: Batch, bounds: Tensor, computed: Any) -> None:
        if self._cuda:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(computed)
                # `non_blocking` puts them in pinned memory, which torch then uses again for the next.
                batch = batch.map(lambda part: part.detach().to("cpu", non_blocking=True))
                bounds = bounds.detach().to("cpu", non_blocking=True)
                copied = self._stream.record_event(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]
            copied.synchronize()
        keep(batch.map(Tensor.detach), bounds.detach())
