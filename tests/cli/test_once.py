"""Every image is decoded once and seen once, and what was seen stays with the run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import MODEL, QUICK, invoke

from pace import PACE

BARE = ("--model", "shop/bare.safetensors", *MODEL[2:], "--head", "probe")


class Counted:
    """How many images were decoded, and how many went through the model, since the last look."""

    decoded = 0
    forward = 0

    def __call__(self) -> tuple[int, int]:
        found, self.decoded, self.forward = (self.decoded, self.forward), 0, 0
        return found


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Counted:
    from pace.backbones.tower import Tower
    from pace.images import imageset

    counted, outputs, decode = Counted(), Tower._outputs, imageset.decode

    def look(self: Any, images: Any) -> Any:
        counted.forward += len(images)
        return outputs(self, images)

    def read(path: Path) -> Any:
        counted.decoded += 1
        return decode(path)

    monkeypatch.setattr(Tower, "_outputs", look)
    monkeypatch.setattr(imageset, "decode", read)
    return counted


def kept(folder: Path) -> Any:
    from pace.cli.observing import kept_views
    from pace.cli.runs import open_run

    return kept_views(open_run(str(folder), "fit", "extract"), pairs=True)


@pytest.mark.parametrize("sample", [256, 5])
def test_one_pass_chooses_the_block_fits_the_probe_and_takes_both_views(
    elsewhere: Path, count: Counted, sample: int, monkeypatch: pytest.MonkeyPatch
):
    from pace.backbones import Backbone, layers, load
    from pace.images import ByName, Folder, Perturbation
    from pace.observing import observe_pair

    monkeypatch.setattr(layers, "_SAMPLE", sample)
    fit = invoke("fit", "--images", "shop/photos", *BARE, *QUICK, "--out", "fit", "--json").document
    assert count() == (12, 24)
    assert fit["model"]["head"] is not None
    layer = fit["model"]["layer"]
    from pace.backbones.heads import load_head

    bare = load(elsewhere / "shop/bare.safetensors", model="test_vit", img_size=32, num_classes=0)
    backbone = Backbone(bare, layer, load_head(elsewhere / "fit" / "head.safetensors"), attention_layer=-1)
    images = Folder(elsewhere / "shop/photos/train")
    expected = observe_pair(backbone, images, perturb=ByName(Perturbation(0), images.names))
    for seen, alone in zip(kept(elsewhere / "fit"), expected, strict=True):
        np.testing.assert_allclose(seen.embeddings, alone.embeddings, atol=0.02)  # float16
        np.testing.assert_allclose(seen.attention, alone.attention, atol=1e-5)
        np.testing.assert_allclose(seen.predictions, alone.predictions, atol=1e-4)


def test_later_commands_run_the_model_on_nothing_it_has_seen(elsewhere: Path, count: Counted):
    run = ("--run", "shop/fit")
    quick = ("--bootstrap", "0", "--out", "scores")
    assert invoke("evaluate", *run, *quick).code == 0
    assert count()[1] == 24  # the test images and their perturbed views
    document = invoke("report", *run, "--evaluation", "scores", "--limit", "8", "--out", "page", "--json").document
    assert document["results"]["images"] == 8
    assert count()[1] == 0
    assert not (elsewhere / "page" / "original").exists()
    assert invoke("report", *run, "--evaluation", "scores", "--images", "shop/flat", "--no-pairs").code == 0
    assert count()[1] == 7  # others are new
    assert invoke("explain", "shop/flat/0.png", *run, "--no-ablation").code == 0
    assert count()[1] == 1  # the examples beside it were seen by the fit
    for folder in ("original", "perturbed"):  # what does not say how it was perturbed is not used
        index = elsewhere / "scores" / folder / "index.json"
        index.write_text(index.read_text().replace('"perturbation"', '"x"'))
    assert invoke("report", *run, "--evaluation", "scores", "--limit", "8", "--out", "again").code == 0
    assert count()[1] == 16


def test_scores_that_do_not_say_of_which_fit_are_of_none(elsewhere: Path):
    assert invoke("evaluate", "--run", "shop/fit", "--bootstrap", "0", "--out", "scores").code == 0
    record = elsewhere / "scores" / "run.json"
    record.write_text(record.read_text().replace('"fit_run"', '"x"'))
    assert invoke("explain", "shop/flat/0.png", "--run", "shop/fit", "--no-ablation").code == 0
    assert "no scores of shop/fit" in invoke("report", "--run", "shop/fit", "--evaluation", "scores").error


def test_a_fit_on_what_another_fit_saw_is_the_same_fit(elsewhere: Path, workshop: Path, count: Counted):
    assert invoke("fit", "--observations", "shop/fit", *QUICK, "--out", "again").code == 0
    assert count() == (0, 0)
    first, again = (PACE.load(folder / "concepts.safetensors") for folder in (workshop / "fit", elsewhere / "again"))
    np.testing.assert_array_equal(again.means_, first.means_)
    assert invoke("fit", "--observations", "again", *QUICK, "--concepts", "2", "--out", "third").code == 0
    assert invoke("evaluate", "--run", "third", "--bootstrap", "0", "--no-keep", "--out", "scores").code == 0
    assert count()[1] == 24
    assert not (elsewhere / "scores" / "original").exists()


def test_nothing_is_kept_on_request_and_commands_observe_again(elsewhere: Path, count: Counted):
    outcome = invoke("fit", "--config", "shop/fit", "--no-keep", "--out", "fit")
    assert outcome.code == 0
    assert "--no-keep" not in outcome.out
    assert {path.name for path in (elsewhere / "fit").iterdir()} == {"run.json", "concepts.safetensors", "gallery.json"}
    count()
    assert invoke("evaluate", "--run", "fit", "--bootstrap", "0", "--out", "scores").code == 0
    assert count()[1] == 12 + 24
    assert "fit has no complete observations" in invoke("fit", "--observations", "fit", *QUICK).error


def test_images_that_changed_are_seen_again(elsewhere: Path, workshop: Path, count: Counted):
    shutil.copytree(workshop / "photos" / "train", elsewhere / "own")
    model = ("--model", "shop/tiny.safetensors", *MODEL[2:])
    assert invoke("fit", "--images", "own", *model, *QUICK, "--out", "fit").code == 0
    count()
    report = ("report", "--run", "fit", "--out")
    assert invoke(*report, "one").code == 0
    assert count()[1] == 0
    shutil.copy(workshop / "flat" / "0.png", elsewhere / "own" / "blue" / "0.png")
    outcome = invoke(*report, "two")
    assert count()[1] == 2
    assert "11 of 12 images were seen before" in outcome.err


def test_the_size_the_model_is_run_at_is_said_first(elsewhere: Path):
    err = invoke("fit", "--config", "shop/fit", "--out", "fit").err
    assert "32 x 32 pixels" in next(line for line in err.splitlines() if "tiny" in line)


def test_hiding_is_left_out_where_it_would_take_longest_and_said_so(elsewhere: Path):
    outcome = invoke("evaluate", "--run", "shop/fit", "--bootstrap", "0", "--device", "cpu", "--json")
    assert "concept_effect" not in outcome.document["results"]["scores"]
    assert "--hidden-images 32 takes 1920 runs of the model" in outcome.err


def test_the_numbers_of_a_fit_do_not_depend_on_whether_it_was_kept(elsewhere: Path, workshop: Path):
    assert invoke("fit", "--config", "shop/fit", "--no-keep", "--out", "fit").code == 0
    ours, theirs = (folder / "fit" / "concepts.safetensors" for folder in (elsewhere, workshop))
    assert ours.read_bytes() == theirs.read_bytes()
