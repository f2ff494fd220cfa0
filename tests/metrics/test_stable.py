import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pace.metrics import (
    between_images,
    prediction_survival,
    reidentification,
    stability,
    stability_ratio,
    stability_when_prediction_holds,
)

SIGNED = st.floats(-5, 5, width=32)


@st.composite
def pairs(draw):
    images, concepts = draw(st.integers(2, 6)), draw(st.integers(1, 5))
    return tuple(draw(arrays(np.float64, (images, concepts), elements=SIGNED)) for _ in range(2))


def test_stability_is_the_relative_euclidean_distance():
    theta, perturbed = [[0.6, 0.4], [1.0, 0.0]], [[0.4, 0.6], [0.0, 1.0]]
    first = np.hypot(0.2, 0.2) / np.hypot(0.6, 0.4)
    assert stability(theta, perturbed) == pytest.approx((first + np.sqrt(2)) / 2)


def test_signs_count_and_scale_does_not():
    theta = np.array([[3.0, -1.0], [2.0, 2.0]])
    assert stability(theta, [[30.0, -10.0], [0.1, 0.1]]) == pytest.approx(0)
    assert stability([[3.0, -1.0]], [[-3.0, 1.0]]) == pytest.approx(2)
    assert stability([[1e308, 1e308]], [[1e-308, 1e-308]]) == pytest.approx(0)


def test_only_images_whose_prediction_survives_count():
    theta, perturbed = np.eye(3), np.eye(3)[[0, 2, 1]]
    assert stability_when_prediction_holds(theta, perturbed, [0, 1, 2], [0, 2, 1]) == 0
    assert stability_when_prediction_holds(theta, perturbed, [0, 1, 2], [0, 1, 1]) == pytest.approx(np.sqrt(2) / 2)
    assert np.isnan(stability_when_prediction_holds(theta, perturbed, [0, 1, 2], [1, 2, 0]))
    assert prediction_survival([0, 1, 2], np.eye(3)[[0, 1, 1]]) == pytest.approx(2 / 3)


def test_the_distance_between_images_is_over_pairs_of_different_images():
    theta = np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    to_half = np.sqrt(0.5)  # from a corner, relative to its length of 1
    from_half = to_half / np.sqrt(0.5)
    assert between_images(theta) == pytest.approx((2 * np.sqrt(2) + 2 * to_half + 2 * from_half) / 6)


def test_blocks_of_images_change_nothing(monkeypatch):
    rng = np.random.default_rng(0)
    theta, perturbed = rng.dirichlet(np.ones(4), 23), rng.dirichlet(np.ones(4), 23)
    whole = [between_images(theta), reidentification(theta, perturbed)]
    monkeypatch.setattr("pace.metrics.stable._BLOCK", 5)
    assert [between_images(theta), reidentification(theta, perturbed)] == pytest.approx(whole)


def test_the_ratio_is_small_for_a_steady_explanation_and_one_for_strangers():
    rng = np.random.default_rng(0)
    theta = rng.dirichlet(np.ones(10), 200)
    assert stability_ratio(theta, theta) < 1e-5
    assert stability_ratio(theta, rng.dirichlet(np.ones(10), 200)) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("noise", [0, 1e-9])
def test_a_constant_explanation_is_stable_but_its_ratio_is_one_and_no_image_is_found_again(noise):
    rng = np.random.default_rng(0)
    theta, perturbed = (0.25 + noise * rng.normal(size=(50, 4)) for _ in range(2))
    assert stability(theta, perturbed) < 1e-6
    assert stability_ratio(theta, perturbed) == pytest.approx(1, abs=0.02)
    assert reidentification(theta, perturbed) == pytest.approx(1 / 50)


def test_images_that_share_an_explanation_share_the_point_of_reidentification():
    theta = np.eye(3)[[0, 0, 1, 2]]
    assert reidentification(theta, theta) == pytest.approx((0.5 + 0.5 + 1 + 1) / 4)
    assert reidentification(np.eye(2), np.eye(2)[::-1]) == 0


def test_one_image_has_no_other_to_compare_with():
    assert np.isnan(
        [between_images([[1, 0]]), stability_ratio([[1, 0]], [[1, 0]]), reidentification([[1, 0]], [[1, 0]])]
    ).all()


@given(pairs())
@settings(deadline=None, max_examples=30)
def test_ranges_and_symmetries(pair):
    theta, perturbed = pair
    order = np.random.default_rng(0).permutation(theta.shape[1])
    scale = np.linspace(0.5, 3, len(theta))[:, None]
    for metric in (stability, stability_ratio, reidentification):
        value = metric(theta, perturbed)
        assert metric.range[0] <= value <= metric.range[1] + 1e-12
        assert metric(theta[:, order], perturbed[:, order]) == pytest.approx(value, rel=1e-4, abs=1e-4)
        assert metric(theta * scale, perturbed * 2) == pytest.approx(value, rel=1e-4, abs=1e-4)
    assert stability(theta, theta) == 0


@pytest.mark.parametrize(
    ("theta", "perturbed", "words"),
    [
        ([[0.5, np.nan]], [[0.5, 0.5]], "theta of image 0 is NaN or infinite"),
        ([[0.5, 0.5]], [[0.5, 0.3, 0.2]], r"theta_perturbed: expected shape \(1, 2\) as theta has; found \(1, 3\)"),
        ([0.5, 0.5], [0.5, 0.5], r"expected numbers of shape \(images, concepts\)"),
        ([["a"]], [["b"]], "expected numbers"),
    ],
)
def test_bad_input_is_refused(theta, perturbed, words):
    for metric in (stability, stability_ratio, reidentification):
        with pytest.raises(ValueError, match=words):
            metric(theta, perturbed)
