from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pace import Explanation
from pace.naming import concept_names


def example(rows=3, columns=5, k=4, images=2, prefix=1):
    rng = np.random.default_rng(1)
    gamma = rng.gamma(2, size=(images, k))
    phi = rng.dirichlet(np.ones(k), (images, rows * columns + prefix))
    return Explanation(gamma / gamma.sum(1, keepdims=True), gamma, phi, (rows, columns), prefix)


@given(
    gamma=st.lists(st.floats(0.3, 200), min_size=2, max_size=6),
    level=st.floats(0.8, 0.99),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=10, deadline=None)
def test_the_credible_interval_covers_its_share_of_the_posterior(gamma, level, seed):
    gamma = np.array([gamma])
    low, high = Explanation(gamma / gamma.sum(), gamma).interval(level)
    draws = np.random.default_rng(seed).dirichlet(gamma[0], 20_000)
    inside = ((draws >= low[0]) & (draws <= high[0])).mean(0)
    np.testing.assert_allclose(inside, level, atol=0.02)


def test_one_image_of_an_explanation_is_an_explanation():
    explanation = example()
    np.testing.assert_array_equal(explanation[-1].interval(0.9)[0], explanation.interval(0.9)[0][1:])
    assert len(explanation[0]) == 1


def test_top_concepts_come_largest_first():
    explanation = example()
    top = explanation.top_concepts(1, 3)
    assert len(top) == 3
    assert list(explanation.theta[1][top]) == sorted(explanation.theta[1], reverse=True)[:3]


def test_concepts_that_only_the_prior_put_into_an_image_are_not_shown():
    gamma = np.array([[12.0, 0.001, 3.0, 0.001, 0.001], [0.001, 0.001, 5.0, 0.001, 9.0]])  # what α alone gives
    explanation = Explanation(gamma / gamma.sum(1, keepdims=True), gamma)
    assert explanation.shown_concepts(0, 3).tolist() == [0, 2]
    assert explanation.shown_concepts(1).tolist() == [4, 2]
    assert explanation.shown_concepts(-1, 1).tolist() == [4]
    assert len(explanation.top_concepts(0, 3)) == 3
    assert repr(explanation) == "Explanation(2 images, 3 of 5 concepts, image level)"
    assert repr(example()) == "Explanation(2 images, 4 concepts, image and patch level)"


def test_attributions_against_a_class_count_by_their_size():
    theta = np.array([[0.4, -3.0, 0.0]])
    assert Explanation(theta, theta).shown_concepts(0).tolist() == [0, 1]


def test_a_patch_map_is_laid_out_like_the_patches_without_the_prefix():
    explanation = example()
    assert explanation.patch_map(1, 2)[2, 4] == explanation.phi[1, 1 + 2 * 5 + 4, 2]


def test_aggregation_averages_blocks_and_what_is_left_at_the_edge():
    explanation = example()
    coarse = explanation.aggregate(2)
    assert coarse.grid == (2, 3)
    fine = explanation.phi[0, 1:].reshape(3, 5, 4)
    np.testing.assert_allclose(coarse.patch_map(0, 1)[0, 1], fine[0:2, 2:4, 1].mean())
    np.testing.assert_allclose(coarse.patch_map(0, 1)[1, 2], fine[2, 4, 1])
    np.testing.assert_allclose(coarse.phi.sum(-1), 1)


def test_what_is_missing_or_out_of_range_is_refused_with_a_reason():
    explanation = example()
    with pytest.raises(ValueError, match="no patch level"):
        Explanation(explanation.theta, explanation.gamma).patch_map(0, 0)
    with pytest.raises(ValueError, match=r"pass grid=\(rows, columns\)"):
        Explanation(explanation.theta, explanation.gamma, explanation.phi).aggregate(2)
    with pytest.raises(IndexError):
        explanation[2]
    with pytest.raises(IndexError, match="index 4 is out of bounds"):
        explanation.patch_map(0, 4)
    with pytest.raises(ValueError, match="level"):
        explanation.interval(90)


def nested_explanation() -> Explanation:
    """Two images, four patches; concepts 0 and 1 are kinds of part 0, concept 2 is part 1."""
    phi = np.array([[[0.9, 0.0, 0.1], [0.8, 0.0, 0.2], [0.0, 0.0, 1.0], [0.1, 0.0, 0.9]]] * 2)
    gamma = np.array([[2.0, 0.0, 3.0], [1.0, 1.0, 3.0]])
    shares = {"weights": np.full((2, 4), 0.5), "prior": np.array([0.5, 0.5])}
    return Explanation(gamma / 5, gamma, phi, grid=(2, 2), **shares, part_of=np.array([0, 0, 1]))


def test_the_parts_of_an_image_come_largest_first_with_their_likeliest_kind():
    explanation = nested_explanation()
    np.testing.assert_array_equal(explanation.shown_parts(0), [1, 0])
    np.testing.assert_array_equal(explanation.shown_parts(0, 1), [1])
    for image in range(2):
        assert explanation.kind_of(image, 0) == explanation.theta[image, :2].argmax()
        assert explanation.kind_of(image, 1) == 2


def test_names_go_by_use_in_the_model_not_by_the_images():
    explanation = nested_explanation()
    assert [name.short for name in explanation.names] == ["A1", "A2", "B1"]
    used = replace(explanation, called=concept_names(explanation.part_of, np.array([1.0, 2.0, 9.0])))
    assert [name.short for name in used[1].names] == ["B2", "B1", "A1"]
    assert [name.long for name in used.merged([[0, 1]]).names] == ["concept 0", "concept 1"]


def test_parts_are_sums_over_their_kinds():
    explanation = nested_explanation()
    assert explanation.n_parts == 2
    np.testing.assert_allclose(explanation.parts, [[0.4, 0.6], [0.4, 0.6]])
    np.testing.assert_allclose(explanation.kinds, [[1, 0, 1], [0.5, 0.5, 1]])
    np.testing.assert_allclose(explanation.part_map(0, 0), [[0.9, 0.8], [0.0, 0.1]])
    np.testing.assert_array_equal(explanation.part_map(0), [[0, 0], [1, 1]])


def test_a_kind_in_doubt_may_have_no_share_at_all():
    low, high = nested_explanation().interval(0.9)
    part_low, part_high = nested_explanation().part_interval(0.9)
    np.testing.assert_allclose([low[0, 0], high[0, 0]], [part_low[0, 0], part_high[0, 0]])  # sure of its kind
    assert low[1, 0] == low[1, 1] == 0  # it may be the other
    assert 0.2 <= high[1, 0] <= part_high[1, 0]
    np.testing.assert_allclose(high[0, 1], 0)


def test_concepts_that_are_no_kinds_are_parts_of_their_own():
    theta = np.array([[0.25, 0.75]])
    flat = Explanation(theta, 4 * theta)
    np.testing.assert_array_equal(flat.parts, theta)
    np.testing.assert_array_equal(flat.interval(), flat.part_interval())
