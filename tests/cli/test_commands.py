"""The commands, one after the other, as they are meant to be used."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import CLASSES, MODEL, QUICK, invoke

from pace.naming import concept_names

SHOP_MODEL = ("--model", "shop/tiny.safetensors", *MODEL[2:])
PHOTOS = ("--images", "shop/photos", *SHOP_MODEL)
FIT = ("fit", *PHOTOS, *QUICK)


def record(folder: Path) -> dict:
    return json.loads((folder / "run.json").read_bytes())


@pytest.fixture
def backbone(workshop: Path) -> Callable[..., object]:
    """The model of the workshop, opened without the command line."""
    from pace import Backbone
    from pace.backbones import load

    model = load(workshop / "tiny.safetensors", model="test_vit", img_size=32)
    return lambda *args, **options: Backbone(model, *args, **options)


# -- fit ------------------------------------------------------------------------------------------------------------------


def test_fit_leaves_a_model_that_the_library_loads(workshop: Path):
    from pace import PACE

    concepts = PACE.load(workshop / "fit" / "concepts.safetensors")
    assert concepts.n_concepts == 3
    assert concepts.label_head_.shape == (3, len(CLASSES))
    assert concepts.lower_bounds_[0].stability != 0  # pairs were used
    assert record(workshop / "fit")["results"]["selection"] is None


def test_a_fit_on_one_image_warns(elsewhere: Path):
    (elsewhere / "one").mkdir()
    shutil.copy(elsewhere / "shop" / "flat" / "0.png", elsewhere / "one")
    outcome = invoke("fit", "--images", "one", *SHOP_MODEL, "--concepts", "2", "--out", "fit", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["warnings"] == ["there was one image to learn from; its concepts say little about others"]


def test_fit_prints_the_concepts_and_what_to_do_next(elsewhere: Path):
    outcome = invoke(*FIT, "--no-pairs", "--limit", "8", "--out", "run")
    assert outcome.code == 0
    assert "3 of 3 concepts in use" in outcome.out
    assert "pace explain PICTURE --run run" in outcome.out
    assert "\x1b" not in outcome.out
    kept = record(elsewhere / "run")
    assert kept["images"]["count"] == kept["results"]["images"] == 8
    assert kept["results"]["bound"][-1]["stability"] == 0


def test_the_number_of_concepts_is_found_recorded_and_shown_in_the_report(elsewhere: Path):
    outcome = invoke(*FIT, "-k", "auto", "--out", "found")
    assert outcome.code == 0
    results = record(elsewhere / "found")["results"]
    selection, k = results["selection"], results["concepts"]
    assert f"found {k} concept{'s' * (k > 1)} in 12 images" in outcome.out.splitlines()
    assert f"{k} of {k} concepts in use" in outcome.out
    assert selection["numbers"][int(np.argmax(selection["bounds"]))] == k == len(selection["evidence"])
    again = invoke("fit", "--config", "found", "--json").document
    assert again["configuration"]["n_concepts"] == "auto"
    assert again["results"]["selection"] == selection
    assert invoke("report", "--run", "found", "--no-pairs", "--out", "page").code == 0
    assert 'href="#/number"' in (elsewhere / "page" / "report.html").read_text(encoding="utf-8")


def test_no_more_concepts_are_found_than_allowed(elsewhere: Path):
    color = ("fit", "--images", "color", "--model", "color", "--limit", "20", "--no-pairs", *QUICK)
    outcome = invoke(*color, "--concepts", "auto", "--max-concepts", "2", "--json")
    assert outcome.document["results"]["concepts"] == 2
    assert "raise --max-concepts, or set --concepts by hand" in outcome.err


def test_a_model_without_a_classifier_can_be_given_a_probe(elsewhere: Path):
    bare = ("fit", "--images", "shop/photos", "--model", "shop/bare.safetensors", *MODEL[2:], *QUICK)
    without = invoke(*bare, "--json").document
    assert any("--head probe" in warning for warning in without["warnings"])
    assert without["model"]["class_names"] is None
    document = invoke(*bare, "--head", "probe", "--out", "probed", "--json").document
    assert document["model"]["class_names"] == list(CLASSES)
    explained = invoke("explain", "shop/photos/test/blue/0.png", "--run", "probed", "--json").document
    assert explained["results"]["images"][0]["prediction"]["name"] == "blue"


@pytest.mark.parametrize(
    ("head", "images", "names"),
    [("knn", "shop/photos", CLASSES), ("clusters", "shop/flat", ("cluster 1", "cluster 2"))],
)
def test_other_heads_predict_labels_or_clusters_and_are_kept(
    head: str, images: str, names: tuple[str, ...], elsewhere: Path
):
    bare = ("fit", "--images", images, "--model", "shop/bare.safetensors", *MODEL[2:], *QUICK, "--no-pairs")
    outcome = invoke(*bare, "--head", head, "--out", "run")
    assert outcome.code == 0, outcome.err
    assert ("clusters of the model's own features, not classes of yours" in outcome.out) == (head == "clusters")
    assert record(elsewhere / "run")["model"]["class_names"] == list(names)
    explained = invoke("explain", "shop/flat/0.png", "--run", "run", "--json").document
    assert explained["results"]["images"][0]["prediction"]["name"] in names


def test_a_clip_in_a_file_predicts_the_names_it_is_given(elsewhere: Path):
    import torch
    from open_clip.model import CLIP

    vision = {"layers": 2, "width": 64, "head_width": 64, "patch_size": 16, "image_size": 32}
    torch.save(CLIP(8, vision, {"layers": 1, "width": 64, "heads": 1}).state_dict(), "clip.pt")
    Path("names.txt").write_text("wren\n\n crow \nrobin\n", encoding="utf-8")
    fit = ("fit", "--images", "shop/flat", "--model", "clip.pt", *QUICK, "--layer", "-1", "--no-pairs")
    outcome = invoke(*fit, "--classes", "names.txt", "--out", "run")
    assert outcome.code == 0, outcome.err
    assert "clip.pt: taken for CLIP; images are taken at 32 x 32 pixels and normalised as clip" in outcome.err
    kept = record(elsewhere / "run")
    assert kept["model"]["class_names"] == ["wren", "crow", "robin"]
    assert kept["configuration"]["classes"] == str(elsewhere / "names.txt")
    assert invoke("explain", "shop/flat/0.png", "--run", "run").code == 0
    assert "leave one out" in invoke(*fit, "--classes", "names.txt", "--head", "knn").error
    Path("names.txt").write_bytes("Mönch".encode("latin-1"))
    assert "--classes names.txt: expected a text in UTF-8" in invoke(*fit, "--classes", "names.txt").error
    Path("names.txt").write_text("wren", encoding="utf-8")
    assert "--classes: expected the names of 2 classes or more; found 1" in invoke(*fit, "--classes", "names.txt").error


def test_the_classes_of_a_model_in_a_file_can_be_named(elsewhere: Path):
    Path("names.txt").write_text("001.Cedar_Waxwing\nwren\n", encoding="utf-8")
    model = ("--model", "shop/tiny.safetensors", *MODEL[2:])
    fit = ("fit", "--images", "shop/flat", *model, *QUICK, "--no-pairs", "--classes", "names.txt")
    assert invoke(*fit, "--out", "run").code == 0
    assert record(elsewhere / "run")["model"]["class_names"] == ["001.Cedar_Waxwing", "wren"]
    assert not (elsewhere / "run" / "head.safetensors").exists()
    assert re.search("prediction: (Cedar Waxwing|wren) ", invoke("explain", "shop/flat/0.png", "--run", "run").out)
    Path("names.txt").write_text("wren\ncrow\nowl", encoding="utf-8")
    assert "--classes names.txt: the model predicts 2 classes; found 3 names" in invoke(*fit).error


# -- explain ---------------------------------------------------------------------------------------------------------------


def test_explain_says_what_the_library_says(elsewhere: Path, workshop: Path, backbone: Callable):
    from pace import PACE
    from pace.images import Folder

    document = invoke("explain", "shop/flat", "--run", "shop/fit", "--level", "0.8", "--json").document
    seen = backbone(record(workshop / "fit")["model"]["layer"], attention_layer=-1).observe(Folder(workshop / "flat"))
    expected = PACE.load(workshop / "fit" / "concepts.safetensors", device="cpu").explain(seen)
    low, high = expected.interval(0.8)
    found = document["results"]["images"]
    np.testing.assert_allclose([image["theta"] for image in found], expected.theta, atol=1e-4)
    for number, image in enumerate(found):
        shown = expected.shown_concepts(number, 5)
        assert [concept["concept"] for concept in image["top_concepts"]] == shown.tolist()
        for end, values in (("low", low), ("high", high)):
            ends = [concept[end] for concept in image["top_concepts"]]
            np.testing.assert_allclose(ends, values[number, shown], atol=1e-4)
        assert image["prediction"]["class"] == int(seen.predictions[number].argmax())
        assert np.array_equal(image["patch_concepts"], expected.phi[number].argmax(1).reshape(2, 2))


def test_cls_counts_as_a_patch_only_on_request_and_then_everywhere(elsewhere: Path, workshop: Path, backbone: Callable):
    from pace import PACE
    from pace.images import Folder

    assert record(workshop / "fit")["model"]["count_cls"] is False
    assert invoke(*FIT, "--cls", "--out", "counted").code == 0
    found = invoke("explain", "shop/flat", "--run", "counted", "--json").document["results"]["images"]
    concepts = PACE.load(elsewhere / "counted" / "concepts.safetensors", device="cpu")
    blocks = record(elsewhere / "counted")["model"]["layer"]
    counted = backbone(blocks, attention_layer=-1, count_cls=True)
    expected = concepts.explain(counted.observe(Folder(workshop / "flat"))).theta
    np.testing.assert_allclose([image["theta"] for image in found], expected, atol=1e-4)
    again = invoke("fit", "--config", "counted", "--json").document
    assert again["model"]["count_cls"] is True
    assert again["results"]["bound"] == record(elsewhere / "counted")["results"]["bound"]


def test_explain_prints_the_prediction_and_the_concepts_with_intervals(elsewhere: Path):
    outcome = invoke("explain", "shop/photos/test/amber/0.png", "--run", "shop/fit", "--top", "2", "--out", "seen")
    assert outcome.code == 0
    assert "prediction: " in outcome.out
    assert "90 % interval" in outcome.out
    assert "concepts in use of" in outcome.out
    assert "without it" in outcome.out
    assert re.search(r"2 concepts taken away: \d+ forward passes", outcome.out)
    row = record(elsewhere / "seen")["results"]["images"][0]["top_concepts"][0]["without"]
    assert row["low"] <= row["after"] <= row["high"]
    assert "without it" not in invoke("explain", "shop/flat", "--run", "shop/fit", "--no-ablation").out
    written = {"run.json", "report.html", "figure.png", "explanation.csv"}
    assert {path.name for path in (elsewhere / "seen").iterdir() if path.name != "lock"} == written
    assert "amber/0.png" in (elsewhere / "seen" / "report.html").read_text(encoding="utf-8")


def test_explain_speaks_of_parts_where_concepts_are_kinds_of_them(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    from pace import PACE

    flat, seen = PACE.explain, []

    def explain(self: PACE, *args: Any, **options: Any) -> Any:
        nested = replace(flat(self, *args, **options), weights=None, prior=None)
        seen.append((nested, concept_names(nested.part_of, self.concept_weights_)))
        return nested

    command = ("explain", "shop/flat", "--run", "shop/fit")
    plain = invoke(*command, "--json").document["results"]
    assert plain.keys() == {"level", "images"}
    assert "part" not in json.dumps(plain)
    monkeypatch.setattr(PACE, "explain", explain)
    monkeypatch.setattr(PACE, "part_of_", property(lambda self: np.array([1, 0, 1])))
    results = invoke(*command, "--json").document["results"]
    explanation, names = seen[0]
    assert results["concepts"] == [{"part": name.part, "kind": name.kind} for name in names]
    low, high = explanation.part_interval(0.9)
    for number, picture in enumerate(results["images"]):
        shown = explanation.shown_parts(number)
        assert [row["concept"] for row in picture["top_parts"]] == [explanation.kind_of(number, p) for p in shown]
        for key, values in (("theta", explanation.parts), ("low", low), ("high", high)):
            np.testing.assert_allclose([row[key] for row in picture["top_parts"]], values[number, shown], atol=1e-4)
        for row in picture["top_concepts"] + picture["top_parts"]:
            assert f"{row['part']}{row['kind']}" == names[row["concept"]].short
    out = invoke(*command, "--top", "1").out
    assert "part and kind" in out
    name = names[explanation.kind_of(0, explanation.shown_parts(0)[0])]
    assert re.search(rf"^{name.part} · kind {name.kind} +{explanation.parts[0].max():.3f} ", out, re.MULTILINE)


def test_explain_takes_files_and_folders_in_order_each_once(elsewhere: Path):
    pictures = ("shop/flat/3.png", "shop/flat", "shop/flat/3.png")
    document = invoke("explain", *pictures, "--run", "shop/fit", "--json").document
    names = [Path(image["picture"]).stem for image in document["results"]["images"]]
    assert names == ["3", "0", "1", "2", "4", "5", "6"]


# -- extract ---------------------------------------------------------------------------------------------------------------


def test_a_fit_on_extracted_observations_finds_the_same_concepts(elsewhere: Path, workshop: Path):
    from pace import PACE

    assert invoke("extract", *PHOTOS, "--out", "kept", "--json").document["results"]["images"] == 12
    assert invoke("fit", "--observations", "kept", *QUICK, "--out", "fit").code == 0
    ours = PACE.load(elsewhere / "fit" / "concepts.safetensors", device="cpu")
    direct = PACE.load(workshop / "fit" / "concepts.safetensors", device="cpu")
    np.testing.assert_allclose(np.sort(ours.means_, 0), np.sort(direct.means_, 0), atol=0.02)  # stored as float16
    assert record(elsewhere / "fit")["configuration"]["observations"] == str(elsewhere / "kept")
    alone = invoke("fit", "--observations", "kept", *QUICK, "--no-pairs", "--json").document
    assert alone["results"]["bound"][-1]["stability"] == 0


def test_an_extraction_resumes_in_its_folder_and_refuses_another_model(elsewhere: Path):
    from pace.cli.observing import kept_views
    from pace.cli.runs import open_run
    from pace.images import Folder, Perturbation

    assert invoke("extract", *PHOTOS, "--out", "kept").code == 0
    index = elsewhere / "kept" / "perturbed" / "index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps({**content, "shards": []}))
    assert "--config kept/run.json --out kept" in invoke("fit", "--observations", "kept", *QUICK).error
    assert invoke("extract", "--config", "kept/run.json", "--out", "kept").code == 0
    _, perturbed = kept_views(open_run("kept", "extract"), pairs=True)
    names = Folder("shop/photos/train").names
    np.testing.assert_array_equal(perturbed.crops, Perturbation(0).crops(names, (32, 32)))
    assert invoke("fit", "--observations", "kept", *QUICK).code == 0
    assert "--layer was None, now 2" in invoke("extract", *PHOTOS, "--out", "kept", "--layer", "2").error


# -- the layer -------------------------------------------------------------------------------------------------------------


def test_an_automatic_layer_is_explained_and_remembered(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    from pace.backbones import layers

    shares = iter([0.25, 0.75, 0.5] * 9)  # a view leaves most of the last block but one alone
    monkeypatch.setattr(layers, "kept_share", lambda *views: next(shares))
    outcome = invoke(*FIT, "--out", "fit")
    assert outcome.code == 0, outcome.err
    assert "parts at block 4, where a change of view leaves 75% of what sets patches apart" in outcome.err
    kept = record(elsewhere / "fit")
    assert (kept["model"]["layer"], kept["model"]["attention_layer"]) == ([4, 5], 5)
    assert invoke("explain", "shop/flat/0.png", "--run", "fit").code == 0
    again = invoke("fit", "--config", "fit", "--json").document
    assert again["model"] == kept["model"]
    assert again["results"]["bound"] == kept["results"]["bound"]
    assert invoke("extract", *PHOTOS, "--layer", "auto", "--no-pairs", "--out", "seen").code == 0
    assert record(elsewhere / "seen")["model"]["fingerprint"] == kept["model"]["fingerprint"]


# -- finetune --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder from which shop/ is the workshop, with tuned/, a run of `pace finetune`."""
    root = tmp_path_factory.mktemp("tuned")
    (root / "shop").symlink_to(workshop, target_is_directory=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        recipe = ("--epochs", "2", "--lr", "1e-3", "--normalize", "half", "--layer-decay", "0.8")
        outcome = invoke("finetune", *PHOTOS, *recipe, "--out", "tuned")
    assert outcome.code == 0, outcome.err
    assert "held-out accuracy" in outcome.out
    assert "--model tuned" in outcome.out
    return root


def test_a_finetuned_folder_is_a_model(tuned: Path, workshop: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tuned)
    kept = record(tuned / "tuned")["results"]
    assert (kept["class_names"], len(kept["history"])) == (list(CLASSES), 2)
    fit = ("fit", "--images", "shop/photos", *QUICK, "--model")
    for model in ("tuned", "tuned/model.safetensors"):
        found = invoke(*fit, model, "--json").document["model"]
        assert found["class_names"] == list(CLASSES)
        assert found["preprocessing"]["mean"] == [0.5, 0.5, 0.5]  # as it was trained
        assert found["fingerprint"] != record(workshop / "fit")["model"]["fingerprint"]
    assert "fine-tuned with its own" in invoke(*fit, "tuned", "--normalize", "clip").error
    assert invoke("explain", "shop/flat/0.png").code == 0


def test_a_finetuned_model_or_file_can_be_finetuned_again(tuned: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tuned)
    again = ("finetune", "--images", "shop/photos", "--epochs", "1", "--out")
    assert invoke(*again, "twice", "--model", "tuned").code == 0
    assert invoke(*again, "perturbed", "--model", "tuned", "--perturbed").code == 0
    assert Path("twice/model.safetensors").read_bytes() != Path("perturbed/model.safetensors").read_bytes()
    shutil.copy("tuned/model.safetensors", "half.safetensors")  # a file without its run says how it was trained
    assert invoke(*again, "more", "--model", "half.safetensors", *SHOP_MODEL[2:]).code == 0
    found = invoke("extract", "--images", "shop/photos", "--model", "more", "--no-pairs", "--json").document
    assert found["model"]["preprocessing"]["mean"] == [0.5, 0.5, 0.5]


def test_the_benchmark_takes_a_finetuned_folder(tuned: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tuned)
    small = ("--methods", "kmeans", "--concepts", "2", "--bootstrap", "5", "--hidden-images", "0", "--no-second-fit")
    outcome = invoke("benchmark", "--datasets", "shop/photos", "--backbone", "tuned", "--no-finetune", *small, "--json")
    assert outcome.code == 0, outcome.err
    (about,) = outcome.document["results"]["about"].values()
    assert (about["backbone"]["name"], about["backbone"]["training"]) == ("tuned", "as it comes")
    listed = invoke("runs", "--json").document["runs"][-1]
    assert (listed["command"], listed["of"]) == ("benchmark", "photos, tuned")


def test_a_finetuned_folder_outlives_the_weights_it_began_with(elsewhere: Path):
    """They were recognised, and the fine-tuned ones are too."""
    import timm
    import torch

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0)
    torch.save({"model": model.state_dict()}, "first.pth")
    tune = ("finetune", "--images", "shop/photos", "--model", "first.pth", "--epochs", "1", "--out", "tuned")
    outcome = invoke(*tune)
    assert outcome.code == 0, outcome.err
    assert (
        "first.pth: taken for vit_tiny_patch16_224; images are taken at 32 x 32 pixels and normalised as imagenet"
        in outcome.err
    )
    Path("first.pth").unlink()
    found = invoke("extract", "--images", "shop/flat", "--model", "tuned", "--no-pairs", "--json").document["model"]
    assert (found["class_names"], found["preprocessing"]["size"]) == (list(CLASSES), [32, 32])
    assert found["preprocessing"]["mean"] == [0.485, 0.456, 0.406]


def test_a_finished_finetuning_is_not_repeated_and_another_recipe_is_refused(
    tuned: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tuned)
    before = Path("tuned/model.safetensors").read_bytes()
    repeat = ("finetune", "--config", "tuned", "--out", "tuned")
    assert invoke(*repeat).code == 0
    assert Path("tuned/model.safetensors").read_bytes() == before
    assert "--epochs was 2, now 3" in invoke(*repeat, "--epochs", "3").error


# -- evaluate and report ---------------------------------------------------------------------------------------------------


def test_evaluate_then_report(elsewhere: Path):
    outcome = invoke("evaluate", "--run", "shop/fit", "--bootstrap", "20", "--hidden-images", "3", "--json")
    document = outcome.document
    assert document["images"]["split"] == "test"
    assert document["results"]["images"] == 12
    scores = document["results"]["scores"]
    assert {
        "faithfulness",
        "stability",
        "sparsity",
        "stability_ratio",
        "concept_effect",
        "gain_over_lot",
    } <= scores.keys()
    assert scores["faithfulness"]["low"] <= scores["faithfulness"]["value"] <= scores["faithfulness"]["high"]
    assert "Stability ratio" in outcome.err  # the table
    assert document["results"]["verdict"] in outcome.err
    assert "every" not in document["configuration"]

    document = invoke("report", "--run", "shop/fit", "--limit", "6", "--out", "page", "--json").document
    assert document["configuration"]["evaluation"] == str(next((elsewhere / "runs").glob("evaluate-*")))
    page = elsewhere / "page" / "report.html"
    assert document["results"]["address"] == page.as_uri()
    assert document["results"]["images"] == 6
    assert "Stability ratio" in page.read_text(encoding="utf-8")


def test_evaluate_prints_the_main_scores_first_and_the_verdict_last(elsewhere: Path):
    short, long = (invoke("evaluate", "--run", "shop/fit", "--bootstrap", "0", *all) for all in ((), ("--all",)))
    kept = record(next((elsewhere / "runs").glob("evaluate-*")))["results"]
    for outcome in (short, long):
        assert outcome.code == 0
        assert outcome.out.splitlines()[0].startswith("score")
        assert outcome.out.splitlines()[-1] == kept["verdict"]
        assert "Stability ratio" in outcome.out
        assert all(f"! {warning}" in outcome.out for warning in kept["warnings"])
    assert "Hoyer sparsity" not in short.out
    assert len(short.out.splitlines()[: short.out.splitlines().index("")]) - 1 - len(kept["warnings"]) <= 7
    assert all(score["title"] in long.out for score in kept["scores"].values())


def test_a_report_without_scores_says_how_to_get_them(elsewhere: Path):
    outcome = invoke("report", "--run", "shop/fit", "--no-pairs", "--images", "shop/flat")
    assert outcome.code == 0
    assert "pace evaluate" in outcome.out
    assert outcome.out.splitlines()[-1].startswith("file://")


def test_a_folder_without_splits_is_scored_on_a_part_and_reported_in_full(elsewhere: Path, workshop: Path):
    shutil.copytree(workshop / "photos" / "train", elsewhere / "own")
    assert invoke("fit", "--images", "own", *SHOP_MODEL, *QUICK, "--out", "fit").code == 0
    quick = ("--bootstrap", "10", "--hidden-images", "0")
    document = invoke("evaluate", "--run", "fit", *quick, "--out", "scores", "--json").document
    assert document["results"]["images"] == 2
    assert "concept_effect" not in document["results"]["scores"]
    assert any("the concepts have seen them" in warning for warning in document["warnings"])
    document = invoke("report", "--run", "fit", "--no-pairs", "--out", "page", "--json").document
    assert document["results"]["images"] == 12
    page = (elsewhere / "page" / "report.html").read_text(encoding="utf-8")
    assert "What the transformer sees in own" in page
    assert str(elsewhere) not in page
    assert "no scores of shop/fit" in invoke("report", "--run", "shop/fit", "--evaluation", "scores").error
    shutil.rmtree(elsewhere / "own")
    explained = invoke("explain", "shop/flat/0.png", "--run", "fit", "--json").document
    assert any("only shown in these pictures" in warning for warning in explained["warnings"])


# -- color and the demo ----------------------------------------------------------------------------------------------------


def test_the_model_color_explains_color_at_its_layer_and_is_scored_by_the_true_colours(elsewhere: Path):
    from pace.backbones.color_vit import LAYER

    fit = ("fit", "--images", "color", "--model", "color", *QUICK, "--limit", "12", "--out", "own", "--json")
    document = invoke(*fit).document
    assert document["model"]["layer"] == LAYER
    assert len(document["model"]["class_names"]) == 2
    explained = invoke("explain", "shop/flat/0.png", "--run", "own", "--json").document
    assert np.shape(explained["results"]["images"][0]["patch_concepts"]) == (14, 14)
    assert not explained["warnings"]
    document = invoke("evaluate", "--run", "own", "--limit", "10", "--bootstrap", "10", "--json").document
    assert 0 <= document["results"]["scores"]["colour_recovery"]["value"] <= 1


def test_demo_ends_with_the_address_of_its_page(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    from pace import PACE, demo
    from pace.metrics import Score, Scores

    def run(folder: Path, *, seed: int, n_per_class: int, n_concepts: int) -> demo.DemoResult:
        assert (seed, n_per_class, n_concepts) == (3, 60, 24)
        (folder / "report.html").write_text("page")
        scores = Scores(
            [Score("stability", "Stability", 0.5, 0.4, 0.6, "lower", (0, 2), "How far.")], ["Careful."], "Not yet."
        )
        return demo.DemoResult(folder, folder / "report.html", (folder / "a.png",), PACE(), scores, 1.5)

    monkeypatch.setattr(demo, "run", run)
    outcome = invoke("demo", "--seed", "3", "--out", "shown")
    assert outcome.code == 0
    assert outcome.out.splitlines()[-1] == (elsewhere / "shown" / "report.html").as_uri()
    assert "! Careful." in outcome.out
    assert "Not yet." in outcome.out
    assert "0.4 to 0.6" in outcome.out
    kept = record(elsewhere / "shown")["results"]
    assert (kept["address"], kept["warnings"]) == (outcome.out.splitlines()[-1], ["Careful."])
