"""The whole way, small: stopped, resumed, failing, and from the official layout of Cars."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from pace.benchmark import Recipe, Results, Scoring, cache, run, running, views
from pace.benchmark.cache import Cache, key_of, source_digest, stored_as
from pace.benchmark.data import open_dataset
from pace.benchmark.methods import Method, choose_methods

METHODS = ["pace", "saliency", "kmeans"]
QUICK = Scoring(bootstrap=10, regression_runs=2, hidden_images=4)
OPTIONS = {"pace": {"max_iter": 2, "n_init": 1}}


def small(out, recipe, methods=METHODS, **options):
    given = {"limit": 16, "concepts": 4, "scoring": QUICK, "options": OPTIONS, "batch_size": 16, "repeats_shap": 3}
    return run(out, ["color"], methods, recipe=recipe, **{**given, **options})


@pytest.fixture(scope="module")
def whole(tmp_path_factory, weights):
    recipe = Recipe(weights, "test_vit", 32, epochs=3, lr=1e-3, batch_size=8)
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
    assert {"faithfulness_given_prediction", "colour_recovery", "deletion", "insertion"} <= pace.scores.keys()
    assert "faithfulness_given_prediction" not in saliency.scores
    # CLS is all that saliency reads of the last layer, though it is no patch; k-means has no part of it.
    assert saliency.value("cls_weight") == 1
    assert kmeans.value("cls_weight") == 0
    assert results.about["color"]["backbone"]["name"] == "test_vit"
    assert [stage.name for stage in results.stages] == ["backbone", "observations", *METHODS]


def test_it_leaves_tables_and_numbers_behind(whole):
    folder, results = whole
    assert {"results.json", "results.csv", "results.md", "tables.md"} <= {file.name for file in folder.iterdir()}
    assert scores_of(Results.load(folder)) == scores_of(results)
    assert json.loads((folder / "results.json").read_text())["settings"]["recipe"]["architecture"] == "test_vit"
    assert not [file for file in folder.rglob("*") if file.suffix in (".pt", ".pkl", ".pickle", ".tmp")]


def test_a_run_killed_within_a_method_loses_that_one_alone(whole, tmp_path, recipe, monkeypatch):
    judge, asked = running.judge, []

    def killed(method, *rest):
        asked.append(method.label)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return judge(method, *rest)

    monkeypatch.setattr(running, "judge", killed)
    with pytest.raises(KeyboardInterrupt):
        small(tmp_path, recipe)
    assert [row.method.label for row in Results.load(tmp_path).rows] == ["pace"]
    checkpoint = next((tmp_path / "color").glob("backbone-*.safetensors"))
    written = checkpoint.stat().st_mtime_ns
    shards = {file: file.stat().st_mtime_ns for file in (tmp_path / "color").glob("observations-*/*/*/*.safetensors")}
    assert shards

    results = small(tmp_path, recipe)
    assert asked == ["pace", "saliency", "saliency", "kmeans"]
    assert [(stage.name, stage.cached) for stage in results.stages if stage.name in METHODS] == [
        ("pace", True),
        ("saliency", False),
        ("kmeans", False),
    ]
    assert scores_of(results) == scores_of(whole[1])
    assert checkpoint.stat().st_mtime_ns == written
    assert {file: file.stat().st_mtime_ns for file in shards} == shards


def test_a_finished_run_does_nothing_again_but_what_changed(whole, recipe, monkeypatch):
    folder, _ = whole
    judge, asked = running.judge, []
    monkeypatch.setattr(running, "judge", lambda method, *rest: asked.append(method.label) or judge(method, *rest))
    monkeypatch.setattr("pace.benchmark.views.observe_pair", lambda *_, **__: pytest.fail("observed again"))
    lines = []
    small(folder, recipe, report=lines.append)
    assert asked == []
    assert "color: kmeans, done before (4 of 4)" in lines
    monkeypatch.undo()
    monkeypatch.setattr(running, "judge", lambda method, *rest: asked.append(method.label) or judge(method, *rest))
    small(folder, recipe, options={**OPTIONS, "kmeans": {"sample": 50}})
    assert asked == ["kmeans"]


@pytest.mark.parametrize("stage", ["observations", "methods"])
def test_edited_code_invalidates_what_rests_on_it_and_never_the_model(whole, tmp_path, recipe, monkeypatch, stage):
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    before = {file.name for file in (folder / "color").iterdir()}
    code_of = cache.code_of
    for module in (running, views):
        monkeypatch.setattr(module, "code_of", lambda name: "edited" if name == stage else code_of(name))
    lines = []
    results = small(folder, recipe, report=lines.append)
    now = {file.name for file in (folder / "color").iterdir()}
    assert not any(stage.cached for stage in results.stages if stage.name in METHODS)
    assert {name.partition("-")[0] for name in now - before} == {
        *METHODS,
        *(["observations"] if stage == "observations" else []),
    }
    assert scores_of(results) == scores_of(whole[1])
    # Observations that nothing can read any more are gone, and nothing else is.
    gone = before - now
    if stage == "observations":
        (name,) = gone
        assert name.startswith("observations-")
        assert f"color: removed observations that other code made: {name}" in lines
    else:
        assert gone == set()
        assert not any("removed" in line for line in lines)


def test_only_observations_of_other_code_are_removed(tmp_path):
    kept = [
        stored_as(code="now", model="a"),
        stored_as(code="now", model="b"),
        f"observations-{key_of(code='then')}-mine",
        "observations-2026",
        "backbone-0123456789ab",
    ]
    old = sorted([stored_as(code="then", model="a"), "observations-0123456789ab"])
    for name in (*kept, *old):
        (tmp_path / name / "train" / "original").mkdir(parents=True)
    holiday = tmp_path / stored_as(code="then", model="b")
    (holiday / "holiday").mkdir(parents=True)
    link, note = (tmp_path / f"observations-{end * 12}" for end in "ab")
    link.symlink_to(tmp_path / kept[3], target_is_directory=True)
    note.write_text("a file")
    found = Cache(tmp_path).discard_observations("now")
    assert sorted(found) == old
    assert {path.name for path in tmp_path.iterdir()} == {*kept, holiday.name, link.name, note.name}
    assert (tmp_path / kept[3] / "train" / "original").is_dir()


def test_the_code_is_known_by_names_and_contents(tmp_path):
    for name in ("model/one.py", "images/two.py", "cli/three.py", "model/data.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)

    def digests():
        return [
            source_digest(tmp_path),
            source_digest(tmp_path, only=("images", "model/one.py")),
            source_digest(tmp_path, without=("cli",)),
        ]

    def changed(edit):
        before = digests()
        edit()
        return [old != new for old, new in zip(before, digests(), strict=True)]

    assert changed(lambda: None) == [False, False, False]
    assert changed(lambda: (tmp_path / "model/one.py").write_text("edited")) == [True, True, True]
    assert changed(lambda: (tmp_path / "cli/three.py").write_text("edited")) == [True, False, False]
    assert changed(lambda: (tmp_path / "model/one.py").rename(tmp_path / "model/four.py")) == [True, True, True]
    assert changed(lambda: (tmp_path / "model/four.py").write_text("again")) == [True, False, True]
    assert changed(lambda: (tmp_path / "model/data.json").write_text("edited")) == [False, False, False]


def test_every_part_of_the_code_that_is_named_is_there():
    for name in (*cache._SEEING, *cache._SHOWING):
        assert (cache._PACKAGE / name).exists(), name
    assert cache.code_of("observations") != cache.code_of("methods")


def test_a_method_that_fails_is_a_row_and_is_tried_again(whole, recipe):
    folder, _ = whole
    results = small(folder, recipe, ["kmeans", "gmm"], options={"gmm": {"n_concepts": 10**6}})
    assert results.row("color", "kmeans").failed is None
    assert "n_concepts=1000000 is more than" in results.row("color", "gmm").failed
    assert "| Gaussian mixture | failed |" in (folder / "tables.md").read_text()
    again = small(folder, recipe, ["gmm"], options={})
    assert again.row("color", "gmm").failed is None


@pytest.mark.parametrize("layer", ["auto", None], ids=["asked for", "by default"])
def test_an_automatic_layer_is_chosen_on_the_training_images(layer, tmp_path, recipe, monkeypatch):
    from pace.observing import layers

    observe, asked, shares = layers.observe, [], iter([0.2, 0.5])

    def watched(backbone, images, **options):
        asked.append((backbone.layer, images.fingerprint()))
        return observe(backbone, images, **options)

    monkeypatch.setattr(layers, "observe", watched)
    monkeypatch.setattr(layers, "within_share", lambda seen: next(shares))
    lines = []
    results = small(tmp_path, replace(recipe, layer=layer), ["kmeans", "saliency"], options={}, report=lines.append)
    train = open_dataset("color", None, 16, 0).train.fingerprint()
    assert asked == [(5, train), (4, train)]
    assert lines[0] == "color: block 4: 50.0 % of its patches' variance lies within images, against 20.0 % at block 5"
    about = results.about["color"]["backbone"]
    assert (about["layer"], about["attention_layer"]) == (4, 5)
    assert Results.load(tmp_path).settings["recipe"]["layer"] == layer
    assert [row.failed for row in results.rows] == [None, None]


def test_the_layer_of_the_shipped_vit_is_the_demos(tmp_path):
    from pace.backbones.color_vit import LAYER

    about = small(tmp_path, None, ["majority"], limit=4, options={}).about["color"]["backbone"]
    assert about["layer"] == about["attention_layer"] == LAYER


@pytest.mark.parametrize(("shipped", "counted"), [(Recipe(), False), (Recipe(count_cls=True), True)])
def test_cls_is_no_patch_unless_it_is_to_count(shipped, counted, tmp_path):
    results = small(tmp_path, shipped, ["kmeans"], options={})
    about = results.about["color"]
    assert about["backbone"]["count_cls"] is counted
    assert about["tokens"] == 196 + counted
    assert results.rows[0].value("cls_weight") == pytest.approx(counted / about["tokens"])


@pytest.mark.parametrize("layer", [-1, -2])
def test_attributions_score_the_same_whether_cls_counts_or_not(layer, recipe, tmp_path):
    methods, few = ["saliency", "shap", "lime", "agi"], {"lime": {"samples": 30, "repeats": 2}}
    counted, patches = (
        small(tmp_path / str(count), replace(recipe, layer=layer, count_cls=count), methods, options=few, store=False)
        for count in (True, False)
    )
    assert [row.failed for row in patches.rows] == [None] * len(methods)
    assert scores_of(patches) == scores_of(counted)
    assert counted.about["color"]["tokens"] - patches.about["color"]["tokens"] == 1


@pytest.mark.parametrize("keep", [True, False], ids=["stored", "in memory"])
@pytest.mark.parametrize("name", ["registers", "cls"])
def test_every_token_is_observed_only_where_a_method_asks_the_model(
    name, keep, with_registers, recipe, tmp_path, monkeypatch
):
    if name == "registers":
        weights, _, architecture = with_registers
        recipe = replace(recipe, name=weights, architecture=architecture, layer=-2, count_cls=True)
    observe, seen = views.observe_pair, []

    def watched(backbone, *rest, **options):
        seen.append(type(backbone).__name__)
        return observe(backbone, *rest, **options)

    monkeypatch.setattr(views, "observe_pair", watched)

    def found(folder, *methods):
        seen.clear()
        results = small(tmp_path / folder, recipe, methods, options={}, store=keep)
        assert [row.failed for row in results.rows] == [None] * len(methods)
        return scores_of(results), {*seen}, [stage.name for stage in results.stages if stage.cached]

    scores, asked, _ = found("one by one", "kmeans")
    assert asked == {"Backbone"}
    # A method that is added later gets what it needs, and the one before it is not computed again.
    both, asked, before = found("one by one", "kmeans", "saliency")
    assert asked == {"EveryToken"}
    assert before == ["kmeans"]
    assert both["kmeans"] == scores["kmeans"]
    # What was observed for such a method serves the others as well, and to the same end.
    together, asked, _ = found("together", "saliency", "kmeans")
    assert asked == {"EveryToken"}
    assert together == both
    _, asked, _ = found("together", "gmm")
    assert asked == {"EveryToken" if keep else "Backbone"}


def test_the_methods_that_ask_the_model_are_those_that_need_every_token(with_registers):
    import timm
    import torch

    from pace import Backbone
    from pace.baselines import EXPLAINERS

    model = timm.create_model(with_registers[2], img_size=32, num_classes=2).eval()
    backbone = Backbone(model, -2)
    seen = backbone.observe(torch.rand(12, 3, 32, 32))
    few = {"max_iter": 1, "n_init": 1}
    for method in choose_methods(list(EXPLAINERS), 2, options={"pace": few, "pace-paper": few}):
        try:
            method.make().fit(backbone, seen)
            refused = False
        except ValueError as error:
            refused = "that the observations leave out" in str(error)
            assert refused, method.label
        assert refused == method.asks_model, method.label
    assert not Method("true-colors", "true-colors").asks_model


def test_it_says_how_long_a_dataset_took_and_whether_all_of_it_was_done(tmp_path, recipe):
    first = small(tmp_path, recipe, ["kmeans"], options={}).about["color"]
    assert first["seconds"] > 0
    assert first["resumed"] is False
    second = small(tmp_path, recipe, ["kmeans", "majority"], options={}).about["color"]
    assert second["seconds"] > 0
    assert second["resumed"] is True
    assert Results.load(tmp_path).about["color"] == second
    for page in ("tables.md", "results.md"):
        assert "From beginning to end: Color " in (tmp_path / page).read_text()


def test_a_dataset_without_a_model_fails_and_the_others_go_on(tmp_path, weights, cars_root):
    bare = Recipe(weights, "test_vit", 32, train=False)
    results = run(tmp_path / "out", ["cars"], ["kmeans"], data_root=cars_root, recipe=bare, concepts=3)
    assert "no classifier, and cars has 2 classes; fine-tune it" in results.rows[0].failed


def test_runs_with_another_seed_are_averaged(whole, recipe):
    folder, _ = whole
    lime = small(folder, recipe, ["lime"], options={"lime": {"repeats": 3, "samples": 30}}).rows[0]
    assert lime.runs == 3
    assert lime.spread["stability"] > 0
    assert lime.spread.keys() >= {"faithfulness", "sparsity", "stability"}
    assert lime.scores["stability"].low <= lime.value("stability") <= lime.scores["stability"].high
    # At the last layer h is linear, and expected gradients do not depend on where they are taken.
    shap = small(folder, recipe, ["shap"], options={}).rows[0]
    assert shap.runs == 1
    assert "the same explanations to the last bit" in shap.notes[0]


def test_no_run_is_begun_after_the_time_for_them(whole, recipe):
    folder, _ = whole
    limits = Scoring(bootstrap=2, regression_runs=1, repeat_seconds=0, hidden_images=0)
    found = small(folder, recipe, ["lime"], options={"lime": {"samples": 30}}, scoring=limits).rows[0]
    assert found.runs == 1
    assert found.notes == ("1 of 10 runs in the 0 seconds they were given",)


def test_the_patch_level_can_be_scored_on_fewer_images(whole, recipe):
    folder, results = whole
    fewer = Scoring(bootstrap=2, regression_runs=1, hidden_images=0, patch_images=5)
    found = small(folder, recipe, ["kmeans"], options={}, scoring=fewer).rows[0]
    whole_row = results.row("color", "kmeans")
    assert found.value("faithfulness") == whole_row.value("faithfulness")
    assert found.value("patch_variety") != whole_row.value("patch_variety")
    assert found.value("colour_recovery") != whole_row.value("colour_recovery")
    assert "deletion" not in found.scores


def test_cars_runs_from_its_official_layout(tmp_path, recipe, cars_root):
    results = run(
        tmp_path / "out",
        ["cars"],
        ["craft", "true-colors", "majority"],
        data_root=cars_root,
        recipe=recipe,
        concepts=4,
        options={"craft": {"sample": 100, "designs": 4}},
        scoring=QUICK,
        batch_size=8,
    )
    assert [row.method.label for row in results.rows] == ["craft", "majority"]  # Cars has no true colours
    assert all(row.failed is None for row in results.rows)
    assert results.about["cars"]["train_images"] == 8
    assert "(0.01)" in (tmp_path / "out" / "tables.md").read_text()  # what the paper prints for CRAFT's faithfulness


def test_the_true_colours_recover_the_colours(whole, recipe):
    folder, _ = whole
    found = small(folder, recipe, ["true-colors"], concepts=6, options={}).rows[0]
    assert found.failed is None
    assert found.value("colour_accuracy") == 1
    assert 0 < found.value("stability") < 2


def test_few_images_are_of_few_classes_and_the_same_in_both_splits():
    found = open_dataset("color", None, 8, seed=0)
    assert len(found.train) == len(found.test) == 8
    np.testing.assert_array_equal(np.bincount(found.train.labels), [4, 4])
    assert open_dataset("color", None, 8, seed=0).facts() == found.facts()
    assert open_dataset("color", None, 8, seed=1).facts() != found.facts()
    assert open_dataset("color", None, 8, seed=0, color_size=32).train[0].shape == (3, 32, 32)


def test_fine_tuning_never_sees_the_perturbations_of_the_scores():
    from pace.images import AUGMENT_SEED, Perturbation

    assert AUGMENT_SEED > 0
    first, second = (Perturbation(seed).draw(range(50), (32, 32)) for seed in (0, AUGMENT_SEED))
    assert not np.array_equal(first.boxes, second.boxes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["deeplift"]}, "method 'deeplift' is not known; expected some of pace, pace-paper"),
        ({"methods": []}, "methods: expected some of"),
        ({"methods": ["pace", "pace"]}, "'pace' is there twice; give one of them a label"),
        ({"methods": ["../up=pace"]}, "label '../up': expected letters, digits"),
        ({"options": {"pace": {"covarience": "tied"}}}, "pace has no option 'covarience'; it has"),
        ({"options": {"saliency": {"repeats": 2}}}, "saliency has no option 'repeats'"),
        (
            {"options": {"lime": {"samples": 2}}},
            "options for 'lime', which is not among the methods pace, saliency; add lime to them",
        ),
        (
            {"options": {"few": {"n_concepts": 5}, "em": {"refine": 0}}},
            "options for 'em', which is not among the methods pace, saliency; add em=pace, say, to them",
        ),
        ({"repeats_shap": 0, "methods": ["shap"]}, "shap: repeats: expected a whole number of at least 1; found 0"),
        ({"datasets": ["flower"]}, "flower: data_root is needed"),
        ({"datasets": []}, "datasets: expected some of color"),
        ({"datasets": ["color", "color"]}, "two are called color"),
        ({"limit": 1}, "limit: expected 4 images or more; found 1"),
        ({"recipe": None, "datasets": ["cub"]}, "cub: which model is to be explained"),
        (
            {"recipe": Recipe(normalize="half")},
            "normalize: the ViT shipped for Color has its own; leave it out, or name",
        ),
        ({"recipe": Recipe(image_size=32)}, "image_size: the ViT shipped for Color has its own"),
        ({"recipe": Recipe(layer_decay=0.7)}, "layer_decay: the ViT shipped for Color is not fine-tuned; leave it out"),
        ({"recipe": Recipe(epochs=3)}, "epochs: the ViT shipped for Color is not fine-tuned"),
    ],
)
def test_mistakes_are_answered_in_one_line_before_any_work(tmp_path, recipe, monkeypatch, options, message):
    monkeypatch.setattr(running, "prepare_subject", lambda *_: pytest.fail("loaded a model"))
    given = {"datasets": ["color"], "methods": ["pace", "saliency"], "recipe": recipe, **options}
    with pytest.raises(ValueError, match=message) as caught:
        run(tmp_path / "out", **given)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_missing_folder_is_named(tmp_path, recipe):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run(tmp_path, ["./nowhere"], recipe=recipe)
