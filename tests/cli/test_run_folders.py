"""Run folders: what they keep, that they can be repeated, and what they never overwrite."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from in_process import invoke
from safetensors.torch import load_file, save_file

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


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_finished_run_is_never_replaced_and_the_same_command_leaves_it_as_it_is(elsewhere: Path):
    repeat = ("fit", "--config", "shop/fit", "--out", "run")
    assert invoke(*repeat).code == 0
    before = files(elsewhere / "run")
    same = invoke(*repeat, "--batch-size", "7", "--json")
    assert (same.code, same.document["status"]) == (0, "finished")
    assert "has the results of this very command; nothing was done" in same.err
    for change, says in (
        (("--concepts", "2"), "(--concepts was 3, now 2)"),
        (("--images", "shop/photos/test"), "(--images was "),
        (("--head", "probe"), "(--head was "),
    ):
        assert says in invoke(*repeat, *change).error
        assert "choose another folder, or delete it first" in invoke(*repeat, *change).error
    assert files(elsewhere / "run") == before


def test_images_or_a_model_that_changed_since_are_other_ones(elsewhere: Path, workshop: Path):
    shutil.copytree(workshop / "photos" / "train", elsewhere / "mine")
    fit = ("fit", "--config", "shop/fit", "--images", "mine", "--out", "run")
    assert invoke(*fit).code == 0
    (elsewhere / "mine" / "amber" / "0.png").unlink()
    assert "(the images differ)" in invoke(*fit).error
    weights = load_file(workshop / "tiny.safetensors")
    save_file(weights, elsewhere / "mine.safetensors")
    fit = ("fit", "--config", "shop/fit", "--model", "mine.safetensors", "--out", "another")
    assert invoke(*fit).code == 0
    save_file({name: value + 1e-3 for name, value in weights.items()}, elsewhere / "mine.safetensors")
    assert "(the model differs)" in invoke(*fit).error


def test_a_run_that_is_stopped_while_it_is_made_again_keeps_its_earlier_results(elsewhere: Path, monkeypatch):
    fit = ("fit", "--config", "shop/fit", "--out", "run")
    assert invoke(*fit).code == 0
    kept = record(elsewhere / "run")
    (elsewhere / "run" / "run.json").write_text(json.dumps(kept | {"status": "interrupted"}))

    def killed(*_: object, **__: object) -> None:
        assert record(elsewhere / "run")["results"] == kept["results"]
        raise RuntimeError("killed")

    monkeypatch.setattr("pace.cli.commands.fit._learn", killed)
    assert "killed" in invoke(*fit).error
    assert invoke("explain", "shop/flat/0.png", "--run", "run").code == 0


def test_observations_that_are_added_to_can_be_used_however_that_ends(elsewhere: Path, monkeypatch):
    from pace.cli.commands import extract

    command = ("extract", "--images", "shop/photos", "--model", "color", "--no-pairs", "--out", "kept")
    assert invoke(*command).code == 0

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(extract, "observe_once", stopped)
        assert invoke(*command).code != 0
    assert runs.read_record(Path("kept"))["results"]["images"] == 12
    assert invoke(*command).code == 0


def test_a_run_that_was_killed_while_its_record_was_first_written_begins_anew(elsewhere: Path):
    (elsewhere / "run").mkdir()
    for name in ("lock", "run.json.tmp"):
        (elsewhere / "run" / name).touch()
    assert invoke("fit", "--config", "shop/fit", "--out", "run").code == 0
    assert sorted(files(elsewhere / "run")) == ["concepts.safetensors", "gallery.json", "run.json", "seen.json"]


def test_two_commands_cannot_write_to_one_folder(elsewhere: Path, monkeypatch):
    def meanwhile(*_: object, **__: object) -> None:
        assert (
            "another pace command writes to this folder; wait"
            in invoke("fit", "--config", "shop/fit", "--out", "run").error
        )
        raise RuntimeError("once is enough")

    monkeypatch.setattr("pace.cli.commands.fit._learn", meanwhile)
    assert "once is enough" in invoke("fit", "--config", "shop/fit", "--out", "run").error


def test_a_damaged_record_does_not_hide_the_other_runs(elsewhere: Path):
    assert invoke("fit", "--config", "shop/fit", "--out", "runs/good").code == 0
    for name, content in (("deep", "[" * 10**5), ("empty", ""), ("odd", '{"format": "pace-run-1", "command": 3}')):
        (elsewhere / "runs" / name).mkdir()
        (elsewhere / "runs" / name / "run.json").write_text(content)
    done = invoke("explain", "shop/flat/0.png")
    assert done.code == 0
    assert "left out: runs/deep/run.json cannot be used: too deeply nested" in done.err
    kept = record(elsewhere / "runs" / "good")
    (elsewhere / "runs" / "odd" / "run.json").write_text(json.dumps({n: v for n, v in kept.items() if n != "model"}))
    assert (
        "odd/run.json cannot be used: 'model' is missing"
        in invoke("explain", "shop/flat/0.png", "--run", "runs/odd").error
    )
    listed = invoke("runs", "--json")
    assert [run["run"] for run in listed.document["runs"]][:1] == ["runs/good"]
    assert listed.err.count("left out: ") == 3


def test_scores_of_another_fit_are_left_out_or_refused(elsewhere: Path):
    fit = ("fit", "--config", "shop/fit", "--out", "runs/fit")
    assert invoke(*fit).code == 0
    score = ("evaluate", "--run", "runs/fit", "--bootstrap", "0", "--hidden-images", "0", "--out", "runs/scores")
    assert invoke(*score).code == 0
    report = ("report", "--run", "runs/fit", "--no-pairs", "--limit", "4")
    assert "has no scores" not in invoke(*report).out
    shutil.rmtree("runs/fit")
    assert invoke(*fit, "--concepts", "2").code == 0
    left_out = invoke(*report)
    assert "the scores in runs/scores are of other concepts than runs/fit holds now, and are left out" in left_out.err
    assert "the report has no scores" in left_out.out
    assert [run["verdict"] for run in invoke("runs", "--json").document["runs"] if run["run"] == "runs/fit"] == [
        "not evaluated"
    ]
    assert "other concepts" in invoke(*report, "--evaluation", "runs/scores").error
    assert "(the fit differs)" in invoke(*score).error
