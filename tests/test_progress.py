"""The progress bar: silent where nobody looks or nobody has to wait, and honest about how far it is."""

import sys
from types import SimpleNamespace

import pytest

from pace.progress import progress


@pytest.fixture
def wait(monkeypatch):
    """Lets seconds pass."""
    now = [100.0]
    monkeypatch.setattr("pace.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


@pytest.mark.parametrize("show", [None, False])
def test_nothing_is_written_where_there_is_no_terminal(show, wait, capsys):
    with progress("counting", 3, show) as advance:
        wait(60)
        advance(2, "a note")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("total", "done", "shown"), [(30, 0, "7/30"), (30, 20, "27/30"), (None, 0, "7/?")])
def test_it_is_shown_at_once_when_asked_for(total, done, shown, capsys):
    with progress("counting", total, show=True, done=done) as advance:
        advance(7, "a note")
    out, err = capsys.readouterr()
    assert out == ""
    assert all(text in err for text in ("counting", shown, "a note"))


def test_on_a_terminal_it_appears_after_a_second(wait, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress("counting", 30) as advance:
        wait(0.9)
        advance(10)
        assert capsys.readouterr().err == ""
        wait(0.2)
        advance(5)
    assert "15/30" in capsys.readouterr().err


def test_an_error_is_raised_and_the_bar_ends(capsys):
    def fail():
        with progress("counting", 30, show=True) as advance:
            advance(4)
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fail()
    assert "4/30" in capsys.readouterr().err


def test_rounds_count_images_again_from_the_start(capsys):
    with progress("learning", 30, show=True, rounds=True) as advance:
        advance(30)
        advance(12)
    assert "12/30" in capsys.readouterr().err


def test_a_command_says_early_how_long_a_stage_takes_and_at_the_end_how_long_it_took(wait, monkeypatch, capsys):
    monkeypatch.setattr("pace.progress.lines", True)
    with progress("observing", 30) as advance:
        wait(2)
        advance(3)
        assert capsys.readouterr().err == "- observing: 30 images, about 20 s\n"
        wait(17)
        advance(27)
    assert capsys.readouterr().err == "- observing: 19.0 s\n"
    with progress("quick", 3):
        wait(0.5)
    assert capsys.readouterr().err == ""


def test_what_the_notes_tell_of_are_stages_with_a_time_each(wait, monkeypatch, capsys):
    monkeypatch.setattr("pace.progress.lines", True)
    with progress("learning", 30, rounds=True) as advance:
        advance(0, "finding parts")
        wait(2)
        advance(30, "epoch 1")
        advance(30, "epoch 2, bound -3.5")
        wait(5)
        advance(30, "refining")
    assert capsys.readouterr().err.splitlines() == [
        "- learning, finding parts: 2.0 s",
        "- learning, epoch: 5.0 s",
        "- learning: 7.0 s",
    ]
