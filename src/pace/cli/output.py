"""What a command says: lines and tables on standard output, the rest on standard error."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pace.cli.errors import as_typed, one_line, visible

if TYPE_CHECKING:
    from rich.console import Console

    from pace.metrics import Scores

_FILE_WIDTH = 200  # columns where there is no terminal to fit


def on_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def console(stderr: bool = False) -> Console:
    from rich.console import Console

    terminal = on_terminal(sys.stderr if stderr else sys.stdout)
    # Names of files and classes are shown as they are: nothing in them is markup, an emoji or worth a colour.
    return Console(
        stderr=stderr,
        width=None if terminal else _FILE_WIDTH,
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=True,
    )


def say(text: str = "", style: str | None = None) -> None:
    console().print(visible(text), style=style)


def complain(kind: str, text: object) -> None:
    """One line on standard error."""
    out = console(stderr=True)
    out.print(f"{kind}: ", style="bold red" if kind == "error" else "yellow", end="")
    out.print(one_line(text))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = (0,)) -> None:
    """Columns in line: those of words at the left, those of numbers at the right."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for number, title in enumerate(head):
        shown.add_column(title, justify="left" if number in words else "right", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(one_line(cell)) for cell in row))
    console().print(shown, soft_wrap=False)


def show_scores(scores: Scores) -> None:
    arrows = {"higher": "higher is better", "lower": "lower is better", None: ""}
    rows = [
        [
            score.title,
            f"{score.value:.3g}",
            "" if score.low is None or score.low == score.high else f"{score.low:.3g} to {score.high:.3g}",
            arrows[score.better],
        ]
        for score in scores.values()
    ]
    table(["score", "value", "95 % interval", ""], rows, words=(0, 3))
    for warning in scores.warnings:
        say(f"! {warning}", style="yellow")
    say()


@contextmanager
def busy(what: str) -> Iterator[None]:
    """A sign of life on a terminal, for steps that cannot be counted."""
    if on_terminal(sys.stderr):
        with console(stderr=True).status(f"{what} …"):
            yield
    else:
        yield


@contextmanager
def warnings_in_one_line(kept: list[str], every: bool) -> Iterator[None]:
    """Warnings as lines on standard error, collected in `kept`. Those of other libraries only if `every`."""
    home = str(Path(__file__).parents[1])

    def show(message: Warning | str, category: type[Warning], filename: str, *_: object, **__: object) -> None:
        ours = filename.startswith(home) and not issubclass(category, DeprecationWarning | FutureWarning)
        text = one_line(as_typed(str(message)))
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
    """The value as JSON knows it: arrays are lists, numbers that are not finite are null."""
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
