"""`pace runs`, `pace compare`, and `pace.load_run`: runs seen from outside."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from in_process import CLASSES, invoke

import pace
from pace.files import DamagedFile


def test_a_run_is_loaded_in_python_with_all_that_belongs_to_it(elsewhere: Path, workshop: Path):
    fitted = pace.load_run("shop/fit", device="cpu")
    assert (fitted.class_names, fitted.scores) == (list(CLASSES), None)
    assert (len(fitted.images), len(fitted.gallery), fitted.backbone.preprocessing.size) == (12, 3, (32, 32))
    picture = workshop / "photos" / "test" / "blue" / "0.png"
    document = invoke("explain", picture, "--run", "shop/fit", "--out", "seen", "--json").document
    explanation = fitted(picture)
    assert document["results"]["images"][0]["theta"] == explanation.to_dict()["images"][0]["theta"]
    with (elsewhere / "seen" / "explanation.csv").open(newline="") as file:
        assert [row["name"] for row in csv.DictReader(file)] == [row["name"] for row in explanation.to_rows()]
    with pytest.raises(ValueError, match="is a run of `pace explain`; expected one of `pace fit`"):
        pace.load_run("seen")


def test_what_was_saved_in_python_is_used_on_the_command_line(elsewhere: Path):
    fitted = pace.explain_model("color", "shop/flat", 2, covariance="diag", max_iter=3, n_init=1, layer=0, device="cpu")
    fitted.save("runs/mine")
    found = invoke("explain", "shop/flat/0.png", "--json").document
    assert found["configuration"]["fit_run"] == str(elsewhere / "runs" / "mine")
    np.testing.assert_allclose(found["results"]["images"][0]["theta"], fitted("shop/flat/0.png").theta[0], atol=1e-5)


def test_runs_are_listed_with_what_they_are_of_and_their_verdict(elsewhere: Path):
    assert "no runs in runs; `pace fit` makes one" in invoke("runs").out
    assert invoke("fit", "--config", "shop/fit", "--out", "runs/fit").code == 0
    assert [run["verdict"] for run in invoke("runs", "--json").document["runs"]] == ["not evaluated"]
    scored = invoke("evaluate", "--bootstrap", "0", "--hidden-images", "0", "--json").document["results"]
    fit, evaluation = invoke("runs", "--json").document["runs"]
    assert (fit["run"], fit["command"], fit["status"]) == ("runs/fit", "fit", "finished")
    assert fit["of"] == "photos, tiny.safetensors, 3 concepts"
    assert evaluation["command"] == "evaluate"
    assert fit["verdict"] == evaluation["verdict"] == scored["verdict"]
    assert evaluation["of"] == "photos, by fit"
    assert invoke("explain", "shop/flat/0.png", "shop/flat/1.png", "--no-ablation").code == 0
    assert invoke("runs", "--json").document["runs"][-1]["of"] == "0.png and 1 more, by fit"
    assert pace.load_run("runs/fit", device="cpu").scores.verdict == scored["verdict"]
    assert scored["verdict"][:30] in invoke("runs", "runs").out
    file = Path(evaluation["run"], "run.json")
    damaged = json.loads(file.read_text())
    damaged["results"]["scores"] = 3
    file.write_text(json.dumps(damaged))
    with pytest.raises(DamagedFile, match=r"run\.json cannot be used.*run `pace evaluate` again"):
        pace.load_run("runs/fit", device="cpu")


def test_a_fit_is_like_itself_and_less_like_another(elsewhere: Path):
    assert invoke("fit", "--config", "shop/fit", "--concepts", "1", "--out", "other").code == 0
    same, other = (invoke("compare", "shop/fit", name, "--json").document for name in ("shop/fit", "other"))
    assert all(match["one"] == match["other"] for match in same["matches"])
    assert len(other["matches"]) == 1
    assert 0 < other["mean"] < same["mean"]
    apart = [match for match in same["matches"] if match["alike"] < 0.1]
    assert ("no counterpart" in invoke("compare", "shop/fit", "shop/fit").out) == bool(apart)
    assert "patches in common" in invoke("compare", "shop/fit", "other", "--images", "shop/flat").out
    assert "no such run" in invoke("compare", "shop/fit", "nowhere").error
