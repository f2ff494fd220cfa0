"""`pace benchmark`, as it is typed."""

from __future__ import annotations

import inspect
import json

import pytest

from pace.cli.app import app


def pace(capsys, *arguments):
    """Exit code, standard output and standard error."""
    code = app(["benchmark", *map(str, arguments)], prog_name="pace", standalone_mode=False)
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def tiny(weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = ["--backbone", weights, "--architecture", "test_vit", "--image-size", 32, "--epochs", 1, "--lr", 1e-3]
    return [*model, "--device", "cpu", "--limit", 12, "--bootstrap", 5, "--hidden-images", 2, "--concepts", 3]


def test_it_prints_the_tables_and_says_where_they_are(tiny, tmp_path, capsys):
    methods = ["--methods", "kmeans,two=kmeans", "--set", "two.n_concepts=2", "--layer", "auto"]
    code, out, err = pace(capsys, *tiny, *methods, "--out", "found")
    assert code == 0
    assert "Table 1" in out
    assert "k-means (two)" in out
    assert "written to found" in out
    assert "color: two" in err
    record = json.loads((tmp_path / "found" / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["configuration"]["layer"] == "auto"
    assert "color: parts at block " in err
    rows = record["results"]["rows"]
    assert [row["method"]["options"]["n_concepts"] for row in rows] == [3, 2]
    assert (tmp_path / "found" / "results.md").is_file()

    code, out, err = pace(capsys, *tiny, "--methods", "majority", "--add", "found", "--out", "both", "--json")
    shown = json.loads(out)
    assert [row["method"]["label"] for row in shown["results"]["rows"]] == ["majority", "kmeans", "two"]


def test_without_methods_the_references_that_know_no_patch_are_beside_the_papers():
    from pace.benchmark import run
    from pace.cli.commands.benchmark import benchmark

    typed, called = (inspect.signature(function).parameters["methods"].default for function in (benchmark, run))
    assert typed == ",".join(called)
    assert called[-3:] == ("lot", "position", "attention-rank")


def test_a_run_without_a_single_score_is_a_failure(tiny, capsys):
    code, _, err = pace(capsys, *tiny, "--methods", "kmeans", "--layer", 99, "--no-finetune", "--out", "found")
    assert code == 1
    assert "no method could be scored" in err


@pytest.mark.parametrize(("layer", "option", "counted"), [(-1, [], False), (-2, ["--cls"], True)])
def test_any_block_of_a_model_with_cls_and_registers_is_explained_by_every_method(
    option, counted, layer, with_registers, tiny, tmp_path, capsys
):
    tiny[1:4] = with_registers
    methods = "pace,saliency,shap,lime,agi,craft,semi-nmf"
    few = ["--repeats-shap", 2, "--repeats-lime", 2, "--set", "lime.samples=20", "--set", "craft.designs=4"]
    few += ["--set", "pace.max_iter=2", "--set", "pace.n_init=1", "--layer", layer, *option]
    assert pace(capsys, *tiny, "--methods", methods, *few, "--out", "found")[0] == 0
    found = json.loads((tmp_path / "found" / "results.json").read_text())
    assert {row["method"]["label"]: row["failed"] for row in found["rows"]} == dict.fromkeys(methods.split(","))
    about = found["about"]["color"]
    assert about["backbone"]["count_cls"] is counted
    assert about["tokens"] == 4 + counted  # patches: registers are no tokens of the explanation
    assert "color: agi, done before" in pace(capsys, *tiny, "--methods", methods, *few, "--out", "found")[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--datasets", "flower"], "error: flower: --data-root is needed"),
        (["--set", "pace"], "error: --set pace: expected METHOD.OPTION=VALUE"),
        (["--add", "nowhere"], "error: nowhere: no such results"),
    ],
)
def test_mistakes_get_one_line(tiny, options, message, capsys, monkeypatch):
    monkeypatch.setattr("pace.benchmark.running.prepare_subject", lambda *_: pytest.fail("loaded a model"))
    code, _, err = pace(capsys, *tiny, *options, "--out", "wrong")
    assert code == 1
    lines = [line for line in err.splitlines() if line]
    assert len(lines) == 1
    assert lines[0].startswith(message)


def test_without_a_gpu_it_is_small_and_says_so(tiny, capsys):
    position = tiny.index("--limit")
    unlimited = tiny[:position] + tiny[position + 2 :]
    _, _, err = pace(capsys, *unlimited, "--methods", "deeplift")
    assert "note: on a CPU at most 200 images of each split are used" in err
