"""Deletion and insertion by concept, on a planted prediction that depends on the patches of one concept alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pace.backbones import Backbone
from pace.images import Color
from pace.metrics import (
    Hiding,
    bootstrap,
    concept_effect,
    deletion,
    effect_by_attention,
    effect_by_lot,
    gain_over_attention,
    gain_over_lot,
    hide,
    hide_patches,
    hide_tokens,
    importance_agreement,
    insertion,
    score_explanations,
)
from pace.metrics.hiding import WAYS

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


def test_hidden_tokens_are_replaced_by_the_mean_patch_and_prefix_tokens_stay():
    tokens = torch.arange(12.0).reshape(1, 4, 3)
    seen = []
    hide_tokens(seen.append, tokens, 3)(np.array([0]), np.array([[True, False, True]]))
    expected = tokens.clone()
    expected[0, 2] = tokens[0, 1:].mean(0)
    torch.testing.assert_close(seen[0], expected)
    torch.testing.assert_close(tokens, torch.arange(12.0).reshape(1, 4, 3))


def test_tokens_left_out_are_not_there_and_images_keep_their_places():
    tokens = torch.arange(24.0).reshape(2, 4, 3)
    seen = []

    def forward(some):
        seen.append(some)
        return some.sum((1, 2))[:, None]

    kept = np.array([[True, False, True], [True, True, True], [False, False, True], [True, True, False]])
    found = hide_tokens(forward, tokens, 3, "left out")(np.array([0, 1, 1, 0]), kept)
    expected = [tokens[i][torch.tensor([True, *mask])].sum() for i, mask in zip([0, 1, 1, 0], kept, strict=True)]
    torch.testing.assert_close(found[:, 0], torch.stack(expected))
    assert [some.shape[:2] for some in seen] == [(1, 1), (1, 2), (2, 3), (1, 4)]  # first, an image without patches


def test_tokens_can_be_replaced_by_those_of_other_images():
    tokens, others, seen = torch.zeros(2, 4, 3), torch.arange(6.0).reshape(2, 3) + 1, []
    hide_tokens(seen.append, tokens, 3, others)(np.array([0, 1]), np.array([[True, False, False], [True, True, True]]))
    assert (seen[0][0, :2] == 0).all()
    assert (seen[0][1] == 0).all()
    assert all(any(torch.equal(row, other) for other in others) for row in seen[0][0, 2:])


def test_hidden_patches_are_covered_where_the_grid_says():
    images, seen = torch.rand(2, 3, 16, 32), []
    kept = np.array([[True, False, True, True]])
    for how in ("grey", "blur"):
        hide_patches(seen.append, images, (2, 2), how)(np.array([1]), kept)
    grey, blurred = (found[0] for found in seen)
    assert grey[:, :8, 16:].abs().sum() == 0
    assert 0 < blurred[:, :8, 16:].std() < images.std() / 5
    for found in (grey, blurred):
        torch.testing.assert_close(found[:, :8, :16], images[1, :, :8, :16])
        torch.testing.assert_close(found[:, 8:], images[1, :, 8:])


@pytest.fixture(scope="module")
def vit():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)

    def make(name="VisionTransformer", **options):
        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
        model = getattr(timm.models, name)(**sizes, **options)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        return model

    return make


@pytest.mark.parametrize("how", WAYS)
def test_patches_of_a_transformer_are_hidden_in_four_ways(vit, how):
    backbone, images = Backbone(vit(reg_tokens=1), layer=0, count_cls=True), Color("test", size=32)
    hiding = hide(backbone, images, np.array([1, 4, 7]), how)
    seen = backbone.observe(images.subset([1, 4, 7]))
    np.testing.assert_allclose(hiding.attention, seen.attention[:, 1:], atol=1e-6)
    numbers, kept = np.array([0, 1, 2]), np.ones((3, 16), bool)
    np.testing.assert_allclose(hiding.predict(numbers, kept), seen.predictions, atol=1e-5)
    kept[:, :5] = False
    hidden = hiding.predict(numbers, kept)
    assert np.abs(np.asarray(hidden) - np.asarray(seen.predictions)).max() > 1e-3
    torch.testing.assert_close(hiding.predict(numbers[1:], kept[1:]), hidden[1:])
    phi = np.random.default_rng(0).random((8, 17, 4))
    assert -1 <= concept_effect(hiding, phi, np.ones((3, 4)), prefix_tokens=1) <= 1


def test_models_that_need_every_patch_say_so(vit):
    images, rows = Color("test", size=32), np.array([0])
    for model, why in (
        (vit(class_token=False, global_pool="avg"), "it averages its patches"),
        (vit("Eva", use_rot_pos_emb=True), "size of tensor"),
    ):
        with pytest.raises(ValueError, match=rf"patches cannot be left out of this model \(.*{why}"):
            hide(Backbone(model), images, rows, "left out")
    with pytest.raises(ValueError, match="how: expected one of grey, blur, mean, left out; found 'black'"):
        hide(Backbone(vit()), images, rows, "black")


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
