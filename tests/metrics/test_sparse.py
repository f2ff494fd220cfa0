import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pace.metrics import concepts_in_use, effective_concepts, hoyer_sparsity, n_concepts, sparsity

THETA = arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(1, 6)), elements=st.floats(-5, 5, width=32))


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


def test_a_concept_is_in_use_if_it_holds_at_least_one_patch():
    assert concepts_in_use([3.0, 1.0, 0.99, 0.0]).tolist() == [True, True, False, False]


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
