"""The progress bar: silent where nobody looks or nobody has to wait, and honest about how far it is."""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from pace.progress import progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets seconds pass."""
    now = [100.0]
    monkeypatch.setattr("pace.progress.time", SimpleNamespace(monotonic=lambda: now[0]))

    def wait(seconds: float) -> None:
        now[0] += seconds

    return wait


@pytest.mark.parametrize("show", [None, False])
def test_nothing_is_written_where_there_is_no_terminal(
    show: bool | None, clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("counting", 3, show) as advance:
        clock(60)
        advance(2, "a note")
        advance()
    assert capsys.readouterr() == ("", "")


def test_it_is_shown_at_once_when_asked_for(clock: Callable[[float], None], capsys: pytest.CaptureFixture[str]) -> None:
    with progress("counting", 30, show=True) as advance:
        advance(7, "a note")
    out, err = capsys.readouterr()
    assert out == ""
    assert "counting" in err
    assert "7/30" in err
    assert "a note" in err


def test_what_was_done_before_counts(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("counting", 30, show=True, done=20) as advance:
        advance(3)
    assert "23/30" in capsys.readouterr().err


def test_a_total_that_is_not_known_is_shown_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("counting", None, show=True) as advance:
        advance(3)
    assert "3/?" in capsys.readouterr().err


def test_on_a_terminal_it_appears_after_a_second(
    clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress("counting", 30) as advance:
        advance(5)
        clock(0.9)
        advance(5)
        assert capsys.readouterr().err == ""
        clock(0.2)
        advance(5)
    err = capsys.readouterr().err
    assert "counting" in err
    assert "15/30" in err


def test_what_fails_is_raised_and_the_bar_ends(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with progress("counting", 30, show=True) as advance:
            advance(4)
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fail()
    assert "4/30" in capsys.readouterr().err
