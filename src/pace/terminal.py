"""What reaches a terminal. Names of files and classes, arguments and messages may hold anything; here they lose it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

_LONGEST = 600  # characters of a line; some libraries print whole state dictionaries


def visible(text: str) -> str:
    """Without line breaks, escape sequences, and characters that reverse or hide others."""
    return "".join(c if c.isprintable() else "�" for c in text)


def one_line(text: object) -> str:
    clean = visible(" ".join(str(text).split()))
    return clean if len(clean) <= _LONGEST else clean[:_LONGEST] + " …"


class CleanConsole(Console):
    """Takes no text for markup or emoji, and sends no escape sequences but its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def render(self, *args: Any, **options: Any) -> Iterable[Segment]:
        for text, style, control in super().render(*args, **options):
            yield Segment(text if control else "\n".join(map(visible, text.split("\n"))), style, control)
