import os
import warnings

import numpy as np
import pytest
import torch
from fits import KINDS, drawn, fit, same_bits
from safetensors.torch import save_file

from pace import PACE, Observations
from pace.files import DamagedFile, read_tensors, save_tensors

DATA = drawn(23)


@pytest.fixture(scope="module")
def model():
    return fit()


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_model_is_the_saved_one(tmp_path, kind):
    model = fit(kind)
    model.save(tmp_path / "concepts.safetensors", statistics=True)
    again = PACE.load(tmp_path / "concepts.safetensors")
    same_bits(again, model)
    assert again.get_params() == model.get_params() | {"device": None}
    for name in ("n_iter_", "n_features_in_", "interrupted_", "updates_"):
        assert getattr(again, name) == getattr(model, name), name
    if kind == "number found":
        assert torch.equal(again.selection_.bounds, model.selection_.bounds)
    np.testing.assert_array_equal(again.explain(DATA.perturbed).phi, model.explain(DATA.perturbed).phi)
    assert os.listdir(tmp_path) == ["concepts.safetensors"]


def test_any_value_that_a_parameter_may_have_can_be_saved(tmp_path):
    numbers = {"alpha": np.full(3, 0.3), "seed": np.uint8(1), "n_concepts": np.int64(3), "memory": np.float64(1e9)}
    fit(**numbers, dtype=torch.float64, device=torch.device("cpu")).save(tmp_path / "m.safetensors", statistics=True)
    again = PACE.load(tmp_path / "m.safetensors", device="cpu")
    assert (again.alpha, again.seed, again.dtype) == ([0.3] * 3, 1, "float64")
    assert np.isfinite(again.partial_fit(DATA.perturbed).means_).all()


def test_a_loaded_model_knows_whether_cls_counted(tmp_path, model):
    model.save(tmp_path / "m.safetensors")
    again, seen = PACE.load(tmp_path / "m.safetensors"), DATA.observations
    patches = Observations(seen.embeddings[:, 1:], seen.attention[:, 1:], seen.predictions, seen.grid)
    with pytest.warns(UserWarning, match="0 instead of 1 tokens before the patches count: count_cls"):
        again.transform(patches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.transform(seen)


def test_online_learning_goes_on_after_loading_as_if_nothing_had_happened(tmp_path):
    for model, statistics in ((PACE(3, device="cpu").partial_fit(DATA.observations), None), (fit(), True)):
        model.save(tmp_path / "m.safetensors", statistics=statistics)
        again = PACE.load(tmp_path / "m.safetensors", device="cpu").partial_fit(DATA.perturbed)
        np.testing.assert_array_equal(again.means_, model.partial_fit(DATA.perturbed).means_)
    fit().save(tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="saved without its statistics"):
        PACE.load(tmp_path / "m.safetensors").partial_fit(DATA.perturbed)


def test_parameters_set_after_the_fit_do_not_spoil_the_file(tmp_path):
    model = fit()
    means = model.means_
    model.set_params(covariance="diag", n_concepts=99, alpha=[np.float32(1)]).save(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(PACE.load(tmp_path / "m.safetensors").means_, means)


@pytest.mark.parametrize("moment", ["fsync", "replace"])  # the end of writing, and the rename
def test_a_crash_while_saving_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, moment, model):
    path = tmp_path / "m.safetensors"
    model.save(path)
    before = path.read_bytes()

    def crash(*anything):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, moment, crash)
    with pytest.raises(OSError, match="no space"):
        model.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_truncated_foreign_and_missing_files_are_refused_in_one_line(tmp_path, model):
    path = tmp_path / "m.safetensors"
    model.save(path)
    content = path.read_bytes()
    for name, cut in (("half", content[: len(content) // 2]), ("text", b"not a model at all"), ("empty", b"")):
        (tmp_path / name).write_bytes(cut)
    save_file({"weight": torch.zeros(3)}, tmp_path / "foreign")
    for name in ("half", "text", "empty", "foreign"):
        with pytest.raises(
            DamagedFile, match=f"^[^\n]*{name} cannot be used: [^\n]*; make it again with PACE.save[^\n]*$"
        ):
            PACE.load(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="no model file at"):
        PACE.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no folder"):
        model.save(tmp_path / "no" / "m.safetensors")


def test_no_bit_of_a_file_can_change_unnoticed(tmp_path, model):
    path = tmp_path / "m.safetensors"
    model.save(path)
    content = path.read_bytes()
    for place in range(0, len(content), 17):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :])
        with pytest.raises(DamagedFile):
            PACE.load(path)
    path.write_bytes(content + b" ")
    with pytest.raises(DamagedFile):
        PACE.load(path)


@pytest.mark.parametrize("kind", ["low rank", "parts and kinds", "number found"])
def test_tensors_that_are_no_concepts_are_refused_even_with_a_right_checksum(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    path = tmp_path / "m.safetensors"
    fit(kind).save(path, statistics=True)
    tensors, header = read_tensors(path, dict, "")
    free = {"refinement", "neighbours"}  # of any length
    for name in sorted(tensors.keys() - free):
        given = tensors[name]
        changes = [None, torch.stack([given, given]), torch.full_like(given.double(), torch.nan)]
        changes += [given[:-1], torch.cat([given, given[:1]])] if given.ndim and name != "lower_bounds" else []
        if name in (
            "alpha",
            "share_prior",
            "gaussians.variances",
            "nest.kind_shares",
            "pair_weights",
        ):
            changes.append(torch.full_like(given, -1e30))
        if name in ("alpha", "offset", "gaussians.means", "label_head", "nest.means", "evidence"):
            changes.append(given.to(torch.float64 if given.dtype == torch.float32 else torch.float32))
        for change in changes:
            if name in ("concept_weights", "selection.evidence") and change is changes[2]:
                continue  # may be NaN
            save_tensors(path, {n: t for n, t in (tensors | {name: change}).items() if t is not None}, header)
            with pytest.raises(DamagedFile, match=r"^[^\n]* cannot be used: [^\n]*$"):
                PACE.load(path)
    for key, value in (("format", "pace-model-99"), ("covariance", "other"), ("updates_", 3), ("n_steps_", -1),
                       ("parameters", {"n_concepts": 3, "colour": "red"}),
                       ("parameters", header["parameters"] | {"seed": -1}),
                       ("parameters", header["parameters"] | {"dtype": 0}), ("prior_strength", "strong")):  # fmt: skip
        save_tensors(path, tensors, header | {key: value})
        with pytest.raises(DamagedFile):
            PACE.load(path)
