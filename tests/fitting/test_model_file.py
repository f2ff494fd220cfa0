import json
import os
import warnings

import numpy as np
import pytest
import torch
from planted import planted
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pace import PACE, Observations

DATA = planted(0, images=40)


def fitted(**parameters):
    return PACE(6, rank=2, device="cpu", **parameters).fit(DATA.observations, perturbed=DATA.perturbed)


@pytest.mark.parametrize(
    "parameters", [{"covariance": c} for c in ("full", "diag", "tied", "low_rank")] + [{"updates": "paper"}]
)
def test_a_loaded_model_is_the_saved_one(tmp_path, parameters):
    model = fitted(**parameters)
    model.save(tmp_path / "concepts.safetensors")
    again = PACE.load(tmp_path / "concepts.safetensors")
    assert again.get_params() == model.get_params() | {"device": None}
    assert again.lower_bounds_ == model.lower_bounds_
    assert (again.n_iter_, again.converged_) == (model.n_iter_, model.converged_)
    for name in ("means_", "covariances_", "label_head_", "pair_weights_", "alpha_", "concept_weights_"):
        np.testing.assert_array_equal(getattr(again, name), getattr(model, name))
    np.testing.assert_array_equal(again.explain(DATA.perturbed).phi, model.explain(DATA.perturbed).phi)
    assert os.listdir(tmp_path) == ["concepts.safetensors"]


def test_a_loaded_model_knows_whether_cls_counted(tmp_path):
    fitted().save(tmp_path / "m.safetensors")
    model, seen = PACE.load(tmp_path / "m.safetensors"), DATA.observations
    patches = Observations(seen.embeddings[:, 1:], seen.attention[:, 1:], seen.predictions, seen.grid)
    assert (seen.prefix_tokens, patches.prefix_tokens) == (1, 0)
    with pytest.warns(UserWarning, match="0 instead of 1 tokens before the patches count: count_cls"):
        model.transform(patches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.transform(seen)


def test_arrays_and_dtypes_among_the_parameters_survive(tmp_path):
    model = fitted(alpha=np.full(6, 0.3), init=DATA.means[:6], dtype=torch.float64)
    model.save(tmp_path / "m.safetensors")
    again = PACE.load(tmp_path / "m.safetensors")
    assert again.dtype == "float64"
    np.testing.assert_array_equal(again.init, DATA.means[:6])


def test_online_learning_goes_on_after_loading_as_if_nothing_had_happened(tmp_path):
    model = PACE(6, device="cpu").partial_fit(DATA.observations)
    model.save(tmp_path / "m.safetensors")
    again = PACE.load(tmp_path / "m.safetensors").partial_fit(DATA.perturbed)
    np.testing.assert_array_equal(again.means_, model.partial_fit(DATA.perturbed).means_)
    whole = fitted()
    whole.save(tmp_path / "f.safetensors")
    with pytest.raises(ValueError, match="saved without its statistics"):
        PACE.load(tmp_path / "f.safetensors").partial_fit(DATA.perturbed)
    whole.save(tmp_path / "g.safetensors", statistics=True)
    again = PACE.load(tmp_path / "g.safetensors", device="cpu").partial_fit(DATA.perturbed)
    np.testing.assert_array_equal(again.means_, whole.partial_fit(DATA.perturbed).means_)


def test_parameters_set_after_the_fit_do_not_spoil_the_file(tmp_path):
    model = fitted()
    means = model.means_
    model.set_params(covariance="diag", n_concepts=99, init=[np.zeros(3, np.float32)]).save(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(PACE.load(tmp_path / "m.safetensors").means_, means)


@pytest.mark.parametrize("moment", ["fsync", "replace"])  # the end of writing, and the rename
def test_a_crash_while_saving_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, moment):
    path = tmp_path / "m.safetensors"
    model = fitted()
    model.save(path)
    before = path.read_bytes()

    def crash(*anything):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, moment, crash)
    with pytest.raises(OSError, match="no space"):
        model.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_truncated_foreign_and_missing_files_are_refused_in_one_line(tmp_path):
    path = tmp_path / "m.safetensors"
    fitted().save(path)
    whole = path.read_bytes()
    cases = {"half": whole[: len(whole) // 2], "text": b"not a model at all", "empty": b""}
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="is not a whole safetensors file") as caught:
            PACE.load(tmp_path / name)
        assert "\n" not in str(caught.value)
    save_file({"weight": torch.zeros(3)}, tmp_path / "foreign")
    with pytest.raises(ValueError, match="is not a PACE model"):
        PACE.load(tmp_path / "foreign")
    spoilt = load_file(path)
    spoilt["gaussians.means"][0, 0] = float("nan")
    with safe_open(path, framework="pt") as file:
        save_file(spoilt, tmp_path / "spoilt", file.metadata())
    with pytest.raises(ValueError, match="is not a PACE model"):
        PACE.load(tmp_path / "spoilt")
    header = {"pace": json.dumps({"format": "pace-model-99"})}
    save_file(load_file(path), tmp_path / "future", header)
    with pytest.raises(ValueError, match="has format pace-model-99"):
        PACE.load(tmp_path / "future")
    with pytest.raises(FileNotFoundError, match="no model file at"):
        PACE.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no folder"):
        fitted().save(tmp_path / "no" / "m.safetensors")
