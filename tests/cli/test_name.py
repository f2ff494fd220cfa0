"""`pace name` and `pace find`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from in_process import invoke


@pytest.fixture
def run(elsewhere: Path) -> Path:
    """A fit whose names are this test's own."""
    kept = shutil.ignore_patterns("original", "perturbed", "seen.json")
    shutil.copytree(elsewhere / "shop" / "fit", elsewhere / "runs" / "fit", ignore=kept)
    return Path("runs/fit")


def test_a_name_is_kept_in_the_run_and_shown_by_every_command(run: Path, elsewhere: Path):
    assert invoke("name", run, 1, "red [bold]face").out == "1 is called 'red [bold]face'\n"
    assert "red [bold]face" in invoke("name", run).out
    document = invoke("explain", "shop/flat/0.png", "--run", run, "--out", "seen", "--json").document
    names = {row["concept"]: row["name"] for row in document["results"]["images"][0]["top_concepts"]}
    assert names[1] == "red [bold]face"
    assert "red [bold]face" in (elsewhere / "seen" / "explanation.csv").read_text()
    assert "red [bold]face" in (elsewhere / "seen" / "report.html").read_text()
    assert "red [bold]face" in invoke("explain", "shop/flat/0.png", "--run", run, "--no-ablation").out
    assert "red [bold]face" in invoke("compare", run, run).out
    assert invoke("name", run, "red [bold]face", "").out == "1 has no name\n"


def test_a_name_is_text_in_html_and_no_formula_in_tables(run: Path, elsewhere: Path):
    invoke("name", run, 1, "=1+1</script><b>")
    invoke("explain", "shop/flat/0.png", "--run", run, "--out", "seen", "--no-ablation")
    page = (elsewhere / "seen" / "report.html").read_text()
    assert "</script><b>" not in page
    assert "'=1+1" in (elsewhere / "seen" / "explanation.csv").read_text()


def test_concepts_are_hidden_merged_and_all_of_it_is_taken_back(run: Path):
    def used() -> list[int]:
        found = invoke("explain", "shop/flat/0.png", "--run", run, "--no-ablation", "--json").document
        return sorted(row["concept"] for row in found["results"]["images"][0]["top_concepts"])

    before = used()
    assert invoke("name", run, "--hide", "0, 2").out == "hide 0, 2\n"
    assert not {0, 2} & set(used())
    assert "and 2 hidden: 0, 2" in invoke("name", run).out
    assert "2 hidden" in invoke("explain", "shop/flat/0.png", "--run", run, "--no-ablation").out
    assert invoke("name", run, "--show", "0,2").code == 0
    assert invoke("name", run, "--merge", "0,2").out == "merge 0, 2\n"
    assert 2 not in used()
    out = invoke("name", run).out
    assert "2 was merged into 0" in out
    document = invoke("name", run, "--json").document
    assert [one["merged_into"] for one in document["concepts"]] == [None, None, 0]
    for said in ("merge 0, 2", "show 0, 2", "hide 0, 2"):
        assert invoke("name", run, "--undo").out == f"taken back: {said}\n"
    assert used() == before
    assert "no change to take back" in invoke("name", run, "--undo").error


def test_scores_of_what_was_merged_are_of_other_concepts(run: Path):
    assert invoke("evaluate", "--run", run, "--bootstrap", "0", "--hidden-images", "0").code == 0
    assert invoke("name", run, 1, "face").code == 0
    assert "other concepts" not in invoke("report", "--run", run, "--no-pairs").err
    invoke("name", run, "--merge", "0,1")
    assert "are of other concepts than" in invoke("report", "--run", run, "--no-pairs").err
    invoke("name", run, "--undo")
    assert "other concepts" not in invoke("report", "--run", run, "--no-pairs").err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("9", "x"), "there is no concept '9'; expected a number from 0 to 2 or a name that was given"),
        (("beak", "x"), "there is no concept 'beak'"),
        (("1",), 'pace name runs/fit 1 "…" needs the name'),
        (("1", "x", "--undo"), "one change at a time"),
        (("--merge", "1"), "two or more different concepts"),
        (("--hide", ""), "there is no concept ''"),
        (("1", "a\x1b]0;b"), "printable characters"),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(run: Path, arguments: tuple[str, ...], line: str):
    assert line in invoke("name", run, *arguments).error
    assert not (run / "names.json").exists()


def test_names_of_another_fit_and_damaged_ones_are_refused(run: Path):
    invoke("name", run, 1, "x")
    found = json.loads((run / "names.json").read_text())
    (run / "names.json").write_text(json.dumps(found | {"fit": "0" * 16}))
    for command in (("name", run), ("explain", "shop/flat/0.png", "--run", run)):
        assert "it has the names of another fit; delete it to begin anew" in invoke(*command).error
    (run / "names.json").write_text("{}")
    assert "names.json cannot be used" in invoke("name", run).error


def test_names_are_suggested_and_concepts_found_with_an_image_text_model(run: Path, elsewhere: Path):
    from open_clip.model import CLIP

    torch.manual_seed(0)
    text = {"context_length": 12, "vocab_size": 49408, "width": 8, "heads": 1, "layers": 1}
    clip = CLIP(16, {"layers": 1, "width": 64, "head_width": 64, "patch_size": 16, "image_size": 32}, text)
    torch.save(clip.state_dict(), elsewhere / "clip.pt")
    (elsewhere / "words.txt").write_text("a bird\nthe sky\nsand\n")
    options = ("--clip", "clip.pt", "--device", "cpu")
    found = invoke("name", run, "--suggest", "--words", "words.txt", *options, "--json").document["suggestions"]
    assert len({one["concept"] for one in found}) == len(found) > 1
    assert all(one["closest"] in ("bird", "sky", "sand") and 0 <= one["score"] <= 1 for one in found)
    assert "no good name" in invoke("name", run, "--suggest", "--words", "words.txt", *options).out
    assert not (run / "names.json").exists()
    invoke("name", run, 1, "face")
    document = invoke("find", "red head", "--run", run, *options, "--json").document
    assert [one["score"] for one in document["found"]] == sorted((o["score"] for o in document["found"]), reverse=True)
    assert "face" in invoke("find", "red head", *options).out  # of the latest run
    assert "--clip: VisionTransformer has no text encoder" in invoke("find", "red head", "--run", run).error
