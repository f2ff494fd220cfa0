import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pace.metrics import deletion, evidence_gap, hide_patches, hide_tokens, insertion, patch_relevance

IMAGES, PATCHES = 12, 20
RNG = np.random.default_rng(0)
EVIDENCE = np.stack([RNG.permutation(PATCHES) for _ in range(IMAGES)]) < 4  # the patches that the prediction depends on


def predict(images, kept):
    """p(class 1) is the share of the evidence that is kept."""
    share = (EVIDENCE[images] & kept).sum(1) / 4
    return np.stack([1 - share, share], 1)


YHAT = np.ones(IMAGES, int)


def test_the_evidence_first_makes_the_prediction_fall_and_rise_at_once():
    removed = deletion(predict, EVIDENCE, YHAT)  # of 0, 2, 4, … patches, 4 of which count: 1, 0.5, 0, …
    assert removed == pytest.approx(0.1)
    assert insertion(predict, EVIDENCE, YHAT) == pytest.approx(1 - 0.1)
    assert evidence_gap(predict, EVIDENCE, YHAT) == pytest.approx(1 - 0.2)


def test_ties_are_broken_at_random_so_one_concept_for_all_patches_shows_no_evidence():
    def leans_left(images, kept):
        share = kept[:, : PATCHES // 2].mean(1)
        return np.stack([1 - share, share], 1)

    gaps = [evidence_gap(leans_left, np.ones((IMAGES, PATCHES)), YHAT, seed=seed) for seed in range(20)]
    assert np.mean(gaps) == pytest.approx(0, abs=0.03)


def test_a_prediction_that_does_not_depend_on_patches_shows_no_evidence():
    """CLS alone: whatever is hidden, the prediction stays."""
    assert evidence_gap(lambda images, kept: np.tile([0.1, 0.9], (len(images), 1)), EVIDENCE, YHAT) == 0


def test_the_predicted_class_is_that_of_the_whole_image_unless_given():
    assert deletion(predict, EVIDENCE, batch_size=5) == deletion(predict, EVIDENCE, YHAT)
    assert deletion(predict, EVIDENCE, 1 - YHAT) == pytest.approx(1 - deletion(predict, EVIDENCE, YHAT))
    assert deletion(predict, EVIDENCE, np.eye(2)[YHAT]) == deletion(predict, EVIDENCE, YHAT)


def test_relevance_adds_up_over_concepts():
    phi = np.array([[[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]])
    np.testing.assert_allclose(patch_relevance(phi, [[2.0, -1.0]]), [[2.0, 0.5, -1.0]])
    np.testing.assert_allclose(patch_relevance(phi, [[2.0, -1.0]], 1), [[0.5, -1.0]])
    with pytest.raises(ValueError, match=r"concept_relevance: expected shape \(1, 2\) to match phi; found \(1, 3\)"):
        patch_relevance(phi, [[1.0, 2.0, 3.0]])


def test_hidden_tokens_are_replaced_by_the_mean_patch_and_prefix_tokens_stay():
    tokens = torch.arange(12.0).reshape(1, 4, 3)
    seen = []

    def forward(tokens):
        seen.append(tokens)
        return torch.tensor([[0.5, 0.5]])

    hide_tokens(forward, tokens, 3)(np.array([0]), np.array([[True, False, True]]))
    expected = tokens.clone()
    expected[0, 2] = tokens[0, 1:].mean(0)
    torch.testing.assert_close(seen[0], expected)
    torch.testing.assert_close(tokens, torch.arange(12.0).reshape(1, 4, 3))


def test_hidden_patches_are_filled_where_the_grid_says():
    images = torch.ones(2, 3, 4, 8)
    seen = []
    hide_patches(lambda images: seen.append(images), images, (2, 2))(
        np.array([1]), np.array([[True, False, True, True]])
    )
    assert seen[0].shape == (1, 3, 4, 8)
    assert seen[0][0, :, :2, 4:].sum() == 0
    assert seen[0].sum() == 3 * 4 * 8 * 3 / 4


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=10)
def test_ranges_and_order_alone_counts(seed):
    relevance = np.random.default_rng(seed).normal(size=(IMAGES, PATCHES))
    for metric in (deletion, insertion, evidence_gap):
        value = metric(predict, relevance, YHAT)
        assert metric.range[0] <= value <= metric.range[1]
        assert metric(predict, 3 * relevance**3 + 1, YHAT) == pytest.approx(value)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="apply softmax to logits"):
        deletion(lambda images, kept: np.full((len(images), 2), 3.0), EVIDENCE)
    with pytest.raises(ValueError, match=r"predict: expected predictions \(12, classes\); found shape \(12,\)"):
        deletion(lambda images, kept: np.ones(len(images)), EVIDENCE)
    with pytest.raises(ValueError, match="yhat: expected one of the 2 classes of predict; found 7"):
        deletion(predict, EVIDENCE, np.full(IMAGES, 7))
    with pytest.raises(ValueError, match="relevance of image 0 is NaN"):
        deletion(predict, np.full((IMAGES, PATCHES), np.nan))
