import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pace import Explanation
from pace.metrics import (
    cls_weight,
    concepts_per_image,
    effective_concepts,
    hoyer_sparsity,
    leading_area,
    leading_attention,
    leading_share,
    levels,
    live_concepts,
    n_concepts,
    sparsity,
)

THETA = arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(1, 6)), elements=st.floats(-5, 5, width=32))
PHI = arrays(
    np.float64,
    st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5)),
    elements=st.floats(0, 5, width=32),
)


def test_sparsity_is_the_share_below_a_tenth_of_an_even_share():
    assert sparsity([[0.97, 0.01, 0.02, 0.0], [0.25, 0.25, 0.25, 0.25]]) == pytest.approx(3 / 8)


def test_signed_explanations_are_normalised_by_their_absolute_values():
    assert sparsity([[-50.0, 40.0, 0.1]]) == pytest.approx(1 / 3)
    assert hoyer_sparsity([[-1.0, 1.0, -1.0, 1.0]]) == pytest.approx(0)
    assert effective_concepts([[-1.0, 1.0], [1.0, -1.0]]) == pytest.approx(2)


def test_an_explanation_of_zeros_is_not_sparse():
    assert sparsity(np.zeros((3, 4))) == 0
    assert hoyer_sparsity(np.zeros((3, 4))) == pytest.approx(0)
    assert effective_concepts(np.zeros((3, 4))) == pytest.approx(4)


def test_hoyer_sparsity_by_hand():
    assert hoyer_sparsity([[0.0, 1.0, 0.0]]) == pytest.approx(1)
    assert hoyer_sparsity([[3.0, 4.0, 0.0, 0.0]]) == pytest.approx((2 - 7 / 5) / (2 - 1))
    assert hoyer_sparsity([[1.0], [2.0]]) == 0


def test_effective_concepts_by_hand():
    assert effective_concepts(np.eye(5)) == pytest.approx(5)
    assert effective_concepts(np.eye(5)[[0, 0, 1, 1]]) == pytest.approx(2)
    assert n_concepts(np.eye(5)[[0, 0, 1, 1]]) == 5


def test_a_collapse_to_one_concept_is_as_sparse_as_can_be_and_exposed_by_the_effective_number():
    collapsed = np.eye(100)[np.zeros(30, int)]
    assert sparsity(collapsed) == pytest.approx(0.99)
    assert hoyer_sparsity(collapsed) == pytest.approx(1)
    assert effective_concepts(collapsed) == pytest.approx(1)


@given(THETA)
@settings(deadline=None, max_examples=30)
def test_ranges_and_symmetries(theta):
    order = np.random.default_rng(0).permutation(theta.shape[1])
    for metric in (sparsity, hoyer_sparsity, effective_concepts, n_concepts):
        value = metric(theta)
        assert metric.range[0] - 1e-9 <= value <= min(metric.range[1], max(1, theta.shape[1])) + 1e-9
        assert metric(theta[:, order]) == pytest.approx(value)
        assert metric(theta * 4) == pytest.approx(value)
        assert metric(np.tile(theta, (3, 1))) == pytest.approx(value)


@pytest.mark.parametrize("metric", [sparsity, hoyer_sparsity, effective_concepts, n_concepts])
def test_bad_input_is_refused(metric):
    with pytest.raises(ValueError, match="theta of image 1 is NaN or infinite"):
        metric([[0.5, 0.5], [np.nan, 0.5]])
    with pytest.raises(ValueError, match=r"found float64 \(2,\)"):
        metric([0.5, 0.5])


def patches(*rows):
    return np.eye(4)[np.array(rows)]


def test_distinct_concepts_are_counted_in_every_image_without_the_prefix():
    phi = patches([3, 0, 0, 1], [3, 2, 2, 2])
    assert concepts_per_image(phi, 1) == pytest.approx(1.5)
    assert (live_concepts(phi, 1), live_concepts(phi)) == (3, 4)
    assert concepts_per_image(phi) == pytest.approx(2.5)


def test_the_leading_concept_of_a_typical_image():
    phi = patches([3, 0, 0, 1], [3, 2, 2, 2], [0, 1, 2, 3])
    assert leading_area(phi) == pytest.approx(0.5)  # of ½, ¾, ¼
    assert leading_area(phi[:2]) == pytest.approx(0.625)
    assert leading_area(phi, 1) == pytest.approx(2 / 3)
    attention = np.array([[5.0, 1, 1, 6], [1.0, 0, 0, 0], [1.0, 1, 1, 3]])
    assert leading_attention(phi, attention) == pytest.approx(0.5)  # of 6/13, 1, ½
    assert leading_attention(phi, attention, 1) == pytest.approx(0.6)  # of ¾, 0 (none at all), ⅗
    assert leading_share([[0.2, 0.8], [-3.0, 1.0], [0.0, 0.0]]) == pytest.approx(0.75)


def test_the_weight_of_cls_is_its_share():
    attention = np.array([[0.2, 0.4, 0.4], [3.0, 0.5, 0.5]])
    assert cls_weight(attention) == pytest.approx((0.2 + 0.75) / 2)
    assert cls_weight(attention, 0) == 0
    assert cls_weight(attention, 2) == pytest.approx((0.6 + 0.875) / 2)


def test_levels_are_found_and_not_believed():
    theta, phi = np.eye(4)[[0, 1, 2]], patches([0, 1, 1], [1, 2, 2], [2, 3, 3])
    described = np.arange(8.0).reshape(4, 2)

    def found(theta=theta, phi=phi, concepts=described):
        return levels(Explanation(theta, theta, phi), concepts)

    assert found() == 3
    assert found(concepts=None) == 2
    assert found(concepts=None, phi=None) == 1
    assert found(concepts=np.ones((4, 2))) == 2  # all concepts are the same
    assert found(concepts=described[:3]) == 2  # of another number of concepts
    assert found(concepts=np.full((4, 2), np.nan)) == 2
    assert found(theta=np.full((3, 4), 0.25)) == 2
    assert found(phi=np.repeat(theta[:, None], 3, 1)) == 2  # one concept for all patches
    assert found(phi=patches([0] * 19 + [1], [1] * 19 + [2], [2] * 20)) == 2  # one covers nearly all of them


@given(PHI)
@settings(deadline=None, max_examples=30)
def test_ranges_and_symmetries_of_patches(phi):
    most = min(phi.shape[1], phi.shape[2])
    tokens = np.random.default_rng(0).permutation(phi.shape[1])
    assert 1 <= concepts_per_image(phi) <= most
    assert concepts_per_image(phi[:, tokens]) == concepts_per_image(phi)
    assert 1 / most - 1e-9 <= leading_area(phi) <= 1
    assert leading_area(phi[:, tokens]) == leading_area(phi) == leading_attention(phi, np.ones(phi.shape[:2]))


@pytest.mark.parametrize("metric", [concepts_per_image, leading_area])
def test_bad_patches_are_refused(metric):
    with pytest.raises(ValueError, match=r"phi: expected numbers of shape \(images, tokens, concepts\)"):
        metric(np.ones((3, 4)))
    with pytest.raises(ValueError, match="phi of image 1 is NaN or infinite"):
        metric(np.array([[[1.0]], [[np.nan]]]))
    with pytest.raises(ValueError, match="prefix_tokens: expected 0 to 2; found 3"):
        metric(np.ones((1, 3, 2)), 3)


def test_bad_attention_is_refused():
    for attention in ([[0.5, -0.5]], [[0.0, 0.0]]):
        with pytest.raises(ValueError, match="not negative, and not all 0"):
            cls_weight(attention)
