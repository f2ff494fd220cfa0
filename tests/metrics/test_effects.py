"""Deletion and insertion by concept, on a planted prediction that depends on the patches of one concept alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pace.metrics import (
    Hiding,
    bootstrap,
    concept_effect,
    deletion,
    effect_by_attention,
    effect_by_lot,
    gain_over_attention,
    gain_over_lot,
    importance_agreement,
    insertion,
    main_concept_loss,
    score_explanations,
)

IMAGES, PATCHES, CONCEPTS = 40, 60, 9
RNG = np.random.default_rng(0)
EVIDENCE = 2  # the concept that counts
CONCEPT = RNG.choice(CONCEPTS, (IMAGES, PATCHES), p=[0.2, 0.2, 0.2, 0.15, 0.1, 0.05, 0.05, 0.03, 0.02])
PHI = np.eye(CONCEPTS)[CONCEPT]
FIRST = np.tile(np.eye(CONCEPTS)[EVIDENCE], (IMAGES, 1))  # an importance that knows it
EFFECTS = (concept_effect, effect_by_attention, effect_by_lot)


def predict(images, kept):
    """p(class 1) is the share of the evidence that is kept."""
    own = CONCEPT[images] == EVIDENCE
    share = (own & kept).sum(1) / own.sum(1)
    return np.stack([1 - share, share], 1)


def planted(attention=None, ask=predict):
    return Hiding(np.arange(IMAGES), ask, np.ones((IMAGES, PATCHES)) if attention is None else attention)


def test_the_concept_that_counts_has_the_best_effect_if_it_goes_first():
    size = (CONCEPT == EVIDENCE).mean(1)  # p falls from 1 to 0 while it goes, and rises from 0 to 1 while it comes
    assert deletion(planted(), PHI, FIRST) == pytest.approx((size / 2).mean())
    assert insertion(planted(), PHI, FIRST) == pytest.approx((1 - size / 2).mean())
    assert concept_effect(planted(), PHI, FIRST) == pytest.approx((1 - size).mean())
    assert concept_effect(planted(), PHI, -FIRST) == pytest.approx((size - 1).mean())
    assert gain_over_lot(planted(), PHI, FIRST) > 0.5


def test_importance_agrees_if_the_concept_named_first_is_the_one_that_counts():
    few = Hiding(np.arange(3), predict, np.ones((3, PATCHES)))
    found = importance_agreement(
        few, PHI, FIRST[:3]
    )  # five pairs of six groups hold the one that counts, the rest are ties
    assert found == pytest.approx((5 + 10 / 2) / 15)
    assert importance_agreement(few, PHI, -FIRST[:3]) == pytest.approx(1 - found)


def test_the_main_concept_is_compared_with_other_patches_of_its_shape_or_attention():
    found = main_concept_loss(planted(), PHI, FIRST, (6, 10))
    assert found == pytest.approx(1 - (CONCEPT == EVIDENCE).mean(), abs=0.05)  # others hold their share of the evidence
    knows = planted(attention=(CONCEPT == EVIDENCE) + 1e-6)
    assert main_concept_loss(knows, PHI, FIRST, (6, 10)) == pytest.approx(0, abs=0.05)
    assert main_concept_loss(planted(), PHI, -FIRST, (6, 10)) < 0
    covered = np.ones((IMAGES, PATCHES, 1))  # without all of the picture nothing is left, whatever is called a concept
    assert main_concept_loss(planted(), covered, FIRST[:, :1], (6, 10)) == pytest.approx(0)


def test_random_concepts_have_no_effect_and_attention_has_what_was_planted():
    assert effect_by_lot(planted(), PHI, FIRST) == pytest.approx(0, abs=0.05)
    knows = planted(attention=(CONCEPT == EVIDENCE) + 0.1)
    assert effect_by_attention(knows, PHI, FIRST) == pytest.approx(concept_effect(knows, PHI, FIRST))
    assert gain_over_attention(knows, PHI, FIRST) == pytest.approx(0)
    against = planted(attention=(CONCEPT != EVIDENCE) + 0.1)
    assert effect_by_attention(against, PHI, FIRST) < -0.5


def test_floors_go_in_steps_of_the_same_sizes():
    asked = {}

    def count(images, kept):
        for image, mask in zip(images, kept, strict=True):
            asked.setdefault(int(image), set()).add(int(mask.sum()))
        return predict(images, kept)

    concept_effect(planted(ask=count), PHI, FIRST)
    own, asked = asked, {}
    hiding = planted(ask=count, attention=RNG.random((IMAGES, PATCHES)))
    effect_by_lot(hiding, PHI, FIRST)
    effect_by_attention(hiding, PHI, FIRST)
    assert asked == own


def test_small_concepts_go_together_by_the_sum_of_their_importance_for_their_patches():
    concepts = np.repeat(np.arange(8), [9, 8, 7, 6, 5, 2, 2, 1])  # the last three have no group of their own
    phi, asked = np.eye(8)[concepts][None], []

    def record(images, kept):
        asked.extend(kept)
        return np.full((len(kept), 2), 0.5)

    hiding = Hiding(np.zeros(1, int), record, np.ones((1, 40)))
    # 0.6 / 9 for each patch of the first concept, 0.3 / 5 for each of the last three.
    assert insertion(hiding, phi, [[0.6, 0.1, 0.1, 0.1, 0.1, 0.2, 0.1, 0.0]]) == 0.5
    masks = {tuple(np.unique(concepts[mask])) for mask in asked}
    assert {(0,), (0, 5, 6, 7)} <= masks
    assert len(masks) == len({mask.tobytes() for mask in asked}) == 12  # six groups go and come


def test_nothing_is_predicted_twice():
    asked = []

    def record(images, kept):
        asked.extend((int(image), mask.tobytes()) for image, mask in zip(images, kept, strict=True))
        return predict(images, kept)

    hiding = planted(ask=record)
    for metric in (deletion, insertion, concept_effect):
        metric(hiding, PHI, FIRST)
    assert len(asked) == len(set(asked)) == 12 * IMAGES  # six groups: from whole to empty, and back another way
    importance_agreement(hiding, PHI, FIRST)
    assert len(asked) == len(set(asked)) == 16 * IMAGES  # of six groups, the first and the last have gone alone before
    for metric in (*EFFECTS, gain_over_lot, gain_over_attention):
        metric(hiding, PHI, FIRST)
    assert len(asked) == len(set(asked)) == 36 * IMAGES


def test_ties_are_broken_by_lot_so_equal_importance_has_no_effect():
    equal = np.zeros((len(PHI), PHI.shape[2]))
    found = [concept_effect(planted(), PHI, equal, seed=seed) for seed in range(20)]
    assert np.mean(found) == pytest.approx(0, abs=0.05)


def test_a_prediction_that_does_not_depend_on_patches_shows_no_effect():
    """CLS alone: whatever is hidden, the prediction stays."""
    still = planted(ask=lambda images, kept: np.tile([0.1, 0.9], (len(images), 1)))
    assert [metric(still, PHI, FIRST) for metric in EFFECTS] == pytest.approx([0] * 3)
    assert importance_agreement(still, PHI, FIRST) == 0.5


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=10)
def test_scores_are_in_their_ranges_and_the_scale_does_not_count(seed):
    importance = np.random.default_rng(seed).normal(size=(IMAGES, CONCEPTS))
    phi, hiding = np.eye(6)[CONCEPT % 6], planted()
    for metric in (deletion, insertion, importance_agreement, *EFFECTS):
        value = metric(hiding, phi, importance[:, :6])
        assert metric.range[0] <= value <= metric.range[1]
        assert metric(hiding, phi, 3 * importance[:, :6]) == pytest.approx(value)


def test_some_of_the_images_are_scored_and_a_method_that_beats_neither_floor_is_told_so():
    rows = np.arange(0, IMAGES, 2)
    attention = ((CONCEPT == EVIDENCE) + 2 * RNG.random((IMAGES, PATCHES)))[rows]
    hiding = Hiding(rows, lambda images, kept: predict(rows[images], kept), attention)
    theta = PHI.mean(1)
    found = type("Explanation", (), {"theta": theta, "phi": PHI})
    knows = score_explanations(found, found, hiding=hiding, importance=FIRST[rows], bootstrap=100)
    assert knows["concept_effect"].value == pytest.approx(1 - (CONCEPT[rows] == EVIDENCE).mean())
    assert knows["gain_over_lot"].low > 0.5
    assert not any("most important concepts" in warning for warning in knows.warnings)
    by_lot = score_explanations(found, found, hiding=hiding, importance=RNG.random((len(rows), CONCEPTS)))
    told = [warning for warning in by_lot.warnings if "most important concepts" in warning]
    assert "than on random patches" in told[0]
    assert "than on the patches with most attention" in told[1]
    plain = score_explanations(found, found, hiding=hiding)
    assert plain["deletion"] == bootstrap(deletion, hiding, PHI, theta[rows])


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="apply softmax to logits"):
        deletion(planted(ask=lambda images, kept: np.full((len(images), 2), 3.0)), PHI, FIRST)
    with pytest.raises(ValueError, match=r"predict: expected predictions \(40, classes\); found shape \(40,\)"):
        deletion(planted(ask=lambda images, kept: np.ones(len(images))), PHI, FIRST)
    with pytest.raises(ValueError, match=r"phi: expected \(40, 60\) images and patches; found \(40, 59\)"):
        deletion(planted(), PHI, FIRST, prefix_tokens=1)
    with pytest.raises(
        ValueError, match=r"importance: expected shape \(40, 9\) for the hidden images; found \(40, 8\)"
    ):
        deletion(planted(), PHI, FIRST[:, 1:])
    with pytest.raises(ValueError, match="importance of image 0 is NaN"):
        deletion(planted(), PHI, np.full((IMAGES, CONCEPTS), np.nan))
