"""The installed program, in processes of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from in_process import MODEL, QUICK

PACE = [sys.executable, "-m", "pace"]


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PACE, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
        check=False,
    )


def test_help_needs_none_of_the_heavy_libraries(tmp_path: Path):
    program = "import sys; from pace.cli.app import app; print(' '.join(sys.modules))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "sklearn", "timm", "transformers", "matplotlib", "PIL"} & set(found)


def test_a_terminal_without_greek_letters_gets_question_marks(tmp_path: Path):
    done = run("fit", "--θ", cwd=tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 2
    assert "--?" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_help_on_a_terminal_keeps_the_example_line_by_line(tmp_path: Path):
    import pty

    parent, child = pty.openpty()
    with subprocess.Popen([*PACE, "fit", "--help"], cwd=tmp_path, stdout=child, stderr=child) as process:
        os.close(child)
        shown = b""
        try:
            while part := os.read(parent, 1 << 16):
                shown += part
        except OSError:  # how Linux says that the other end is closed
            pass
    os.close(parent)
    assert process.returncode == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())
    assert re.search(r"pace fit --images color --model color --concepts 8\s*\n\s*pace explain photo.jpg", plain)
    assert "Model" in plain  # options are grouped


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path):
    whole = subprocess.run(
        f"{sys.executable} -m pace fit --json | true",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in whole.stderr
    assert "Exception ignored" not in whole.stderr


@pytest.mark.skipif(os.name != "posix", reason="sends Ctrl-C the way terminals do")
def test_ctrl_c_ends_with_130_one_line_and_one_document(workshop: Path, tmp_path: Path):
    fit = ("fit", "--images", "photos", *MODEL, *QUICK, "--epochs", "100000000", "--json", "--out", tmp_path / "run")
    # Slowed, so that the signal comes while it learns.
    slow = (
        "import pathlib, sys, time, pace.fitting.loop as loop; expect = loop.expect; began = pathlib.Path(sys.argv.pop()); "
        "loop.expect = lambda *a, **o: (began.touch(), time.sleep(0.5), expect(*a, **o))[2]; "
    )
    program = [sys.executable, "-c", slow + "from pace.cli import main; main()"]
    began = tmp_path / "began"
    process = subprocess.Popen(
        [*program, *map(str, fit), str(began)],
        cwd=workshop,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Shells let what they start in the background ignore Ctrl-C, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    record = tmp_path / "run" / "run.json"
    until = time.monotonic() + 200
    while not began.exists() and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert sum(line.startswith("stopped: ") for line in err.splitlines()) == 1
    assert list(json.loads(out)) == ["error"]
    assert json.loads(record.read_bytes())["status"] == "interrupted"


def test_shells_can_complete_commands_options_and_images(tmp_path: Path):
    (tmp_path / "flowers-of-mine").mkdir()

    def complete(line: str) -> list[str]:
        words = line.split(" ")
        done = run(cwd=tmp_path, _PACE_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1))
        return done.stdout.split()

    assert {"fit", "finetune"} <= set(complete("pace fi"))
    assert "low_rank" in complete("pace fit --covariance l")
    assert complete("pace fit --images fl") == ["flower", "flowers-of-mine/"]
