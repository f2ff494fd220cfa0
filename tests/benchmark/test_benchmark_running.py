"""The whole way, small: stopped, resumed and failing."""

import json
import shutil

import numpy as np
import pytest

from pace import Explanation
from pace.benchmark import Recipe, Results, Scoring, data, run, running, scoring
from pace.benchmark.data import open_dataset

METHODS = ["pace", "saliency", "kmeans"]
QUICK = Scoring(bootstrap=10, regression_runs=2, hidden_images=4)
OPTIONS = {"pace": {"max_iter": 2, "n_init": 1}}


def small(out, recipe, methods=METHODS, **options):
    given = {"limit": 12, "concepts": 4, "scoring": QUICK, "options": OPTIONS, "batch_size": 16, "repeats_shap": 3}
    return run(out, ["color"], methods, recipe=recipe, **{**given, **options})


@pytest.fixture(scope="module")
def whole(tmp_path_factory, weights):
    recipe = Recipe(weights, "test_vit", 32, epochs=1, lr=1e-3, batch_size=8)
    folder = tmp_path_factory.mktemp("whole")
    return folder, small(folder, recipe)


def scores_of(results):
    return {row.method.label: row.scores.as_dict() for row in results.rows}


def test_every_method_gets_every_score_it_can_have(whole):
    _, results = whole
    pace, saliency, kmeans = results.rows
    for row in results.rows:
        assert row.failed is None
        assert {
            "faithfulness",
            "stability",
            "sparsity",
            "stability_ratio",
            "nonlinear_faithfulness",
        } <= row.scores.keys()
        assert row.images_per_second > 0
        assert row.seconds.keys() == {"fit", "explain", "score"}
    by_concept = {
        "deletion",
        "insertion",
        "concept_effect",
        "effect_by_attention",
        "effect_by_lot",
        "importance_agreement",
        "main_concept_loss",
    }
    assert {"faithfulness_given_prediction", "colour_recovery", *by_concept} <= pace.scores.keys()
    assert "faithfulness_given_prediction" not in saliency.scores
    for row in (pace, kmeans):
        assert {"seeds_alike", "reconstruction", "live_concepts"} <= row.scores.keys()
    assert "seeds_alike" not in saliency.scores  # it learns no concepts
    # CLS is all that saliency reads of the last layer, though it is no patch; k-means has no part of it.
    assert saliency.value("cls_weight") == 1
    assert kmeans.value("cls_weight") == 0
    assert results.about["color"]["backbone"]["name"] == "test_vit"


def test_kinds_of_parts_are_scored_without_being_told_the_prediction(tmp_path, recipe):
    options = {"pace": {"parts": 2, "max_iter": 2, "n_init": 1}}
    (row,) = small(tmp_path, recipe, ["pace"], options=options).rows
    assert row.failed is None
    assert "faithfulness_given_prediction" not in row.scores
    assert {"concept_effect", "warp_gain", "seeds_alike", "colour_recovery"} <= row.scores.keys()


def test_it_leaves_tables_and_numbers_behind(whole):
    folder, results = whole
    assert {"results.json", "results.csv", "results.md"} <= {file.name for file in folder.iterdir()}
    assert scores_of(Results.load(folder)) == scores_of(results)
    assert json.loads((folder / "results.json").read_text())["settings"]["recipe"]["architecture"] == "test_vit"
    assert not [file for file in folder.rglob("*") if file.suffix in (".pt", ".pkl", ".pickle", ".tmp")]


def test_a_run_killed_within_a_method_loses_that_one_alone(whole, tmp_path, recipe, monkeypatch):
    score_method, asked = running.score_method, []

    def killed(method, *rest):
        asked.append(method.label)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return score_method(method, *rest)

    monkeypatch.setattr(running, "score_method", killed)
    with pytest.raises(KeyboardInterrupt):
        small(tmp_path, recipe)
    assert [row.method.label for row in Results.load(tmp_path).rows] == ["pace"]
    checkpoint = next((tmp_path / "color").glob("backbone-*.safetensors"))
    written = checkpoint.stat().st_mtime_ns
    shards = {file: file.stat().st_mtime_ns for file in (tmp_path / "color").rglob("observations/**/*.safetensors")}
    assert shards

    lines = []
    results = small(tmp_path, recipe, report=lines.append)
    assert asked == ["pace", "saliency", "saliency", "kmeans"]
    assert "color: pace, done before (1 of 3 methods done)" in lines
    assert scores_of(results) == scores_of(whole[1])
    assert checkpoint.stat().st_mtime_ns == written
    assert {file: file.stat().st_mtime_ns for file in shards} == shards


def test_a_finished_run_does_nothing_again_but_what_changed(whole, recipe, monkeypatch):
    folder, _ = whole
    score_method, asked = running.score_method, []
    monkeypatch.setattr(
        running, "score_method", lambda method, *rest: asked.append(method.label) or score_method(method, *rest)
    )
    monkeypatch.setattr("pace.benchmark.data.observe_pair", lambda *_, **__: pytest.fail("observed again"))
    lines = []
    small(folder, recipe, report=lines.append)
    assert asked == []
    assert "color: kmeans, done before (3 of 3 methods done)" in lines
    monkeypatch.undo()
    monkeypatch.setattr(
        running, "score_method", lambda method, *rest: asked.append(method.label) or score_method(method, *rest)
    )
    small(folder, recipe, options={**OPTIONS, "kmeans": {"sample": 50}})
    assert asked == ["kmeans"]


def test_edited_code_computes_all_but_the_model_anew_and_deletes_nothing(whole, tmp_path, recipe, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    before = {file: file.stat().st_mtime_ns for file in (folder / "color").rglob("*") if file.is_file()}
    monkeypatch.setattr(data, "code_digest", lambda: "edited")
    results = small(folder, recipe)
    assert scores_of(results) == scores_of(whole[1])
    assert {file: file.stat().st_mtime_ns for file in before} == before
    new = {
        file.name.partition("-")[0] for file in (folder / "color").iterdir() if file.is_file() and file not in before
    }
    assert new == {*METHODS, "observations"}
    assert len(list((folder / "color" / "observations").iterdir())) == 2


def test_a_method_that_fails_is_a_row_and_is_tried_again(whole, recipe):
    folder, _ = whole
    results = small(folder, recipe, ["kmeans", "gmm"], options={"gmm": {"n_concepts": 10**6}})
    assert results.row("color", "kmeans").failed is None
    assert "n_concepts=1000000 is more than" in results.row("color", "gmm").failed
    assert "| Gaussian mixture | failed |" in (folder / "results.md").read_text()
    again = small(folder, recipe, ["gmm"], options={})
    assert again.row("color", "gmm").failed is None


def test_an_automatic_layer_is_chosen_on_the_training_images(tmp_path, recipe, monkeypatch):
    from pace.backbones import layers

    observe_pair, asked, shares = layers.observe_pair, [], iter([0.2, 0.5, 0.1])

    def watched(backbone, images, **options):
        asked.append((backbone.layers, images.fingerprint()))
        return observe_pair(backbone, images, **options)

    monkeypatch.setattr(layers, "observe_pair", watched)
    monkeypatch.setattr(layers, "kept_share", lambda *views: next(shares))
    lines = []
    results = small(tmp_path, recipe, ["pace", "kmeans", "saliency", "craft"], options={}, report=lines.append)
    train = open_dataset("color", None, 12, 0).train.fingerprint()
    assert asked == [([3, 4, 5], train)]  # all blocks from one run of the model
    assert lines[0].startswith("color: parts at block 4, where a change of view leaves 50% of what sets patches apart")
    about = results.about["color"]["backbone"]
    assert (about["layer"], about["attention_layer"]) == ((4, 5), 5)
    assert [row.failed for row in results.rows] == [None] * 4


@pytest.mark.parametrize("counted", [False, True])
def test_the_shipped_vit_is_explained_where_the_demo_does_and_cls_counts_only_if_asked(counted, tmp_path):
    from pace.backbones.color_vit import LAYER

    results = small(tmp_path, Recipe(count_cls=counted), ["kmeans"], limit=4, options={})
    about = results.about["color"]
    assert about["backbone"]["layer"] == about["backbone"]["attention_layer"] == LAYER
    assert about["backbone"]["count_cls"] is counted
    assert about["tokens"] == 196 + counted
    assert (results.rows[0].value("cls_weight") > 0) == counted


def test_a_dataset_without_a_model_is_rows_that_say_so(tmp_path, weights):
    results = small(tmp_path, Recipe(weights, "test_vit", 32, train=False), ["kmeans"], options={})
    assert "no classifier, and color has 2 classes; fine-tune it" in results.rows[0].failed


def test_runs_with_another_seed_are_averaged(whole, recipe):
    folder, _ = whole
    lime = small(folder, recipe, ["lime"], options={"lime": {"repeats": 3, "samples": 30}}).rows[0]
    assert lime.runs == 3
    assert lime.spread["stability"] > 0
    assert lime.spread.keys() >= {"faithfulness", "sparsity", "stability"}
    assert lime.scores["stability"].low <= lime.value("stability") <= lime.scores["stability"].high


def test_no_run_is_begun_after_the_time_for_them(whole, recipe):
    folder, _ = whole
    limits = Scoring(bootstrap=2, regression_runs=1, repeat_seconds=0, hidden_images=0)
    found = small(folder, recipe, ["lime"], options={"lime": {"samples": 30}}, scoring=limits).rows[0]
    assert found.runs == 1
    assert found.note == "1 of 10 runs in the 0 seconds they were given"


def test_the_patch_level_can_be_scored_on_fewer_images(whole, recipe):
    folder, results = whole
    fewer = Scoring(bootstrap=2, regression_runs=1, hidden_images=0, patch_images=5, second_fit=False)
    found = small(folder, recipe, ["kmeans"], options={}, scoring=fewer).rows[0]
    whole_row = results.row("color", "kmeans")
    assert found.value("faithfulness") == whole_row.value("faithfulness")
    assert found.value("concepts_per_image") != whole_row.value("concepts_per_image")
    assert found.value("colour_recovery") != whole_row.value("colour_recovery")
    assert found.scores.keys().isdisjoint({"deletion", "seeds_alike"})


def test_the_second_fit_is_the_same_method_with_the_next_seed(tmp_path, recipe, monkeypatch):
    from pace.baselines import KMeans

    fit, seeds = KMeans._fit, []
    monkeypatch.setattr(
        KMeans, "_fit", lambda self, *given: seeds.append((self.sample, given[-1])) or fit(self, *given)
    )
    found = small(tmp_path, recipe, ["random"], options={"random": {"sample": 20}}, seed=3).rows[0]
    assert seeds == [(20, 3), (20, 4)]
    assert found.value("seeds_alike") < 1  # other patches, other centres


def test_every_reference_is_scored_and_those_without_a_patch_level_follow_no_start(whole, recipe):
    folder, _ = whole
    names = ["position", "attention-rank", "lot", "random", "sae", "embedding"]
    found = small(folder, recipe, names, options={"sae": {"steps": 10}})
    assert [row.failed for row in found.rows] == [None] * len(names)
    assert all(row.method.is_reference for row in found.rows)
    learned = [row.method.name for row in found.rows if "seeds_alike" in row.scores]
    assert learned == ["lot", "random", "sae"]
    assert {row.method.name for row in found.rows if "deletion" in row.scores} == {*names} - {"embedding"}


def test_the_true_colours_recover_the_colours(whole, recipe):
    folder, _ = whole
    found = small(folder, recipe, ["true-colors"], concepts=6, options={}).rows[0]
    assert found.failed is None
    assert found.value("colour_accuracy") == 1
    assert 0 < found.value("stability") < 2


def test_concepts_drawn_by_lot_are_as_many_as_a_method_uses():
    phi = np.zeros((2, 4, 50))  # two images of CLS and three patches
    phi[:, 0, 9] = 1  # CLS is no patch
    phi[:, 1:, 0], phi[:, 1, 3], phi[0, 2, 4] = 5, -15, 0.1  # of any size and sign; concept 4 holds next to nothing
    theta = np.full((2, 50), 0.02)  # the true colours, say, whose empty concepts keep their prior
    assert scoring._in_use(Explanation(theta, theta, phi, prefix_tokens=1)) == 2
    assert scoring._in_use(Explanation(theta, theta)) == 50


def test_few_images_are_of_few_classes_and_the_same_in_both_splits():
    found = open_dataset("color", None, 8, seed=0)
    assert len(found.train) == len(found.test) == 8
    np.testing.assert_array_equal(np.bincount(found.train.labels), [4, 4])
    assert open_dataset("color", None, 8, seed=0).train.fingerprint() == found.train.fingerprint()
    assert open_dataset("color", None, 8, seed=1).train.fingerprint() != found.train.fingerprint()
    assert open_dataset("color", None, 8, seed=0, color_size=32).train[0].shape == (3, 32, 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["deeplift"]}, "method 'deeplift' is not known; expected some of pace, pace-paper"),
        ({"methods": []}, "methods: expected some of"),
        ({"methods": ["pace", "pace"]}, "'pace' is there twice; give one of them its own label"),
        ({"methods": ["../up=pace"]}, "label '../up': expected letters, digits"),
        ({"options": {"pace": {"covarience": "tied"}}}, "pace has no option 'covarience'; it has"),
        ({"options": {"saliency": {"repeats": 2}}}, "saliency has no option 'repeats'"),
        (
            {"options": {"lime": {"samples": 2}}},
            "options for 'lime', not one of the methods pace, saliency; add lime to them",
        ),
        (
            {"options": {"few": {"n_concepts": 5}, "em": {"refine": 0}}},
            "options for 'em', not one of the methods pace, saliency; add em=pace, say, to them",
        ),
        ({"repeats_shap": 0, "methods": ["shap"]}, "shap: repeats: expected a whole number of at least 1; found 0"),
        ({"datasets": ["flower"]}, "flower: data_root is needed"),
        ({"datasets": []}, "datasets: expected some of color"),
        ({"datasets": ["color", "color"]}, "two have the same name"),
        ({"limit": 1}, "limit: expected 4 images or more; found 1"),
        ({"recipe": None, "datasets": ["cub"]}, "cub: which model"),
        (
            {"recipe": Recipe(normalize="half")},
            "normalize: the ViT shipped for Color has its own; leave it out, or name",
        ),
        ({"recipe": Recipe(layer_decay=0.7)}, "layer_decay: the ViT shipped for Color is not fine-tuned; leave it out"),
    ],
)
def test_mistakes_are_found_before_any_work(tmp_path, recipe, monkeypatch, options, message):
    monkeypatch.setattr(running, "prepare_subject", lambda *_: pytest.fail("loaded a model"))
    given = {"datasets": ["color"], "methods": ["pace", "saliency"], "recipe": recipe, **options}
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()
