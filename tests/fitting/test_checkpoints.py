"""A fit that is stopped anywhere goes on and ends with the same bits. Processes that are killed: test_distributed."""

import os
import shutil
import warnings
from contextlib import suppress

import numpy as np
import pytest
import torch
from planted import planted
from sklearn.exceptions import ConvergenceWarning

from pace import PACE, Observations
from pace.fitting.checkpoints import Checkpoint, how_far, likeness, remove

DATA = planted(0, k=3, d=4, images=23, grid=(2, 3))
KINDS = {
    "full batch": {"covariance": "full"},
    "low rank": {"covariance": "low_rank"},
    "one view": {"covariance": "diag", "paired": False},
    "paper": {"updates": "paper"},
    "online": {"minibatch": 8},
    "refining": {"refine": 3, "max_iter": 1},
}


class Crash(BaseException):
    """The power fails."""


def fit(checkpoint=None, every=0.0, paired=True, keep=False, data=DATA, **parameters):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return PACE(**{"n_concepts": 3, "max_iter": 2, "n_init": 1, "device": "cpu"} | parameters).fit(
            data.observations,
            perturbed=data.perturbed if paired else None,
            checkpoint=checkpoint,
            checkpoint_every=every,
            keep_checkpoint=keep,
        )


def same_bits(one, two):
    for name in ("means_", "covariances_", "label_head_", "pair_weights_", "alpha_", "concept_weights_", "refinement_"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name), err_msg=name)
    assert one.lower_bounds_ == two.lower_bounds_
    assert (one.n_iter_, one.n_steps_, one.converged_) == (two.n_iter_, two.n_steps_, two.converged_)
    for name, tensor in one._statistics.tensors().items():
        assert tensor.equal(two._statistics.tensors()[name]), name


def crash_after_writing(monkeypatch):
    write = Checkpoint.write

    def crash(self, *tensors):
        write(self, *tensors)
        raise Crash

    monkeypatch.setattr(Checkpoint, "write", crash)


def stopped(folder, monkeypatch, **parameters):
    """The folder of a fit that ended after its first epoch."""
    for _ in range(2):  # a checkpoint of the start, and one of the epoch
        with monkeypatch.context() as patch, pytest.raises(Crash):
            crash_after_writing(patch)
            fit(folder, **parameters)
    return folder


@pytest.fixture(scope="module")
def whole():
    return fit()


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_after_every_checkpoint_it_ends_as_if_nothing_had_happened(kind, tmp_path, monkeypatch):
    folder, reached = tmp_path / "fit", []
    with monkeypatch.context() as patch:
        crash_after_writing(patch)
        while len(reached) < 9 and how_far(folder) not in reached[-1:]:  # the last attempt writes the end
            reached += [how_far(folder)] if folder.exists() else []
            with suppress(Crash):
                fit(folder, keep=True, **KINDS[kind])
            assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}  # no code
    expected = {"online": [(step, 0) for step in range(7)], "refining": [(0, 0), (1, 0), (1, 3)]}
    assert reached == expected.get(kind, [(0, 0), (1, 0), (2, 0)])

    def work(*_):
        raise AssertionError("everything is done already")

    for place in ("start.draw_sample", "loop.expect", "loop.refine"):
        monkeypatch.setattr(f"pace.fitting.{place}", work)
    finished = fit(folder, keep=True, **KINDS[kind])
    monkeypatch.undo()
    same_bits(finished, fit(**KINDS[kind]))
    remove(folder)
    assert not folder.exists()


@pytest.mark.parametrize("file", ["own", "common", "index"])
def test_stopped_while_a_checkpoint_is_written_the_one_before_it_counts(file, tmp_path, monkeypatch, whole):
    from pace.fitting.checkpoints import write_atomically

    for after in (False, True):
        folder = stopped(tmp_path / "fit", monkeypatch)

        def crash(path, *pieces, after=after):
            if not path.name.startswith(file) or after:
                write_atomically(path, *pieces)
            if path.name.startswith(file):
                raise Crash

        with monkeypatch.context() as patch, pytest.raises(Crash):
            patch.setattr("pace.fitting.checkpoints.write_atomically", crash)
            fit(folder)
        assert how_far(folder).done == (2 if file == "index" and after else 1)
        same_bits(fit(folder), whole)
        assert os.listdir(tmp_path) == []


def test_nothing_is_written_before_it_is_time(tmp_path, monkeypatch):
    crash_after_writing(monkeypatch)
    fit(tmp_path / "fit", every=3600.0)
    assert os.listdir(tmp_path) == []


def test_files_of_others_in_the_folder_survive_and_do_not_disturb_the_fit(tmp_path, monkeypatch, whole):
    folder = stopped(tmp_path / "fit", monkeypatch)
    names = {"notes.safetensors", "own-data", "index.json.bak", "common-1.safetensors.old", "own-0-1.txt"}
    (folder / "own-data").mkdir()
    (folder / "own-data" / "own-0-1.safetensors").touch()
    for name in names - {"own-data"}:
        (folder / name).write_text("mine")
    same_bits(fit(folder), whole)
    assert set(os.listdir(folder)) == names
    assert os.listdir(folder / "own-data") == ["own-0-1.safetensors"]
    with pytest.raises(ValueError, match=r"holds .*, which is not of a checkpoint; choose another folder"):
        fit(folder)  # where no checkpoint is, files of others say that this is the wrong folder


def test_a_damaged_checkpoint_is_refused_in_one_line_and_left_alone(tmp_path, monkeypatch, whole):
    good = stopped(tmp_path / "good", monkeypatch)
    assert how_far(good) == (1, 0)
    content = {path.name: path.read_bytes() for path in good.iterdir()}
    damages = {
        "cut": lambda file: content[file][:-40],
        "flipped": lambda file: content[file][:-9] + bytes([content[file][-9] ^ 0x80]) + content[file][-8:],
        "empty": lambda file: b"",
        "not ours": lambda file: b"[1]",
    }
    for file in content:
        for name, damage in damages.items():
            folder = tmp_path / f"{name} {file}"
            shutil.copytree(good, folder)
            (folder / file).write_bytes(damage(file))
            with pytest.raises(ValueError, match="^[^\n]* is damaged [^\n]*; remove it to begin anew$"):
                fit(folder)
            assert set(os.listdir(folder)) == set(content)
            if name != "flipped" and not file.startswith("own"):
                assert how_far(folder) is None
    (good / "index.json").unlink()  # as if none had been completed: begun anew
    assert how_far(good) is None
    same_bits(fit(good), whole)


def test_a_checkpoint_of_another_fit_is_refused_in_one_line(tmp_path, monkeypatch, whole):
    folder = stopped(tmp_path / "fit", monkeypatch)
    swapped = DATA._replace(observations=DATA.perturbed, perturbed=DATA.observations)
    for change, message in (
        ({"n_concepts": 2}, "n_concepts was 3 and is 2; remove it to begin anew, or choose another folder"),
        ({"paired": False}, "another fit: perturbed was"),
        ({"data": swapped}, "another fit: observations was"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            fit(folder, **change)
        assert "\n" not in str(caught.value)
    index = folder / "index.json"
    index.write_text(index.read_text().replace("pace-checkpoint-", "pace-checkpoint-9"))
    with pytest.raises(ValueError, match="has format pace-checkpoint-9.; this version reads pace-checkpoint-"):
        fit(folder)
    index.write_text(index.read_text().replace("pace-checkpoint-9", "pace-checkpoint-"))
    resumed = fit(folder, memory="30kB", progress=False)  # these change no more than rounding
    np.testing.assert_allclose(resumed.means_, whole.means_, rtol=1e-4, atol=1e-5)


def test_a_place_or_time_that_cannot_be_is_refused_in_one_line(tmp_path):
    (tmp_path / "holiday.jpg").touch()
    with pytest.raises(ValueError, match=r"holds holiday.jpg, which is not of a checkpoint"):
        fit(tmp_path)
    with pytest.raises(ValueError, match="is a file; expected a folder"):
        fit(tmp_path / "holiday.jpg")
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere to keep the checkpoint"):
        fit(tmp_path / "nowhere" / "fit")
    with pytest.raises(ValueError, match="checkpoint_every: expected seconds, 0 or more; found -1"):
        fit(tmp_path / "fit", every=-1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_data_of_any_precision_are_told_apart(dtype):
    embeddings, attention = torch.rand(40, 7, 4).to(dtype), torch.ones(40, 7).to(dtype)
    other = embeddings.clone()
    other[0, 0, 0] += 1
    data = [Observations(e, attention[: len(e)]) for e in (embeddings, embeddings.clone(), other, embeddings[:39])]
    found = [likeness(some) for some in data]
    assert found[0] == found[1]
    assert len(set(found)) == 3
