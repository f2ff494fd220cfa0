import json
import os
import warnings

import numpy as np
import pytest
import torch
from planted import planted
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sklearn.exceptions import ConvergenceWarning

from pace import PACE, Observations

DATA = planted(0, k=4, d=6, images=30, grid=(3, 3))


def fitted(**parameters):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = PACE(**{"n_concepts": 4, "max_iter": 2, "n_init": 1, "device": "cpu"} | parameters)
        return model.fit(DATA.observations, perturbed=DATA.perturbed)


@pytest.fixture(scope="module")
def model():
    return fitted()


@pytest.mark.parametrize(
    "parameters",
    [
        {"covariance": "full", "alpha": np.full(4, 0.3)},
        {"covariance": "diag", "dtype": torch.float64},
        {"covariance": "tied", "refine": 2},
        {"covariance": "low_rank", "minibatch": 16},
        {"updates": "paper", "device": torch.device("cpu"), "seed": np.int64(1)},
        {"n_concepts": "auto"},
    ],
)
def test_a_loaded_model_is_the_saved_one(tmp_path, parameters):
    model = fitted(**parameters)
    model.save(tmp_path / "concepts.safetensors")
    again = PACE.load(tmp_path / "concepts.safetensors")
    np.testing.assert_equal(again.get_params(), model.get_params() | {"device": None, "dtype": again.dtype})
    assert again.dtype == ("float64" if "dtype" in parameters else "float32")
    for name in ("lower_bounds_", "n_iter_", "n_steps_", "n_features_in_", "converged_", "interrupted_", "updates_"):
        assert getattr(again, name) == getattr(model, name), name
    for name in ("means_", "covariances_", "label_head_", "pair_weights_", "alpha_", "concept_weights_", "refinement_"):
        np.testing.assert_array_equal(getattr(again, name), getattr(model, name), err_msg=name)
    if model.selection_ is not None:
        assert again.selection_.moves == model.selection_.moves
    np.testing.assert_array_equal(again.explain(DATA.perturbed).phi, model.explain(DATA.perturbed).phi)
    assert os.listdir(tmp_path) == ["concepts.safetensors"]


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
    for model, statistics in ((PACE(4, device="cpu").partial_fit(DATA.observations), None), (fitted(), True)):
        model.save(tmp_path / "m.safetensors", statistics=statistics)
        again = PACE.load(tmp_path / "m.safetensors", device="cpu").partial_fit(DATA.perturbed)
        np.testing.assert_array_equal(again.means_, model.partial_fit(DATA.perturbed).means_)
    fitted().save(tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="saved without its statistics"):
        PACE.load(tmp_path / "m.safetensors").partial_fit(DATA.perturbed)


def test_parameters_set_after_the_fit_do_not_spoil_the_file(tmp_path):
    model = fitted()
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
    content, tensors = path.read_bytes(), load_file(path)
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    for name, cut in (("half", content[: len(content) // 2]), ("text", b"not a model at all"), ("empty", b"")):
        (tmp_path / name).write_bytes(cut)
    save_file({"weight": torch.zeros(3)}, tmp_path / "foreign")
    save_file(tensors | {"gaussians.means": torch.full((4, 6), torch.nan)}, tmp_path / "nan", header)
    save_file({name: t for name, t in tensors.items() if name != "alpha"}, tmp_path / "lacking", header)
    save_file(tensors, tmp_path / "future", {"pace": json.dumps({"format": "pace-model-99"})})
    for name, message in {
        "half": "is not a complete safetensors file",
        "text": "is not a complete safetensors file",
        "empty": "is not a complete safetensors file",
        "foreign": "is not a PACE model",
        "nan": "is not a PACE model",
        "lacking": "is not a PACE model",
        "future": "has format pace-model-99",
    }.items():
        with pytest.raises(ValueError, match=f"^[^\n]*{message}[^\n]*$"):
            PACE.load(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="no model file at"):
        PACE.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no folder"):
        model.save(tmp_path / "no" / "m.safetensors")
