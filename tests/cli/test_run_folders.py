"""Run folders: what they keep, that they can be repeated, and what they never overwrite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from in_process import invoke

from pace.cli import runs


def record(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_bytes())


def test_a_run_keeps_what_is_needed_to_understand_and_repeat_it(workshop: Path):
    kept = record(workshop / "fit")
    assert (kept["format"], kept["command"], kept["status"]) == ("pace-run-1", "fit", "finished")
    assert set(kept["versions"]) == {"pace", "python", "torch", "timm", "transformers"}
    assert kept["configuration"]["images"] == str((workshop / "photos").resolve())
    assert (kept["configuration"]["n_concepts"], kept["configuration"]["covariance"]) == (3, "diag")
    assert not {"out", "json", "debug", "config"} & kept["configuration"].keys()
    assert (kept["seed"], kept["device"]) == (0, "cpu")
    assert kept["model"]["class_names"] == ["amber", "blue"]
    assert kept["model"]["preprocessing"]["size"] == [32, 32]
    assert kept["images"]["count"] == 12
    assert kept["results"]["concepts"] == 3
    assert kept["seconds"] > 0
    assert sorted(path.name for path in (workshop / "fit").iterdir()) == [
        "concepts.safetensors",
        "gallery.json",
        "original",
        "perturbed",
        "run.json",
        "seen.json",
    ]


def test_a_run_is_repeated_from_its_record_bit_for_bit_and_from_elsewhere(elsewhere: Path):
    assert invoke("fit", "--config", "shop/fit/run.json", "--out", "again").code == 0
    again, first = elsewhere / "again", elsewhere / "shop" / "fit"
    assert (again / "concepts.safetensors").read_bytes() == (first / "concepts.safetensors").read_bytes()
    assert record(again)["results"] == record(first)["results"]
    assert record(again)["configuration"] == record(first)["configuration"]


def test_an_explanation_is_repeated_from_its_record_from_elsewhere(elsewhere: Path, workshop: Path, monkeypatch):
    first = invoke(
        "explain", "shop/flat/0.png", "shop/flat/1.png", "--run", "shop/fit", "--top", "2", "--json"
    ).document
    (elsewhere / "deeper").mkdir()
    monkeypatch.chdir(elsewhere / "deeper")
    again = invoke("explain", "--config", first["folder"], "--json").document
    for one, other in zip(first["results"]["images"], again["results"]["images"], strict=True):
        assert {**one, "picture": None} == {**other, "picture": None}


def test_options_given_replace_those_of_the_record(elsewhere: Path):
    assert invoke("fit", "--config", "shop/fit", "--concepts", "2", "--seed", "5", "--out", "other").code == 0
    kept = record(elsewhere / "other")
    assert (kept["results"]["concepts"], kept["seed"], kept["configuration"]["covariance"]) == (2, 5, "diag")


def test_folders_are_named_by_command_images_and_time_and_never_shared(elsewhere: Path, monkeypatch):
    class Stopped(runs.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2030, 1, 2, 3, 4, 5)

    monkeypatch.setattr(runs, "datetime", Stopped)
    assert runs._new("fit-x").name == "fit-x-20300102-030405"
    assert runs._new("fit-x").name == "fit-x-20300102-030405-2"


def test_a_foreign_folder_is_not_written_to(elsewhere: Path):
    (elsewhere / "mine").mkdir()
    (elsewhere / "mine" / "thesis.txt").write_text("years")
    (elsewhere / "file").write_text("")
    (elsewhere / "empty").mkdir()
    repeat = ("fit", "--config", "shop/fit", "--out")
    for _ in range(2):  # an empty folder, then one of the same command
        assert invoke(*repeat, "empty").code == 0
    assert "not from a pace run" in invoke(*repeat, "mine").error
    assert [path.name for path in (elsewhere / "mine").iterdir()] == ["thesis.txt"]
    assert "is a file" in invoke(*repeat, "file").error
    assert "is a run of `pace fit`" in invoke("evaluate", "--run", "shop/fit", "--out", "shop/fit").error


def test_a_failed_run_says_so_in_its_record_and_is_not_the_latest(elsewhere: Path):
    assert invoke("fit", "--config", "shop/fit", "--concepts", "5000").code == 1
    (folder,) = (elsewhere / "runs").iterdir()
    assert folder.name.startswith("fit-photos-2")
    kept = record(folder)
    assert kept["status"] == "failed"
    assert "use at most" in kept["error"]
    assert "no run in runs/" in invoke("explain", "shop/flat/0.png").error


def test_the_latest_fit_is_taken_when_none_is_named(elsewhere: Path):
    for concepts in (2, 3):
        repeat = ("fit", "--config", "shop/fit", "--concepts", concepts)
        assert invoke(*repeat, "--out", f"runs/{9 - concepts}").code == 0
    document = invoke("explain", "shop/flat/0.png", "--json").document
    assert len(document["results"]["images"][0]["theta"]) == 3
    assert document["configuration"]["fit_run"] == str(elsewhere / "runs" / "6")


@pytest.mark.parametrize("what", ["..", "/", "a/b c/", "x" * 300, "<&>"])
def test_any_name_makes_a_safe_folder_name(what: str):
    slug = runs._slug(what)
    assert slug
    assert len(slug) <= 40
    assert not set(slug) & set("/\\<>& ")
