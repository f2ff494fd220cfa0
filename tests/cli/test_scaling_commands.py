"""`pace fit` with more data than memory, on more than one process, and after it was killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import MODEL, QUICK, Pace, invoke

from pace import PACE
from pace.cli.errors import line_of


def concepts(folder: Path) -> PACE:
    return PACE.load(folder / "concepts.safetensors", device="cpu")


def test_minibatches_learn_straight_from_the_images(pace: Pace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("everything was observed at once")

    monkeypatch.setattr("pace.observing.extract.observe_pair", never)
    fit = ("fit", "--images", "photos", *MODEL, *QUICK, "--minibatch", "5", "--out", tmp_path / "run", "--json")
    document = pace(*fit).document
    assert document["results"]["minibatches"] == 12
    assert document["results"]["epochs"] == 4
    assert concepts(tmp_path / "run").n_steps_ == 12
    assert not (tmp_path / "run" / "checkpoint").exists()
    assert pace("explain", "flat/0.png", "--run", tmp_path / "run", "--out", tmp_path / "explained").code == 0


def test_a_gallery_of_many_images_is_drawn_from_a_sample(pace: Pace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pace.model_explainer._GALLERY_SAMPLE", 4)
    fit = ("fit", "--images", "photos", *MODEL, *QUICK, "--minibatch", "5", "--out", tmp_path / "run")
    assert pace(*fit).code == 0
    gallery = json.loads((tmp_path / "run" / "gallery.json").read_bytes())
    shown = {name for row in gallery["images"] for name in row}
    assert len(shown) <= 4
    photos = Path("photos/train")
    assert all((photos / name).is_file() or (photos.parent / name).is_file() for name in shown)


@pytest.mark.parametrize(
    "how",
    [(), ("--minibatch", "5"), ("--covariance", "tied", "--parts", "2", "--epochs", "1", "--refine", "3")],
    ids=["epochs", "minibatches", "refining"],
)
def test_a_killed_fit_resumes_with_the_same_command(
    how: tuple[str, ...], pace: Pace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from pace.fitting.checkpoints import Checkpoint

    fit = ("fit", "--images", "photos", *MODEL, *QUICK, *how, "--checkpoint-every", "0", "--out")
    whole = pace(*fit, tmp_path / "whole")
    assert whole.code == 0
    assert "resuming" not in whole.out
    write, written = Checkpoint.write, []

    def killed(self: Checkpoint, *tensors: Any) -> None:
        write(self, *tensors)
        written.append(1)
        if len(written) == 3:
            raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "write", killed)
        assert "killed" in pace(*fit, tmp_path / "killed").error
    checkpoint = tmp_path / "killed" / "checkpoint"
    other = pace(*fit, tmp_path / "killed", "--concepts", "2")
    assert "--concepts was 3 and is 2" in other.error
    resumed = pace(*fit, tmp_path / "killed")
    assert resumed.code == 0
    assert f"resuming from {checkpoint}" in resumed.out.splitlines()
    assert np.array_equal(concepts(tmp_path / "killed").means_, concepts(tmp_path / "whole").means_)
    assert not checkpoint.exists()


# A worker that is killed in the middle of an epoch, the first time it gets there.
SHAKY = """
import os, signal
from pace.fitting import loop
from pace.fitting.checkpoints import Checkpoint
expect, load, passes = loop.expect, Checkpoint.load, []

def shaky(*args, **options):
    passes.append(1)
    if len(passes) == 3 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return expect(*args, **options)

def resumed(self):
    found = load(self)
    if found is not None:
        open(f"resumed-{os.environ['RANK']}", "w").close()
    return found

loop.expect, Checkpoint.load = shaky, resumed
from pace.cli import main
main()
"""


def torchrun(program: str, *arguments: str, cwd: Path, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """`pace` on two processes, changed by a program."""
    (cwd / "changed.py").write_text(program)
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    return subprocess.run(
        [*start, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "changed.py", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def fit_in_the_shop(folder: Path, workshop: Path) -> tuple[str, ...]:
    (folder / "shop").symlink_to(workshop, target_is_directory=True)
    model = ("--model", "shop/tiny.safetensors", *MODEL[2:])
    return ("fit", "--images", "shop/photos", *model, *QUICK, "--device", "cpu", "--checkpoint-every", "0")


def test_a_process_that_is_left_alone_says_so():
    line = line_of(RuntimeError("[pair.cc:553] Read error [::1]:1 gloo Connection reset by peer"))
    assert line.startswith("another process ended; if it was killed, torchrun --max-restarts 3 resumes")
    assert "another process" not in line_of(RuntimeError("anything else"))


@pytest.mark.skipif(os.name != "posix", reason="kills a process the way the kernel does")
def test_torchrun_restarts_a_killed_worker_from_the_checkpoint(workshop: Path, tmp_path: Path):
    fit = fit_in_the_shop(tmp_path, workshop)
    done = torchrun(SHAKY, *fit, "--out", "two", "--json", cwd=tmp_path, restarts=1)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    # One document, also if the first attempt ended with an error.
    assert json.loads(done.stdout)["status"] == "finished"
    assert {path.name for path in tmp_path.glob("resumed-*")} == {"resumed-0", "resumed-1"}
    assert not (tmp_path / "two" / "checkpoint").exists()
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        assert invoke(*fit, "--out", "one").code == 0
    finally:
        os.chdir(before)
    one, two = concepts(tmp_path / "one"), concepts(tmp_path / "two")
    # One process learns from what it kept, in float16.
    np.testing.assert_allclose(two.means_, one.means_, rtol=1e-2, atol=2e-3)
    np.testing.assert_allclose(np.array(two.lower_bounds_), np.array(one.lower_bounds_), rtol=1e-2)
