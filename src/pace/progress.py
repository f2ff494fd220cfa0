"""A progress bar for everything that may take longer than a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_PATIENCE = 1.0  # seconds before the bar appears


class Advance(Protocol):
    def __call__(self, steps: int = 1, note: str = "") -> None: ...


def announce(step: str, show: bool | None = None) -> None:
    """A line on standard error for a step without a bar: on a terminal, or if `show` is True."""
    if sys.stderr.isatty() if show is None else show:
        print(f"{step} …", file=sys.stderr, flush=True)


@contextmanager
def progress(title: str, total: int | None, show: bool | None = None, done: int = 0) -> Iterator[Advance]:
    """A bar on standard error, moved by ``advance(steps, note)``: at once if `show` is True, by default on a terminal
    after a second. `done` of the steps were done before."""
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda steps=1, note="": None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    bar = Progress(*columns, console=Console(stderr=True))
    task = bar.add_task(title, total=total, completed=done, note="")
    begin = time.monotonic()

    def advance(steps: int = 1, note: str = "") -> None:
        bar.update(task, advance=steps, note=note)
        if not bar.live.is_started and (show or time.monotonic() - begin > _PATIENCE):
            bar.start()

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()
