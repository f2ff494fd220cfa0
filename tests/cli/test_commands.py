"""The commands, one after the other, as they are meant to be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import CLASSES, MODEL, QUICK, Pace, invoke

SHOP_MODEL = ("--model", "shop/tiny.safetensors", *MODEL[2:])


def record(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_bytes())


# -- fit ------------------------------------------------------------------------------------------------------------------


def test_fit_leaves_a_model_that_the_library_loads(workshop: Path):
    from pace import PACE
    from pace.cli.fitted import CONCEPTS

    concepts = PACE.load(workshop / "fit" / CONCEPTS)
    assert concepts.n_concepts == 3
    assert concepts.label_head_.shape == (3, len(CLASSES))
    assert concepts.lower_bounds_[0].stability != 0  # pairs were used


def test_fit_prints_the_concepts_and_what_to_do_next(pace: Pace, tmp_path: Path):
    outcome = pace("fit", "--images", "photos", *MODEL, *QUICK, "--no-pairs", "--out", tmp_path / "run")
    assert outcome.code == 0
    assert "3 of 3 concepts in use" in outcome.out
    assert f"pace explain PICTURE --run {tmp_path / 'run'}" in outcome.out
    assert "\x1b" not in outcome.out


@pytest.mark.parametrize("how", [("--concepts",), ("--n-concepts",), ("-k",), ("--minibatch", "5", "--concepts")])
def test_fit_finds_the_number_and_says_how_sure_it_is(how: tuple[str, ...], pace: Pace, tmp_path: Path):
    from pace import PACE

    outcome = pace("fit", "--images", "photos", *MODEL, *QUICK, *how, "auto", "--out", tmp_path / "run")
    assert outcome.code == 0
    model = PACE.load(tmp_path / "run" / "concepts.safetensors", device="cpu")
    assert model.selection_ is not None
    k = len(model.means_)
    results = record(tmp_path / "run")["results"]
    assert results["concepts"] == len(results["shares"]) == k
    assert f"{k} of {k} concepts in use" in outcome.out
    lines = outcome.out.splitlines()
    assert lines[: len(str(model.selection_).splitlines())] == str(model.selection_).splitlines()
    assert "far too sure" in outcome.out


def test_no_more_concepts_are_looked_for_than_told(pace: Pace, tmp_path: Path):
    most = ("--concepts", "auto", "--max-concepts", "2")
    outcome = pace("fit", "--images", "photos", *MODEL, *QUICK, *most, "--out", tmp_path / "run")
    assert record(tmp_path / "run")["results"]["concepts"] == 2
    assert (
        "stopped at 2 concepts, the most it looks for; raise --max-concepts, or set --concepts by hand" in outcome.err
    )
    assert "larger numbers were not tried" in outcome.out


def test_the_record_has_how_the_number_was_found(elsewhere: Path):
    auto = ("--images", "shop/photos", *SHOP_MODEL, *QUICK, "--concepts", "auto", "--out", "found", "--json")
    document = invoke("fit", *auto).document
    assert document["configuration"]["concepts"] == "auto"
    selection = document["results"]["selection"]
    best = max(range(len(selection["bounds"])), key=lambda index: selection["bounds"][index])
    assert selection["numbers"][best] == document["results"]["concepts"] == len(selection["evidence"])
    assert selection["images"] == 12
    again = invoke("fit", "--config", "found", "--out", "again", "--json").document
    assert again["results"]["selection"] == selection
    report = invoke("report", "--run", "found", "--out", "page", "--json").document
    assert report["status"] == "finished"
    assert 'href="#/number"' in (elsewhere / "page" / "report.html").read_text(encoding="utf-8")


def test_a_number_that_was_given_is_not_said_to_be_found(workshop: Path):
    assert record(workshop / "fit")["results"]["selection"] is None


def test_a_limit_draws_from_all_classes(pace: Pace, tmp_path: Path):
    outcome = pace("fit", "--images", "photos", *MODEL, *QUICK, "--limit", "8", "--out", tmp_path / "run", "--json")
    assert outcome.document["images"]["count"] == 8
    assert outcome.document["results"]["images"] == 8


def test_a_model_without_a_classifier_can_be_given_a_probe(elsewhere: Path):
    bare = ("--model", "shop/bare.safetensors", *MODEL[2:])
    without = invoke("fit", "--images", "shop/photos", *bare, *QUICK, "--json").document
    assert any("--probe" in warning for warning in without["warnings"])
    assert without["model"]["class_names"] is None
    document = invoke("fit", "--images", "shop/photos", *bare, *QUICK, "--probe", "--out", "probed", "--json").document
    assert document["model"]["class_names"] == list(CLASSES)
    explained = invoke("explain", "shop/photos/test/blue/0.png", "--run", "probed", "--json").document
    assert explained["results"]["images"][0]["predictions"][0]["name"] == "blue"


# -- explain ---------------------------------------------------------------------------------------------------------------


def test_explain_says_what_the_library_says(elsewhere: Path, workshop: Path):
    import timm
    from safetensors.torch import load_file

    from pace import PACE, Backbone
    from pace.images import Folder

    document = invoke("explain", "shop/flat", "--run", "shop/fit", "--level", "0.8", "--json").document
    model = timm.create_model("test_vit", img_size=32, num_classes=2)
    model.load_state_dict(load_file(workshop / "tiny.safetensors"))
    seen = Backbone(model).observe(Folder(workshop / "flat"))
    expected = PACE.load(workshop / "fit" / "concepts.safetensors", device="cpu").explain(seen)
    low, high = expected.interval(0.8)
    found = document["results"]["images"]
    np.testing.assert_allclose([image["theta"] for image in found], expected.theta, atol=1e-4)
    np.testing.assert_allclose([image["low"] for image in found], low, atol=1e-4)
    np.testing.assert_allclose([image["high"] for image in found], high, atol=1e-4)
    for number, image in enumerate(found):
        assert [concept["concept"] for concept in image["top_concepts"]] == expected.shown_concepts(number, 5).tolist()
        assert image["predictions"][0]["class"] == int(seen.predictions[number].argmax())
        assert np.array_equal(image["patch_concepts"], expected.phi[number].argmax(1).reshape(2, 2))


def test_cls_is_no_patch_unless_it_is_asked_for(elsewhere: Path, workshop: Path):
    assert record(workshop / "fit")["model"]["count_cls"] is False
    commands = {
        "extract": ("--images", "shop/photos", *SHOP_MODEL, "--no-pairs"),
        "fit": ("--images", "shop/photos", *SHOP_MODEL, *QUICK, "--no-pairs"),
    }
    for command, rest in commands.items():
        for options, counted in (((), False), (("--no-cls",), False), (("--cls",), True)):
            assert invoke(command, *rest, *options, "--json").document["model"]["count_cls"] is counted


def test_a_model_that_was_fitted_with_cls_is_explained_with_it(elsewhere: Path, workshop: Path):
    import timm
    from safetensors.torch import load_file

    from pace import PACE, Backbone
    from pace.images import Folder

    quick = ("--images", "shop/photos", *SHOP_MODEL, *QUICK)
    assert invoke("fit", *quick, "--cls", "--out", "old").code == 0
    found = invoke("explain", "shop/flat", "--run", "old", "--json").document["results"]["images"]
    model = timm.create_model("test_vit", img_size=32, num_classes=2)
    model.load_state_dict(load_file(workshop / "tiny.safetensors"))
    concepts = PACE.load(elsewhere / "old" / "concepts.safetensors", device="cpu")
    with_cls, without = (
        concepts.explain(Backbone(model, count_cls=counted).observe(Folder(workshop / "flat"))).theta
        for counted in (True, False)
    )
    theta = np.array([image["theta"] for image in found])
    np.testing.assert_allclose(theta, with_cls, atol=1e-4)
    assert np.abs(theta - without).max() > 1e-3
    again = invoke("fit", "--config", "old", "--json").document
    assert again["model"]["count_cls"] is True
    assert again["results"]["bound"] == record(elsewhere / "old")["results"]["bound"]
    assert invoke("evaluate", "--run", "old", "--json").document["status"] == "finished"


def test_explain_prints_the_prediction_and_the_concepts_with_intervals(elsewhere: Path):
    outcome = invoke("explain", "shop/photos/test/amber/0.png", "--run", "shop/fit", "--top", "2", "--out", "seen")
    assert outcome.code == 0
    assert "prediction: " in outcome.out
    assert "90 % interval" in outcome.out
    assert "concepts in use of" in outcome.out
    assert {path.name for path in (elsewhere / "seen").iterdir()} == {"run.json", "report.html", "figure.png"}
    page = (elsewhere / "seen" / "report.html").read_text(encoding="utf-8")
    assert "amber/0.png" in page


def test_explain_takes_files_and_folders_in_order_each_once(elsewhere: Path):
    document = invoke(
        "explain", "shop/flat/3.png", "shop/flat", "shop/flat/3.png", "--run", "shop/fit", "--json"
    ).document
    names = [Path(image["picture"]).name for image in document["results"]["images"]]
    assert names == ["3.png", "0.png", "1.png", "2.png", "4.png", "5.png", "6.png"]


def test_explain_works_when_the_images_of_the_fit_are_gone(elsewhere: Path, workshop: Path):
    import shutil

    shutil.copytree(workshop / "photos", elsewhere / "photos")
    assert invoke("fit", "--images", "photos", *SHOP_MODEL, *QUICK, "--out", "own").code == 0
    shutil.rmtree(elsewhere / "photos")
    document = invoke("explain", "shop/flat/0.png", "--run", "own", "--json").document
    assert document["status"] == "finished"
    assert any("by these pictures alone" in warning for warning in document["warnings"])


# -- extract ---------------------------------------------------------------------------------------------------------------


def test_a_fit_on_extracted_observations_finds_the_same_concepts(elsewhere: Path, workshop: Path):
    from pace import PACE

    outcome = invoke("extract", "--images", "shop/photos", *SHOP_MODEL, "--out", "kept", "--json")
    assert outcome.document["results"]["perturbed"] is True
    assert outcome.document["results"]["images"] == 12
    assert invoke("fit", "--observations", "kept", *QUICK, "--out", "fit").code == 0
    ours = PACE.load(elsewhere / "fit" / "concepts.safetensors", device="cpu")
    direct = PACE.load(workshop / "fit" / "concepts.safetensors", device="cpu")
    np.testing.assert_allclose(np.sort(ours.means_, 0), np.sort(direct.means_, 0), atol=0.02)  # stored as float16
    assert record(elsewhere / "fit")["observations"] == str(elsewhere / "kept")
    alone = invoke("fit", "--observations", "kept", *QUICK, "--no-pairs", "--json").document
    assert alone["results"]["bound"][-1]["stability"] == 0


def test_an_extraction_goes_on_in_its_folder_and_refuses_another_model(elsewhere: Path):
    extract = ("extract", "--images", "shop/photos", "--no-pairs", "--out", "kept")
    assert invoke(*extract, *SHOP_MODEL).code == 0
    assert invoke(*extract, *SHOP_MODEL).code == 0
    assert "layer" in invoke(*extract, *SHOP_MODEL, "--layer", "2").error


def test_an_unfinished_extraction_says_how_to_go_on(elsewhere: Path):
    assert invoke("extract", "--images", "shop/photos", *SHOP_MODEL, "--out", "kept").code == 0
    index = elsewhere / "kept" / "perturbed" / "index.json"
    content = json.loads(index.read_text())
    content["shards"] = []
    index.write_text(json.dumps(content))
    assert "--config kept/run.json --out kept" in invoke("fit", "--observations", "kept", *QUICK).error
    assert invoke("extract", "--config", "kept/run.json", "--out", "kept").code == 0
    assert invoke("fit", "--observations", "kept", *QUICK).code == 0


# -- the layer -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block never has enough within images, and the one before always has."""
    from pace.backbones import layers

    shares = iter([0.25, 0.75] * 9)
    monkeypatch.setattr(layers, "within_share", lambda seen: next(shares))


@pytest.mark.usefixtures("picky")
@pytest.mark.parametrize("how", [("--layer", "auto"), ()], ids=["asked for", "by default"])
def test_an_automatic_layer_is_said_and_remembered(how: tuple[str, ...], elsewhere: Path):
    auto = ("--images", "shop/photos", *SHOP_MODEL, *how, "--out")
    outcome = invoke("fit", *auto, "fit", *QUICK)
    assert outcome.code == 0, outcome.err
    assert "block 4: 75 % of its patches' variance lies within images, against 25 % at block 5" in outcome.out
    kept = record(elsewhere / "fit")
    assert kept["configuration"]["layer"] == ("auto" if how else None)
    assert (kept["model"]["layer"], kept["model"]["attention_layer"]) == (4, 5)
    explained = invoke("explain", "shop/flat/0.png", "--run", "fit", "--json").document
    assert explained["fit"]["model"] == kept["model"]
    again = invoke("fit", "--config", "fit", "--out", "again", "--json").document
    assert again["model"] == kept["model"]
    assert again["results"]["bound"] == kept["results"]["bound"]

    assert invoke("extract", *auto, "seen").code == 0
    assert record(elsewhere / "seen")["model"]["fingerprint"] == kept["model"]["fingerprint"]
    stored = invoke("fit", "--observations", "seen", *QUICK, "--json").document
    assert stored["model"]["attention_layer"] == 5


def test_of_a_single_image_the_last_block_is_seen(elsewhere: Path):
    one = ("extract", "--images", "shop/photos", "--limit", "1", *SHOP_MODEL, "--no-pairs")
    asked, unasked = invoke(*one, "--layer", "auto", "--out", "asked"), invoke(*one, "--out", "unasked")
    assert asked.out.splitlines()[0] == "block 5: a single image, nothing to compare"
    assert "nothing to compare" not in unasked.out
    assert "nothing to compare" not in invoke(*one, "--layer", "2").out
    for run in ("asked", "unasked"):
        assert json.loads((elsewhere / run / "run.json").read_bytes())["model"]["layer"] == 5


def test_an_automatic_layer_is_the_librarys_choice(elsewhere: Path, workshop: Path):
    import timm
    from safetensors.torch import load_file

    from pace import Backbone
    from pace.backbones import choose_layer
    from pace.images import open_images

    model = timm.create_model("test_vit", img_size=32, num_classes=2)
    model.load_state_dict(load_file(workshop / "tiny.safetensors"))
    layer = choose_layer(model, open_images(workshop / "photos"))
    auto = ("extract", "--images", "shop/photos", *SHOP_MODEL, "--no-pairs", "--layer", "auto")
    kept = invoke(*auto, "--json").document["model"]
    assert kept["layer"] == layer
    assert kept["fingerprint"] == Backbone(model, layer, attention_layer=-1).fingerprint()


@pytest.mark.usefixtures("picky")
def test_a_run_from_when_the_last_block_was_usual_is_repeated_there(elsewhere: Path):
    assert invoke("fit", "--images", "shop/photos", *SHOP_MODEL, *QUICK, "--layer", "-1", "--out", "old").code == 0
    old = record(elsewhere / "old")
    old["configuration"]["layer"] = None  # what such a run was told
    (elsewhere / "old" / "run.json").write_text(json.dumps(old))
    again = invoke("fit", "--config", "old", "--json").document
    assert again["model"] == old["model"]
    assert again["results"]["bound"] == old["results"]["bound"]


def test_a_run_from_before_there_was_a_choice_of_attention_opens(elsewhere: Path, workshop: Path):
    import shutil

    shutil.copytree(workshop / "fit", elsewhere / "old")
    kept = record(elsewhere / "old")
    assert kept["model"].pop("attention_layer") == 5
    (elsewhere / "old" / "run.json").write_text(json.dumps(kept))
    assert invoke("explain", "shop/flat/0.png", "--run", "old").code == 0


# -- finetune --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def finetuned(elsewhere: Path) -> Path:
    tune = ("finetune", "--images", "shop/photos", *SHOP_MODEL, "--epochs", "2", "--lr", "1e-3", "--normalize", "half")
    tune += ("--layer-decay", "0.8", "--out", "tuned")
    outcome = invoke(*tune)
    assert outcome.code == 0, outcome.err
    assert "held-out accuracy" in outcome.out
    assert "--model tuned" in outcome.out
    return elsewhere / "tuned"


def test_a_finetuned_folder_is_a_model(finetuned: Path):
    kept = record(finetuned)
    assert kept["results"]["class_names"] == list(CLASSES)
    assert len(kept["results"]["history"]) == 2
    for model in ("tuned", "tuned/model.safetensors"):
        document = invoke("fit", "--images", "shop/photos", "--model", model, *QUICK, "--json").document
        assert document["model"]["class_names"] == list(CLASSES)
        assert document["model"]["preprocessing"]["mean"] == [0.5, 0.5, 0.5]  # as it was trained
    refused = invoke("fit", "--images", "shop/photos", "--model", "tuned", "--normalize", "clip", *QUICK)
    assert "tuned was fine-tuned with its own" in refused.error
    # And the finetuned weights are in it, not those it began with.
    assert document["model"]["fingerprint"] != record(finetuned.parent / "shop" / "fit")["model"]["fingerprint"]
    assert invoke("explain", "shop/flat/0.png").code == 0


def test_a_file_that_says_how_it_was_trained_is_finetuned_and_opened_again(finetuned: Path):
    file = (finetuned / "model.safetensors").rename(finetuned.parent / "half.safetensors")  # no run beside it
    again = (
        "finetune",
        "--images",
        "shop/photos",
        "--model",
        file.name,
        *SHOP_MODEL[2:],
        "--epochs",
        "1",
        "--out",
        "more",
    )
    assert invoke(*again).code == 0
    document = invoke("fit", "--images", "shop/photos", "--model", "more", *QUICK, "--json").document
    assert document["model"]["preprocessing"]["mean"] == [0.5, 0.5, 0.5]


def test_a_finetuned_model_can_be_finetuned(finetuned: Path):
    again = ("finetune", "--images", "shop/photos", "--model", "tuned", "--epochs", "1")
    assert invoke(*again, "--out", "twice").code == 0
    assert invoke(*again, "--perturbed", "--out", "steadier").code == 0
    weights = [Path(folder, "model.safetensors").read_bytes() for folder in ("twice", "steadier")]
    assert weights[0] != weights[1]
    assert invoke("fit", "--images", "shop/photos", "--model", "twice", *QUICK).code == 0


def test_a_finished_finetuning_is_not_trained_again_and_another_recipe_is_refused(finetuned: Path):
    before = (finetuned / "model.safetensors").read_bytes()
    assert invoke("finetune", "--config", "tuned", "--out", "tuned").code == 0
    assert (finetuned / "model.safetensors").read_bytes() == before
    assert (
        "layer_decay was 0.8, now 1.0"
        in invoke("finetune", "--config", "tuned", "--layer-decay", "1", "--out", "tuned").error
    )
    assert "epochs was 2, now 3" in invoke("finetune", "--config", "tuned", "--epochs", "3", "--out", "tuned").error


# -- evaluate and report ---------------------------------------------------------------------------------------------------


def test_evaluate_then_report(elsewhere: Path):
    outcome = invoke("evaluate", "--run", "shop/fit", "--bootstrap", "20", "--json")
    document = outcome.document
    assert document["images"]["split"] == "test"
    assert document["results"]["images"] == 12
    scores = document["results"]["scores"]
    assert {"faithfulness", "stability", "sparsity", "stability_ratio", "effective_concepts"} <= scores.keys()
    assert scores["faithfulness"]["low"] <= scores["faithfulness"]["value"] <= scores["faithfulness"]["high"]
    assert "Stability ratio" in outcome.err  # the table

    document = invoke("report", "--run", "shop/fit", "--limit", "6", "--out", "page", "--json").document
    assert document["configuration"]["evaluation"] == str(next((elsewhere / "runs").glob("evaluate-*")))
    page = elsewhere / "page" / "report.html"
    assert document["results"]["address"] == page.as_uri()
    assert document["results"]["images"] == 6
    assert "Stability ratio" in page.read_text(encoding="utf-8")


def test_a_report_without_scores_says_how_to_get_them(elsewhere: Path):
    outcome = invoke("report", "--run", "shop/fit", "--no-pairs", "--images", "shop/flat")
    assert outcome.code == 0
    assert "pace evaluate" in outcome.out
    assert outcome.out.splitlines()[-1].startswith("file://")


def test_the_scores_of_another_fit_are_refused(elsewhere: Path):
    assert invoke("fit", "--config", "shop/fit", "--out", "other").code == 0
    assert invoke("evaluate", "--run", "other", "--bootstrap", "10", "--out", "scores").code == 0
    assert "not of shop/fit" in invoke("report", "--run", "shop/fit", "--evaluation", "scores").error


def test_a_folder_without_a_split_is_scored_on_a_part_and_says_so(elsewhere: Path):
    fit = ("fit", "--images", "shop/photos/train", *SHOP_MODEL, *QUICK, "--out", "own")
    assert invoke(*fit).code == 0
    document = invoke("evaluate", "--run", "own", "--bootstrap", "10", "--json").document
    assert document["results"]["images"] == 2
    assert any("the concepts have seen them" in warning for warning in document["warnings"])


def test_a_report_of_a_folder_without_a_split_shows_all_of_it_under_its_own_name(elsewhere: Path):
    assert invoke("fit", "--images", "shop/photos/train", *SHOP_MODEL, *QUICK, "--out", "own").code == 0
    document = invoke("report", "--run", "own", "--no-pairs", "--out", "page", "--json").document
    assert document["results"]["images"] == 12
    page = (elsewhere / "page" / "report.html").read_text(encoding="utf-8")
    assert "What the transformer sees in train" in page
    assert str(elsewhere) not in page


def test_a_fit_stopped_before_its_first_epoch_leaves_nothing_to_use(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pace.fitting.loop.Fitting._pass", stop)
    outcome = invoke("fit", "--images", "shop/photos", *SHOP_MODEL, *QUICK, "--out", "stopped")
    assert outcome.code == 130
    assert "nothing was learned" in outcome.err
    assert not (elsewhere / "stopped" / "concepts.safetensors").exists()
    assert "no concepts" in invoke("explain", "shop/flat/0.png", "--run", "stopped").error


def test_a_fit_that_was_stopped_later_is_used_with_a_warning(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    from pace.fitting.loop import Fitting

    own, passes = Fitting._pass, []

    def stop(*args: Any) -> object:
        passes.append(1)
        if len(passes) > 2:
            raise KeyboardInterrupt
        return own(*args)

    monkeypatch.setattr("pace.fitting.loop.Fitting._pass", stop)
    fit = ("fit", "--images", "shop/photos", *SHOP_MODEL, *QUICK, "--out", "stopped")
    assert invoke(*fit).code == 130
    outcome = invoke("explain", "shop/flat/0.png", "--run", "stopped")
    assert outcome.code == 0
    assert "stopped after 2 epochs" in outcome.err


def test_color_is_scored_by_its_true_colours(elsewhere: Path):
    fit = ("fit", "--images", "color", *SHOP_MODEL, *QUICK, "--limit", "30", "--out", "own")
    assert invoke(*fit).code == 0
    document = invoke("evaluate", "--run", "own", "--limit", "10", "--bootstrap", "10", "--json").document
    assert 0 <= document["results"]["scores"]["colour_recovery"]["value"] <= 1


# -- demo and the embedded model --------------------------------------------------------------------------------------------


def test_the_embedded_model_explains_color_at_the_layer_that_suits_it(elsewhere: Path):
    from pace.backbones.color_vit import LAYER

    document = invoke("fit", "--images", "color", "--model", "color", *QUICK, "--limit", "12", "--json").document
    assert document["model"]["layer"] == LAYER
    assert len(document["model"]["class_names"]) == 2
    explained = invoke("explain", "shop/flat/0.png", "--json").document
    assert explained["results"]["images"][0]["grid"] == [14, 14]
    assert not explained["warnings"]


def test_demo_ends_with_the_address_of_its_page(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    from pace import PACE, demo
    from pace.metrics import Score, Scores

    def run(folder: Path, *, seed: int, n_per_class: int, n_concepts: int) -> demo.DemoResult:
        assert (seed, n_per_class, n_concepts) == (3, 500, 5)
        (folder / "report.html").write_text("page")
        scores = Scores([Score("stability", "Stability", 0.5, 0.4, 0.6, "lower", (0, 2), "How far.")], ["Careful."])
        return demo.DemoResult(folder, folder / "report.html", (folder / "a.png",), PACE(), scores, 0.25, 1.5)

    monkeypatch.setattr(demo, "run", run)
    outcome = invoke("demo", "--seed", "3", "--out", "shown")
    assert outcome.code == 0
    assert outcome.out.splitlines()[-1] == (elsewhere / "shown" / "report.html").as_uri()
    assert "! Careful." in outcome.out
    assert "0.4 to 0.6" in outcome.out
    kept = record(elsewhere / "shown")["results"]
    assert (kept["report"], kept["figures"], kept["warnings"]) == ("report.html", ["a.png"], ["Careful."])
