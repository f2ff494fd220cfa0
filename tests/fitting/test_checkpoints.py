"""A fit that is stopped anywhere goes on and ends with the same bits. Processes that are killed: test_distributed."""

import errno
import os
import shutil

import numpy as np
import pytest
import torch
from fits import KINDS, drawn, fit, same_bits
from safetensors.torch import load_file

from pace import Observations
from pace.files import locked
from pace.fitting.checkpoints import Checkpoint, how_far, likeness, remove


class Crash(BaseException):
    """The power fails."""


def crash_after_writing(monkeypatch):
    write = Checkpoint.write

    def crash(self, *tensors):
        write(self, *tensors)
        raise Crash

    monkeypatch.setattr(Checkpoint, "write", crash)


def stopped(folder, monkeypatch):
    """The folder of a fit that ended after its first epoch."""
    for _ in range(2):  # a checkpoint of the start, and one of the epoch
        with monkeypatch.context() as patch:
            crash_after_writing(patch)
            with pytest.raises(Crash):
                fit(checkpoint=folder)
    return folder


@pytest.fixture(scope="module")
def whole():
    return fit()


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_after_every_checkpoint_it_ends_as_if_nothing_had_happened(kind, tmp_path, monkeypatch):
    folder = tmp_path / "fit"
    reached = [(step, 0) for step in range(5 if "online" in kind else 3)]  # minibatches or epochs, steps of refining
    # What ends with a pass over both views: refined, or by no steps.
    reached += {"parts and kinds": [(2, 3)], "many images": [(2, 0)], "parts and kinds online": [(4, 0)]}.get(kind, [])
    with monkeypatch.context() as patch:
        crash_after_writing(patch)
        for done in [*reached, reached[-1]]:  # once more for the end
            with pytest.raises(Crash):
                fit(kind, checkpoint=folder, keep=True)
            assert how_far(folder) == done
            assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}  # no code
            if "online" in kind:  # keeps nothing of an image
                assert [load_file(file) for file in folder.glob("own-*")] == [{}]

    def work(*_):
        raise AssertionError("everything is done already")

    for place in ("start.draw_sample", "loop.expect", "loop.refine_kinds"):
        monkeypatch.setattr(f"pace.fitting.{place}", work)
    finished = fit(kind, checkpoint=folder, keep=True)
    monkeypatch.undo()
    same_bits(finished, fit(kind))
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

        with monkeypatch.context() as patch:
            patch.setattr("pace.fitting.checkpoints.write_atomically", crash)
            patch.setattr("pace.files.write_atomically", crash)
            with pytest.raises(Crash):
                fit(checkpoint=folder)
        assert how_far(folder).done == (2 if file == "index" and after else 1)
        same_bits(fit(checkpoint=folder), whole)
        assert os.listdir(tmp_path) == []


def test_nothing_is_written_before_it_is_time(tmp_path, monkeypatch):
    crash_after_writing(monkeypatch)
    fit(checkpoint=tmp_path / "fit", every=3600.0)
    assert os.listdir(tmp_path) == []


def test_files_of_others_in_the_folder_survive_and_do_not_disturb_the_fit(tmp_path, monkeypatch, whole):
    folder = stopped(tmp_path / "fit", monkeypatch)
    names = {"notes.safetensors", "own-data", "index.json.bak", "common-1.safetensors.old", "own-0-1.txt"}
    names |= {
        "common-77.safetensors",
        "own-7-1.safetensors",
        "own-0-99.safetensors.tmp",
    }  # of no set that the index names
    (folder / "own-data").mkdir()
    (folder / "own-data" / "own-0-1.safetensors").touch()
    for name in names - {"own-data"}:
        (folder / name).write_text("mine")
    same_bits(fit(checkpoint=folder), whole)
    assert set(os.listdir(folder)) == names
    assert os.listdir(folder / "own-data") == ["own-0-1.safetensors"]
    with pytest.raises(ValueError, match=r"holds .*, which is not of a checkpoint; choose another folder"):
        fit(checkpoint=folder)  # where no checkpoint is, files of others say that this is the wrong folder


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
            with pytest.raises(ValueError, match=r"^[^\n]* cannot be used: [^\n]*; remove the folder to begin anew$"):
                fit(checkpoint=folder)
            assert set(os.listdir(folder)) == set(content)
            if not file.startswith("own") and (name, file) != ("flipped", "index.json"):
                assert how_far(folder) is None


def test_without_an_index_nothing_in_the_folder_is_a_checkpoints(tmp_path, whole):
    """Not even what is called like one's files: they are there only after an index that names them."""
    folder = tmp_path / "fit"
    folder.mkdir()
    for name in ("common-1.safetensors", "own-0-1.safetensors"):
        (folder / name).write_text("mine")
        with pytest.raises(ValueError, match=rf"holds {name}, which is not of a checkpoint; choose another folder"):
            fit(checkpoint=folder)
        assert (folder / name).read_text() == "mine"
        (folder / name).unlink()
    (folder / "index.json.tmp").write_text("{")  # what a kill leaves at the very beginning
    same_bits(fit(checkpoint=folder), whole)
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_of_another_fit_is_refused_in_one_line(tmp_path, monkeypatch, whole):
    folder = stopped(tmp_path / "fit", monkeypatch)
    swapped = drawn(23)._replace(observations=drawn(23).perturbed)
    for change, message in (
        ({"n_concepts": 2}, "n_concepts was 3 and is 2; remove it to begin anew, or choose another folder"),
        ({"paired": False}, "another fit: perturbed was"),
        ({"data": swapped}, "another fit: observations was"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            fit(checkpoint=folder, **change)
        assert "\n" not in str(caught.value)
    index = folder / "index.json"
    index.write_text(index.read_text().replace("pace-checkpoint-", "pace-checkpoint-9"))
    with pytest.raises(
        ValueError, match=r"format: expected pace-checkpoint-.; found 'pace-checkpoint-9.'; remove the folder"
    ):
        fit(checkpoint=folder)
    index.write_text(index.read_text().replace("pace-checkpoint-9", "pace-checkpoint-"))
    resumed = fit(checkpoint=folder, memory="30kB", progress=False)  # these change no more than rounding
    np.testing.assert_allclose(resumed.means_, whole.means_, rtol=1e-4, atol=1e-5)


def test_a_place_or_time_that_cannot_be_is_refused_in_one_line(tmp_path):
    (tmp_path / "holiday.jpg").touch()
    with pytest.raises(ValueError, match=r"holds holiday.jpg, which is not of a checkpoint"):
        fit(checkpoint=tmp_path)
    with pytest.raises(ValueError, match="is a file; expected a folder"):
        fit(checkpoint=tmp_path / "holiday.jpg")
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere to keep the checkpoint"):
        fit(checkpoint=tmp_path / "nowhere" / "fit")
    with pytest.raises(ValueError, match="checkpoint_every: expected seconds, 0 or more; found -1"):
        fit(checkpoint=tmp_path / "fit", every=-1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_data_of_any_precision_are_told_apart(dtype):
    embeddings, attention = torch.rand(40, 7, 4).to(dtype), torch.ones(40, 7).to(dtype)
    other = embeddings.clone()
    other[0, 0, 0] += 1
    data = [Observations(e, attention[: len(e)]) for e in (embeddings, embeddings.clone(), other, embeddings[:39])]
    found = [likeness(some) for some in data]
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_two_fits_cannot_share_a_folder_and_a_killed_one_does_not_keep_it(tmp_path, monkeypatch, whole):
    folder = tmp_path / "fit"
    write = Checkpoint.write

    def meanwhile(self, *tensors):
        write(self, *tensors)
        with monkeypatch.context() as patch:
            patch.setattr(Checkpoint, "write", write)
            with pytest.raises(BlockingIOError, match="another fit keeps its checkpoint here; wait for it") as caught:
                fit(checkpoint=folder)
        assert caught.value.filename == str(folder)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "write", meanwhile)
        same_bits(fit(checkpoint=folder), whole)
    assert os.listdir(tmp_path) == []
    if hasattr(os, "fork"):
        child = os.fork()
        if child == 0:
            folder.mkdir()
            with locked(folder, ""):
                os._exit(9)  # the lock's file is still there
        os.waitpid(child, 0)
        assert os.listdir(folder) == ["lock"]
        same_bits(fit(checkpoint=folder), whole)
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("file", ["own", "common", "index"])
def test_a_full_disk_costs_the_checkpoint_but_not_the_fit(file, tmp_path, monkeypatch, whole):
    """What could be written before it was full is there for the next attempt."""
    import pace.fitting.checkpoints as module

    folder, real = stopped(tmp_path / "fit", monkeypatch), (module.save_tensors, module.write_atomically)

    def full(real):
        def write(path, *what):
            if path.name.startswith(file):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            real(path, *what)

        return write

    with monkeypatch.context() as patch:
        patch.setattr(module, "save_tensors", full(real[0]))
        patch.setattr(module, "write_atomically", full(real[1]))
        with pytest.warns(UserWarning, match=f"{file}.*: No space left on device; the fit goes on") as caught:
            same_bits(fit(checkpoint=folder, keep=True), whole)
    assert all("space" in str(one.message) for one in caught)
    assert how_far(folder) == (1, 0)
    assert len(os.listdir(folder)) == 3
    same_bits(fit(checkpoint=folder), whole)
    assert os.listdir(tmp_path) == []


def test_killed_while_it_is_removed_a_checkpoint_is_not_resumed_and_goes_with_the_next(tmp_path, monkeypatch, whole):
    def crash(*_):
        raise Crash

    folder = stopped(tmp_path / "fit", monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr("pace.fitting.checkpoints._discard", crash)
        with pytest.raises(Crash):
            remove(folder)
    assert len(os.listdir(folder)) == 3
    assert how_far(folder) is None
    same_bits(fit(checkpoint=folder), whole)
    assert os.listdir(tmp_path) == []
