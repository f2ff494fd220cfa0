"""A fit that is stopped anywhere goes on and ends with the same bits."""

import json
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from planted import planted
from sklearn.exceptions import ConvergenceWarning

from pace import PACE, Observations
from pace.fitting.checkpoints import Checkpoint, how_far, remove
from pace.model import learning

DATA = planted(0, k=3, d=4, images=23, grid=(2, 3))
QUICK = {"n_concepts": 3, "negatives": 5, "batch_size": 10, "max_iter": 2, "max_sweeps": 4, "head_steps": 3, "n_init": 1,
         "device": "cpu"}  # fmt: skip
KINDS = {
    "full batch": {"covariance": "full"},
    "low rank": {"covariance": "low_rank", "rank": 2},
    "one view": {"covariance": "diag", "paired": False},
    "online": {"minibatch": 8},
    "refining": {"refine": 3, "max_iter": 1},
}


class Crash(BaseException):
    """The power fails."""


def fit(checkpoint=None, every=0.0, paired=True, keep=False, **parameters):
    chosen = QUICK | parameters
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return PACE(**chosen).fit(
            DATA.observations,
            perturbed=DATA.perturbed if paired else None,
            checkpoint=checkpoint,
            checkpoint_every=every,
            keep_checkpoint=keep,
        )


def same_bits(one, two):
    names = ("means_", "covariances_", "label_head_", "pair_weights_", "alpha_", "concept_weights_", "refinement_")
    assert all(np.array_equal(getattr(one, name), getattr(two, name)) for name in names)
    assert one.lower_bounds_ == two.lower_bounds_
    assert (one.n_iter_, one.n_steps_, one.converged_) == (two.n_iter_, two.n_steps_, two.converged_)
    for name, tensor in one._statistics.tensors().items():
        assert tensor.equal(two._statistics.tensors()[name]), name


def crashing(monkeypatch, name, call):
    """The power fails right after this call of a method of `Checkpoint`, or right before it for a negative number."""
    real, calls = getattr(Checkpoint, name), []

    def crash(self, *arguments):
        calls.append(1)
        if len(calls) == -call:
            raise Crash
        result = real(self, *arguments)
        if len(calls) == call:
            raise Crash
        return result

    monkeypatch.setattr(Checkpoint, name, crash)


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_after_any_checkpoint_it_ends_as_if_nothing_had_happened(kind, tmp_path, monkeypatch):
    whole = fit(**KINDS[kind])
    stops = 0
    while True:
        with monkeypatch.context() as patch:
            crashing(patch, "write", stops + 1)
            try:
                finished = fit(tmp_path / "fit", **KINDS[kind])
                break
            except Crash:
                stops += 1
        same_bits(fit(tmp_path / "fit", **KINDS[kind]), whole)
        assert not (tmp_path / "fit").exists()
    same_bits(finished, whole)
    assert stops >= 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_that_is_kept_holds_the_end(kind, tmp_path, monkeypatch):
    """So that nothing is lost where what was learned cannot be saved."""
    whole = fit(tmp_path / "fit", every=1e9, keep=True, **KINDS[kind])

    def work(*_):
        raise AssertionError("everything is done already")

    monkeypatch.setattr("pace.fitting.loop.Expectation.add", work)
    monkeypatch.setattr("pace.fitting.loop.refine", work)
    same_bits(fit(tmp_path / "fit", keep=True, **KINDS[kind]), whole)
    same_bits(fit(tmp_path / "fit", keep=True, **KINDS[kind]), whole)
    remove(tmp_path / "fit")
    assert not (tmp_path / "fit").exists()


def test_after_ctrl_c_the_same_call_goes_on_also_with_a_warm_start(tmp_path, monkeypatch):
    whole = fit(warm_start=True)
    model = PACE(**QUICK, warm_start=True)
    again = partial(
        model.fit, DATA.observations, perturbed=DATA.perturbed, checkpoint=tmp_path / "fit", checkpoint_every=0
    )
    with monkeypatch.context() as patch:
        interrupted_at(patch, 2)
        with pytest.warns(ConvergenceWarning, match="interrupted"):
            again()
    assert len(model.lower_bounds_) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        same_bits(again(), whole)


def interrupted_at(monkeypatch, call):
    calls = []

    def update(*arguments):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return learning.update(*arguments)

    monkeypatch.setattr("pace.fitting.loop.update", update)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_observations_of_any_precision_have_a_checkpoint(dtype, tmp_path):
    seen = DATA.observations.batch(slice(None))
    some = Observations(seen.embeddings.to(dtype), seen.attention.to(dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        PACE(**QUICK).fit(some, checkpoint=tmp_path / "fit")


def test_stopped_again_and_again_it_still_gets_there(tmp_path, monkeypatch):
    """Every attempt manages two checkpoints more; the first of these must not be lost."""
    whole, attempts = fit(), 0
    while True:
        attempts += 1
        with monkeypatch.context() as patch:
            crashing(patch, "write", 2)
            try:
                finished = fit(tmp_path / "fit")
                break
            except Crash:
                continue
    same_bits(finished, whole)
    assert attempts >= 4


@pytest.mark.parametrize("name", ["_put", "_file"])
def test_stopped_while_a_checkpoint_is_written_the_one_before_it_counts(name, tmp_path, monkeypatch):
    whole = fit()
    for call in (3, -3, 4, -4, 5):
        with monkeypatch.context() as patch:
            crashing(patch, name, call)
            with pytest.raises(Crash):
                fit(tmp_path / "fit")
        same_bits(fit(tmp_path / "fit"), whole)


PROGRAM = """
import os, random, signal, sys, time
sys.path.insert(0, sys.argv[1])
import torch
import test_checkpoints as t
torch.set_num_threads(1)  # a forked process cannot have the threads of the one it came from
os.chdir(sys.argv[2])
options = {**t.KINDS[sys.argv[3]], "max_iter": 4}
t.fit(**options).save("whole.safetensors", statistics=True)
random.seed(len(sys.argv[3]))
kills, longest = 0, 0.02
while not os.path.exists("killed.safetensors"):
    child = os.fork()
    if child == 0:
        t.fit("fit", **options).save("killed.safetensors", statistics=True)
        os._exit(0)
    time.sleep(random.uniform(0, longest))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    kills, longest = kills + 1, longest * 1.1
print(kills)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes the way the kernel does")
@pytest.mark.parametrize("kind", ["full batch", "online", "refining"])
def test_killed_at_random_moments_it_ends_with_the_same_bits(kind, tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), str(tmp_path), kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 5
    same_bits(*(PACE.load(tmp_path / f"{name}.safetensors", device="cpu") for name in ("killed", "whole")))
    assert not (tmp_path / "fit").exists() or not os.listdir(tmp_path / "fit")


def stopped(folder, monkeypatch, **parameters):
    with monkeypatch.context() as patch:
        crashing(patch, "write", 3)
        with pytest.raises(Crash):
            fit(folder, **parameters)
    return folder


@pytest.mark.parametrize(
    ("kind", "reached"),
    [
        # The start, two parts of each of two epochs and their ends; the minibatches; an epoch, then three steps of refining.
        ("one view", {(0, 0), (1, 0), (2, 0)}),
        ("online", {(done, 0) for done in range(7)}),
        ("refining", {(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)}),
    ],
)
def test_a_checkpoint_says_how_far_it_is(kind, reached, tmp_path, monkeypatch):
    write, found = Checkpoint.write, []

    def watched(self, saved):
        write(self, saved)
        found.append(how_far(tmp_path / "fit"))

    monkeypatch.setattr(Checkpoint, "write", watched)
    fit(tmp_path / "fit", **KINDS[kind])
    assert set(found) == reached
    assert found == sorted(found)


def test_where_there_is_no_whole_checkpoint_nothing_is_said_of_it(tmp_path, monkeypatch):
    assert how_far(tmp_path / "fit") is None
    folder = stopped(tmp_path / "fit", monkeypatch)
    (common,) = folder.glob("common-*")
    for content in (common.read_bytes()[:-40], b""):
        common.write_bytes(content)
        assert how_far(folder) is None
    common.unlink()
    assert how_far(folder) is None
    for content in ("", "[]", "{}", '{"number": []}'):
        (folder / "index.json").write_text(content)
        assert how_far(folder) is None


def test_nothing_is_written_before_it_is_time(tmp_path, monkeypatch):
    crashing(monkeypatch, "write", 1)
    fit(tmp_path / "fit", every=3600.0)
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_of_other_settings_or_data_is_refused_in_one_line(tmp_path, monkeypatch):
    folder = stopped(tmp_path / "fit", monkeypatch)
    with pytest.raises(ValueError, match="n_concepts was 3 and is 2; remove it to begin anew") as caught:
        fit(folder, n_concepts=2)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="checkpoint of another fit: perturbed was"):
        fit(folder, paired=False)
    other = Observations(DATA.perturbed.embeddings, DATA.perturbed.attention, DATA.perturbed.predictions)
    monkeypatch.setattr("test_checkpoints.DATA", DATA._replace(observations=other))
    with pytest.raises(ValueError, match="checkpoint of another fit: observations was"):
        fit(folder)


def test_a_warm_fit_goes_on_from_its_own_checkpoint_only(tmp_path, monkeypatch):
    def warm(seed):
        return fit(seed=seed, max_iter=1).set_params(warm_start=True, max_iter=4, seed=0)

    def go_on(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return model.fit(
                DATA.observations, perturbed=DATA.perturbed, checkpoint=tmp_path / "fit", checkpoint_every=0
            )

    with monkeypatch.context() as patch:
        crashing(patch, "write", 3)
        with pytest.raises(Crash):
            go_on(warm(0))
    with pytest.raises(ValueError, match="checkpoint of another fit: start was"):
        go_on(warm(1))
    undisturbed = warm(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        undisturbed.fit(DATA.observations, perturbed=DATA.perturbed)
    same_bits(go_on(warm(0)), undisturbed)


def test_the_batch_size_may_change_and_the_bits_stay(tmp_path, monkeypatch):
    same_bits(fit(stopped(tmp_path / "fit", monkeypatch), batch_size=1), fit())


@pytest.mark.parametrize("spoil", ["cut", "flip", "remove"])
@pytest.mark.parametrize("file", ["common", "own-0", "index"])
def test_a_damaged_checkpoint_is_an_error_that_names_it(file, spoil, tmp_path, monkeypatch):
    folder = stopped(tmp_path / "fit", monkeypatch)
    (path,) = folder.glob(f"{file}*")
    content = bytearray(path.read_bytes())
    if spoil == "flip":
        content[len(content) // 2] ^= 0x80
    path.write_bytes(content[:-40] if spoil == "cut" else content)
    if spoil == "remove":
        path.unlink()
        if file == "index":  # a fit that never wrote one: begun anew
            same_bits(fit(folder), fit())
            return
    with pytest.raises(ValueError, match=r"the checkpoint .*fit is damaged .*; remove it to begin anew"):
        fit(folder)


def test_a_folder_with_other_things_in_it_is_not_taken(tmp_path):
    (tmp_path / "holiday.jpg").touch()
    with pytest.raises(ValueError, match=r"holds holiday.jpg, which is not of a checkpoint"):
        fit(tmp_path)
    with pytest.raises(ValueError, match="is a file; expected a folder"):
        fit(tmp_path / "holiday.jpg")
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere to keep the checkpoint"):
        fit(tmp_path / "nowhere" / "fit")
    with pytest.raises(ValueError, match="checkpoint_every: expected seconds, 0 or more; found -1"):
        fit(tmp_path / "fit", every=-1.0)


def test_a_checkpoint_holds_no_code(tmp_path, monkeypatch):
    folder = stopped(tmp_path / "fit", monkeypatch)
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
    assert json.loads((folder / "index.json").read_bytes())["format"] == "pace-checkpoint-2"


def test_ctrl_c_leaves_the_checkpoint_to_go_on_from(tmp_path, monkeypatch):
    import pace.fitting.loop

    update = pace.fitting.loop.update

    def interrupt(*arguments):
        monkeypatch.setattr(pace.fitting.loop, "update", update)
        raise KeyboardInterrupt

    monkeypatch.setattr(pace.fitting.loop, "update", interrupt)
    assert fit(tmp_path / "fit").interrupted_
    assert (tmp_path / "fit" / "index.json").is_file()
    same_bits(fit(tmp_path / "fit"), fit())
