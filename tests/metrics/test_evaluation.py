"""The set of scores and warnings catches every degenerate explainer, and leaves a sound one alone."""

import json
from dataclasses import replace

import degenerate
import numpy as np
import pytest
from degenerate import TEST, TRAIN, explanation
from planted import planted

from pace import PACE, Observations
from pace.metrics import Scores, evaluate, score_explanations
from pace.metrics.collapse import collapses

WORLD = degenerate.world()
NAMES = ("sound", "constant", "random", "one_concept_per_class", "one_concept_for_all_patches", "cls_alone")


@pytest.fixture(scope="module")
def judged() -> dict[str, Scores]:
    found = {}
    for name in NAMES:
        case = getattr(degenerate, name)(WORLD)
        found[name] = score_explanations(
            explanation(case.theta[TRAIN]),
            explanation(case.theta[TEST], case.phi[TEST]),
            explanation(case.theta_perturbed[TEST]),
            yhat_train=WORLD.yhat[TRAIN],
            yhat_test=WORLD.yhat[TEST],
            yhat_perturbed=WORLD.yhat_perturbed[TEST],
            given_prediction=(degenerate.one_hot(WORLD.yhat[TRAIN]), degenerate.one_hot(WORLD.yhat[TEST])),
            attention=case.attention[TEST],
            concepts=np.eye(degenerate.CONCEPTS),
            colours=WORLD.colours[TEST],
            bootstrap=50,
        )
    return found


def warned(scores: Scores, words: str) -> bool:
    return any(words in warning for warning in scores.warnings)


def test_a_sound_explanation_has_all_scores_and_no_warning(judged):
    scores = judged["sound"]
    assert scores.warnings == []
    assert scores["faithfulness"].value > 0.85
    assert scores["colour_recovery"].value == pytest.approx(1)
    assert scores["levels"].value == 3
    assert scores["reidentification"].value > 0.8
    assert list(scores) == [
        "faithfulness",
        "faithfulness_given_prediction",
        "nonlinear_faithfulness",
        "majority_class",
        "class_echo",
        "stability",
        "stability_when_prediction_holds",
        "prediction_survival",
        "between_images",
        "stability_ratio",
        "reidentification",
        "sparsity",
        "hoyer_sparsity",
        "levels",
        "concepts_per_image",
        "patch_variety",
        "cls_weight",
        "live_concepts",
        "n_concepts",
        "effective_concepts",
        "colour_recovery",
        "colour_accuracy",
        "colour_purity",
    ]


def test_a_constant_explanation_is_perfectly_stable_and_caught(judged):
    scores = judged["constant"]
    assert scores["stability"].value == 0
    assert warned(scores, "nearly the same explanation")
    assert "Stability: 0.00 [0.00, 0.00]" in repr(scores)
    assert repr(scores).count("warning: ") == len(scores.warnings)
    assert warned(scores, "as far from its original as any other image")
    assert warned(scores, "no better")
    assert warned(scores, "no patch level")
    assert scores["levels"].value == 1  # concepts are described, but neither images nor patches differ


def test_a_random_explanation_is_varied_and_caught(judged):
    scores = judged["random"]
    assert scores["effective_concepts"].value > 10
    assert scores["patch_variety"].value > 2
    assert warned(scores, "as far from its original as any other image")
    assert warned(scores, "no better")
    assert warned(scores, "only repeats the prediction")
    assert warned(scores, "not the true colours")


def test_one_concept_per_class_meets_the_papers_scores_and_is_caught(judged):
    scores, sound = judged["one_concept_per_class"], judged["sound"]
    assert scores["faithfulness"].value == 1
    assert scores["stability"].value < sound["stability"].value
    assert scores["sparsity"].value > sound["sparsity"].value
    assert warned(scores, "predicted class under another name")
    assert warned(scores, "no patch level")
    assert warned(scores, "not the true colours")
    assert scores["reidentification"].value < 0.2


def test_one_concept_for_all_patches_of_an_image_is_caught(judged):
    scores = judged["one_concept_for_all_patches"]
    assert scores["sparsity"].value > judged["sound"]["sparsity"].value
    assert warned(scores, "no patch level")
    assert scores["levels"].value == 2
    assert scores["patch_variety"].value == pytest.approx(1)


def test_cls_alone_looks_sound_in_its_patches_and_is_caught(judged):
    scores = judged["cls_alone"]
    assert scores["concepts_per_image"].value > 2
    assert scores["colour_recovery"].value > 0.9
    assert warned(scores, "CLS carries 90%")


def test_a_collapse_to_two_concepts_is_caught(judged):
    theta = np.tile(np.eye(12)[:2], (20, 1))
    scores = score_explanations(explanation(theta), explanation(theta), bootstrap=0)
    assert warned(scores, "Only about 2.0 of 12 concepts")
    assert warned(scores, "no predictions, so faithfulness is not measured")
    assert scores["levels"].value == 1  # neither concepts nor patches are described
    assert "concepts_per_image" not in scores
    both = explanation(np.tile(np.eye(2), (20, 1)))  # two concepts of two are no collapse
    assert not warned(score_explanations(both, both, bootstrap=0), "Only about")


def test_patches_that_hardly_differ_and_parts_that_concepts_ignore_are_caught(judged):
    scores = dict(judged["sound"])
    scores["patch_variety"] = replace(scores["patch_variety"], value=1.01)
    scores["part_consistency"] = replace(scores["colour_recovery"], name="part_consistency", value=0.01)
    variety, parts = collapses(scores)
    assert "hardly differ in their concepts (patch variety 1.01)" in variety
    assert parts == "The concepts do not follow the parts (agreement 0.01)."


def test_scores_survive_json_and_their_intervals_hold_them(judged):
    for scores in judged.values():
        text = json.dumps(scores.as_dict(), allow_nan=False)
        assert Scores.from_dict(json.loads(text)).as_dict() == scores.as_dict()
        for name, score in scores.items():
            if name in ("n_concepts", "levels", "live_concepts"):
                assert (score.low, score.high) == (None, None)
            else:
                assert score.range[0] <= score.low <= score.value <= score.high <= score.range[1]


@pytest.fixture(scope="module")
def fitted():
    data = planted(k=4, d=8, images=60, grid=(4, 4), classes=3)
    train, test = data.observations[:40], data.observations[40:]
    model = PACE(4, covariance="diag", max_iter=40, n_init=1, progress=False)
    return model.fit(train, perturbed=data.perturbed[:40]), train, test, data.perturbed[40:], data


def test_evaluate_scores_a_fitted_model(fitted):
    model, train, test, perturbed, data = fitted
    colours = data.concepts[40:, 1:].reshape(-1, 4, 4)
    parts = np.tile([3, 7, -1], (20, 1))
    scores = evaluate(model, train, test, perturbed, colours=colours, parts=parts, bootstrap=20)
    assert scores["colour_recovery"].value > 0.9
    assert scores["stability_ratio"].value < 0.2
    assert scores["levels"].value == 3
    assert {"faithfulness", "faithfulness_given_prediction", "part_consistency"} <= scores.keys()
    plain = evaluate(model, train, test, perturbed, colours=colours, parts=parts, bootstrap=0)
    assert {name: score.value for name, score in plain.items()} == {name: score.value for name, score in scores.items()}
    assert {score.low for score in plain.values()} == {None}


def test_evaluate_needs_neither_perturbed_views_nor_predictions(fitted):
    model, train, test, _, _ = fitted
    blind = [
        Observations(some.embeddings, some.attention, None, some.grid, some.prefix_tokens) for some in (train, test)
    ]
    scores = evaluate(model, *blind, bootstrap=0)
    assert scores["sparsity"].low is None
    assert not {"faithfulness", "stability", "stability_ratio"} & scores.keys()
    assert warned(scores, "faithfulness is not measured")


def test_evaluate_says_when_there_is_one_predicted_class_only(fitted):
    model, train, test, _, _ = fitted
    always = np.tile([1.0, 0.0, 0.0], (40, 1))
    one = Observations(train.embeddings, train.attention, always, train.grid, train.prefix_tokens)
    scores = evaluate(model, one, test, bootstrap=0)
    assert "faithfulness" not in scores
    assert warned(scores, "one class for all training images")


def test_evaluate_refuses_perturbed_views_of_other_images(fitted):
    model, train, test, perturbed, _ = fitted
    with pytest.raises(ValueError, match=r"theta_perturbed: expected shape \(20, 4\)"):
        evaluate(model, train, test, perturbed[:5])


def test_one_test_image_can_be_scored(fitted):
    model, train, test, perturbed, _ = fitted
    scores = evaluate(model, train, test[0], perturbed[0], bootstrap=20)
    assert scores["stability"].low is None
    assert "stability_ratio" not in scores
