"""Names, arguments and messages cannot steer the terminal they are printed on."""

from __future__ import annotations

import io
import sys

import pytest
from rich.table import Table
from typer.main import get_command

from pace.cli import output
from pace.cli.app import app
from pace.progress import announce, progress
from pace.terminal import CleanConsole

HOSTILE = "a\x1b[2J\x9b1m\u202e[/x][red]:ok:"
SHOWN = "a�[2J�1m�[/x][red]:ok:"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def waiting() -> None:
    with output.busy(HOSTILE) as status:
        output.console(stderr=True).print(status.renderable)


def bar() -> None:
    with progress(HOSTILE, 1, show=True) as advance:
        advance(note=HOSTILE)


@pytest.mark.parametrize(
    "show",
    [
        lambda: output.say(HOSTILE),
        lambda: output.complain("error", HOSTILE),
        lambda: output.table([HOSTILE, ""], [["", ""]]),
        lambda: output.table(["", ""], [[HOSTILE, ""]]),
        lambda: output.console().print(Table("column", title=HOSTILE, width=60)),
        lambda: announce(HOSTILE),
        waiting,
        bar,
    ],
    ids=["line", "error", "head of a table", "cell", "title", "announcement", "status", "progress"],
)
def test_nothing_that_is_printed_holds_markup_or_escape_sequences(show, monkeypatch: pytest.MonkeyPatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "dumb")  # no escape sequences of rich's own
    monkeypatch.setenv("COLUMNS", "200")
    show()
    text = terminal.getvalue()
    assert SHOWN[:12] in text  # bars may be narrow
    assert all(c.isprintable() or c == "\n" for c in text.replace("\r", "")), text


def test_the_consoles_own_colours_stay():
    shown = Terminal()
    CleanConsole(file=shown, force_terminal=True, color_system="standard", width=80).print("a\x1b[2J", style="red")
    assert shown.getvalue() == "\x1b[31ma�[2J\x1b[0m\n"


@pytest.mark.parametrize(("restarts", "documents"), [("0", 0), ("1", 1)])
def test_one_document_is_printed_although_torchrun_starts_a_failed_process_again(
    restarts: str, documents: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    for mistake in (["fit", "--imagse", "--json"], ["fit", "--json"]):
        assert get_command(app).main(mistake, standalone_mode=False) in (1, 2)
        assert capsys.readouterr().out.count('"error"') == documents
