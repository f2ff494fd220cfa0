"""`pace serve`, as a program: what it prints, answers and leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from in_process import invoke

import pace

pytest.importorskip("uvicorn")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_it_answers_at_the_address_it_prints_until_ctrl_c_and_writes_nothing(elsewhere: Path, workshop: Path):
    before = contents(workshop / "fit")
    arguments = [sys.executable, "-m", "pace", "serve", "shop/fit", "--images", "shop/flat", "--device", "cpu"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        address = next(line.strip() for line in lines if line.startswith("http://127.0.0.1:"))
        with urllib.request.urlopen(address, timeout=60) as page:
            text = page.read().decode()
        process.send_signal(signal.SIGINT)
        printed, complaints = process.communicate(timeout=60)
    assert (process.returncode, printed) == (0, "stopped\n")
    assert [line for line in complaints.splitlines() if not line.startswith("- ")] == []
    assert "<title>What the transformer sees in flat</title>" in text
    assert str(workshop) not in text
    assert contents(workshop / "fit") == before
    assert [file.name for file in elsewhere.iterdir()] == ["shop"]


def test_what_cannot_be_served_is_said_in_a_line(elsewhere: Path):
    assert invoke("serve").error == "error: no run in runs/; make one with `pace fit`, or name one with --run"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert (
            f"port {port} cannot be used (Address already in use)" in invoke("serve", "shop/fit", "--port", port).error
        )
    fitted = pace.explain_model("color", "shop/flat", 2, covariance="diag", max_iter=3, n_init=1, layer=0, device="cpu")
    pictures = [fitted.images[number] for number in range(4)]
    given = pace.explain_model("color", pictures, 2, covariance="diag", max_iter=3, n_init=1, layer=0, device="cpu")
    given.save("mine")
    assert "the images of this run were given in Python; name some with --images" in invoke("serve", "mine").error


def test_without_starlette_it_says_what_to_install(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    for name in [name for name in sys.modules if name.startswith("pace.serving")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(pace, "serving", raising=False)
    assert "pip install 'pace-xai[serve]'" in invoke("serve", "shop/fit").error
