"""A progress bar for everything that may take longer than a second."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from pace.terminal import CleanConsole, one_line

_PATIENCE = 1.0  # seconds before the bar appears
_LONG = 10.0  # seconds that are announced where there is no bar


class Advance(Protocol):
    def __call__(self, steps: int = 1, note: str = "") -> None: ...


def announce(step: str, show: bool | None = None) -> None:
    """A line on standard error for a step without a bar: on a terminal, or if `show` is True."""
    if sys.stderr.isatty() if show is None else show:
        print(f"{one_line(step)} …", file=sys.stderr, flush=True)


lines = False  # whether every stage leaves a line on standard error, as the commands of `pace` want it


@contextmanager
def in_lines() -> Iterator[None]:
    global lines
    lines = True
    try:
        yield
    finally:
        lines = False


def stage_line(text: str) -> None:
    if lines:
        print(f"- {one_line(text)}", file=sys.stderr, flush=True)


@contextmanager
def progress(
    title: str, total: int | None, show: bool | None = None, done: int = 0, rounds: bool = False
) -> Iterator[Advance]:
    """A bar on standard error, moved by ``advance(steps, note)``: at once if `show` is True, by default on a terminal
    after a second. `done` of the steps were done before. With `rounds`, steps beyond `total` begin another round.

    With `lines`, what takes a second leaves a line when it is done, and where there is no bar, one says early how long it
    will take.
    """
    begin, count = time.monotonic(), 0
    stage, entered = "", begin  # what the notes have been saying, and since when
    bar, expected = _bar() if (sys.stderr.isatty() if show is None else show) else None, False
    task = None if bar is None else bar.add_task(title, total=total, completed=done, note="")

    def leave() -> None:
        if stage and show is None and (passed := time.monotonic() - entered) > _PATIENCE:
            stage_line(f"{title}, {stage}: {passed:.1f} s")

    def advance(steps: int = 1, note: str = "") -> None:
        nonlocal count, expected, stage, entered
        count += steps
        passed = time.monotonic() - begin
        if (now := re.sub(r"[\d,:].*", "", note).strip()) and now != stage:
            leave()
            stage, entered = now, time.monotonic()
        if bar is not None and task is not None:
            shown = (count - 1) % total + 1 if rounds and total and count else done + count
            bar.update(task, completed=shown, note=note)
            if not bar.live.is_started and (show or passed > _PATIENCE):
                bar.start()
        elif show is None and total and not (expected or rounds) and count and passed > _PATIENCE:
            expected, left = True, passed / count * (total - done)
            if left > _LONG:
                stage_line(f"{title}: {total} images, about {left:.0f} s")

    try:
        yield advance
    finally:
        if bar is not None and bar.live.is_started:
            bar.stop()
    leave()
    if show is None and (passed := time.monotonic() - begin) > _PATIENCE:
        stage_line(f"{title}: {passed:.1f} s")


def _bar() -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    return Progress(*columns, console=CleanConsole(stderr=True))
