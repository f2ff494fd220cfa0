"""The set of scores and warnings catches every degenerate explainer, and leaves a sound one alone."""

import json

import degenerate
import numpy as np
import pytest
from degenerate import TEST, TRAIN, explanation
from planted import planted

from pace import PACE, Observations
from pace.metrics import Score, Scores, evaluate, score_explanations
from pace.metrics.by_lot import random_mixtures
from pace.metrics.collapse import signs_of_collapse, verdict

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
            token_weights=case.attention[TEST],
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
        "leading_share",
        "leading_area",
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
    assert repr(scores).splitlines()[-1] == scores.verdict
    assert warned(scores, "as far from its original as any other image")
    assert warned(scores, "no better")
    assert warned(scores, "no patch level")
    assert scores["levels"].value == 1  # concepts are described, but neither images nor patches differ


def test_a_random_explanation_is_varied_and_caught(judged):
    scores = judged["random"]
    assert scores["effective_concepts"].value > 10
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
    assert scores["leading_area"].value == 1


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


def score(name: str, value: float, low: float | None = None, high: float | None = None) -> Score:
    return Score(name, name, value, low, high, None, (-1, 1), "")


SOUND = (score("faithfulness", 0.9), score("stability_ratio", 0.4), score("information_over_attention", 0.2))
FOLLOWS = score("warp_gain_over_attention", 0.1)


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ([score("stability_ratio", 0.95, 0.9, 1.0)], "as far from its original as any other image"),
        (
            [score("within_image_information", 0.05, 0.02), score("information_over_attention", 0.01, 0.0)],
            "no more of it than its place and attention do (within-image information 0.050, by attention alone 0.040)",
        ),
        ([score("within_image_information", 0.05, -0.01)], "(within-image information 0.050)"),
        (
            [score("warp_gain", 0.05, 0.02), score("warp_gain_over_attention", 0.03, -0.01)],
            "follow it no better than place and attention do (warp gain 0.050, by attention alone 0.020)",
        ),
        ([score("warp_gain", 0.0)], "(warp gain 0.000)"),
        ([score("leading_area", 0.95)], "One concept covers a typical image (95% of its patches)"),
        ([score("leading_area", 0.5), score("leading_attention", 0.93)], "50% of its patches, 93% of their attention"),
        ([score("part_consistency", 0.2, 0.15), score("part_consistency_by_position", 0.18)], "no better than a patch"),
    ],
)
def test_a_score_that_is_not_above_its_floor_is_named(scores, words):
    (sign,) = signs_of_collapse({score.name: score for score in scores})
    assert words in sign.sentence


def test_scores_above_their_floors_are_left_alone():
    scores = [
        score("stability_ratio", 0.9, 0.85, 0.95),
        score("within_image_information", 0.05, 0.04),
        score("information_over_attention", 0.02, 0.01),
        score("warp_gain", 0.05, 0.01),
        score("warp_gain_over_attention", 0.07, 0.04),
        score("leading_area", 0.75),
        score("part_consistency", 0.2, 0.19),
        score("part_consistency_by_position", 0.18),
    ]
    assert signs_of_collapse({score.name: score for score in scores}) == []


@pytest.mark.parametrize(
    ("scores", "line"),
    [
        (
            [*SOUND, FOLLOWS, score("gain_over_lot", 0.1, -0.1, 0.3)],
            "Believe images and patches, but not which concepts matter (random patches matter as much).",
        ),
        ([*SOUND, FOLLOWS], "Believe images and patches: no test speaks against it."),
        (
            [*SOUND, FOLLOWS, score("warp_gain", 0.0)],
            "Believe the image level only: no patch level (concepts do not follow the picture).",
        ),
        (SOUND, "Believe the image level only: the patch level was not tested (no warp gain over attention)."),
        (
            [*SOUND[1:], FOLLOWS],
            "Believe the patch level only: the image level was not tested (no faithfulness).",
        ),
        (
            [*SOUND[:2], score("class_echo", 0.99)],
            "Do not believe it: its concepts are the classes under other names; the patch level was not tested (no "
            "information over attention or warp gain over attention).",
        ),
        (
            [*SOUND, FOLLOWS, score("leading_area", 0.99), score("stability_ratio", 1.1)],
            "Do not believe it: a perturbed image might as well be another image; one concept covers the picture.",
        ),
    ],
)
def test_the_verdict_says_what_to_believe_and_the_main_reason_why_not(scores, line):
    known = {score.name: score for score in scores}
    assert verdict(known, signs_of_collapse(known)) == line


def test_an_explanation_that_says_no_more_than_random_concepts_is_caught():
    data = planted(images=300, grid=(4, 4))
    train, test = data.observations[:200], data.observations[200:]
    lot = random_mixtures(train, test, 8, device="cpu")
    known = {"yhat_train": train.predictions, "yhat_test": test.predictions, "random": lot, "bootstrap": 100}
    scores = score_explanations(*map(explanation, lot), **known)
    assert scores["fidelity_over_random"].value == 0
    assert warned(scores, "than concepts drawn by lot do")
    truth = explanation(data.theta[:200]), explanation(data.theta[200:])
    assert not warned(score_explanations(*truth, **known), "drawn by lot")


def test_scores_survive_json_and_their_intervals_hold_them(judged):
    for scores in judged.values():
        text = json.dumps(scores.as_dict(), allow_nan=False)
        assert Scores.from_dict(json.loads(text)).as_dict() == scores.as_dict()
        with pytest.raises(ValueError, match="verdict: expected str"):
            Scores.from_dict(json.loads(text) | {"verdict": {}})
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
    parts = np.tile([3, 12, -1], (20, 1))
    scores = evaluate(model, train, test, perturbed, colours=colours, parts=parts, bootstrap=20)
    assert scores["colour_recovery"].value > 0.9
    assert scores["stability_ratio"].value < 0.2
    assert scores["levels"].value == 3
    assert {"faithfulness", "faithfulness_given_prediction", "part_consistency", "part_ari"} <= scores.keys()
    assert scores["part_consistency_by_position"].value > 0.9  # every part is always in the same place
    assert scores["fidelity_over_random"].value > 0
    assert scores.verdict.endswith("the concepts follow the parts no better than position does.")
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
