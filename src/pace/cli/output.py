"""Printing: results on standard output; progress, warnings and errors on standard error."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pace.cli.errors import with_options_named
from pace.progress import stage_line
from pace.terminal import CleanConsole, one_line, visible

if TYPE_CHECKING:
    from pace.metrics import Scores

_FILE_WIDTH = 200  # columns, if the output is not a terminal


def on_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def several_processes() -> bool:
    """Whether torchrun started this process, and others."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1


def first_process() -> bool:
    """The one that writes and prints."""
    return not several_processes() or os.environ.get("RANK") == "0"


def starts_again() -> bool:
    """Whether torchrun will start this process again after an error, so that the error is not the outcome."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) < restarts


def console(stderr: bool = False) -> CleanConsole:
    terminal = on_terminal(sys.stderr if stderr else sys.stdout)
    return CleanConsole(stderr=stderr, width=None if terminal else _FILE_WIDTH, soft_wrap=True)


def say(text: str = "", style: str | None = None) -> None:
    console().print(visible(text), style=style)


def complain(kind: str, text: object) -> None:
    """One line on standard error."""
    out = console(stderr=True)
    out.print(f"{kind}: ", style="bold red" if kind == "error" else "yellow", end="")
    out.print(one_line(text))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = (0,)) -> None:
    """Aligned columns: those numbered in `words` to the left, numbers to the right."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for number, title in enumerate(head):
        shown.add_column(one_line(title), justify="left" if number in words else "right", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(one_line(cell)) for cell in row))
    console().print(shown, soft_wrap=False)


def show_scores(scores: Scores, every: bool = False) -> None:
    """A table of the main scores, or of every score, and the warnings."""
    rows = []
    for score in scores.values() if every else scores.main:
        interval = "" if score.low is None or score.low == score.high else f"{score.low:.3g} to {score.high:.3g}"
        rows.append([score.title, f"{score.value:.3g}", interval, f"{score.better} is better" if score.better else ""])
    table(["score", "value", "95 % interval", ""], rows, words=(0, 3))
    for warning in scores.warnings:
        say(f"! {warning}", style="yellow")
    say()


def note(text: str) -> None:
    """A line on standard error about what is being done."""
    stage_line(text)


@contextmanager
def busy(what: str) -> Iterator[Any]:
    """For a step without a progress bar: a spinner on a terminal, and a line if it took long."""
    from rich.text import Text  # a string would be read as markup

    began = time.monotonic()
    with console(stderr=True).status(Text(f"{what} …")) if on_terminal(sys.stderr) else nullcontext() as status:
        yield status
    if (seconds := time.monotonic() - began) > 1:
        note(f"{what}: {seconds:.1f} s")


@contextmanager
def warnings_in_one_line(kept: list[str], options: Mapping[str, str], every: bool) -> Iterator[None]:
    """Print warnings as lines on standard error and collect them in `kept`; other libraries' only if `every`."""
    home = str(Path(__file__).parents[1])

    def show(message: Warning | str, category: type[Warning], filename: str, *_: object, **__: object) -> None:
        ours = filename.startswith(home) and not issubclass(category, DeprecationWarning | FutureWarning)
        text = one_line(with_options_named(str(message), options))
        if text in kept or not (ours or every):
            return
        if ours:
            kept.append(text)
        complain("warning", text)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield


def plain(value: Any) -> Any:
    """The value for JSON: arrays become lists, numbers that are not finite null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (str, int, type(None))) else str(value)


def as_json(document: Mapping[str, Any]) -> str:
    return json.dumps(plain(document), indent=1, allow_nan=False)
