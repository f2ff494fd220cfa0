import numpy as np
import pytest
from planted import planted

from pace.showing.report import summary


def test_use_weighs_every_patch_by_its_attention():
    phi = np.array([[[1.0, 0.0], [0.0, 1.0]], [[0.5, 0.5], [0.0, 1.0]]])
    weights = summary.weights(np.array([[3.0, 1.0], [2.0, 2.0]]))
    np.testing.assert_allclose(weights, [[0.75, 0.25], [0.5, 0.5]])
    np.testing.assert_allclose(summary.use(phi, weights), [0.5, 0.5])


def test_a_concept_with_less_than_one_patch_of_all_is_not_in_use():
    assert summary.in_use(np.array([0.95, 0.04, 0.01]), tokens=50).tolist() == [True, True, False]


def test_the_effective_number_counts_equally_used_concepts():
    assert summary.effective_number(np.array([0.25, 0.25, 0.25, 0.25, 0.0])) == pytest.approx(4)
    assert summary.effective_number(np.array([1.0, 0.0])) == pytest.approx(1)


def test_nearest_patches_are_those_of_the_model_one_of_each_image(case):
    near = summary.nearest(case.model, case.observations, n=24)
    for concept in range(8):
        found = case.model.nearest_patches(case.observations, concept, n=24 * 36)
        _, first = np.unique(found.images, return_index=True)
        order = np.sort(first)
        np.testing.assert_array_equal(near.images[concept], found.images[order])
        np.testing.assert_array_equal(near.patches[concept], found.patches[order])


def test_nearest_patches_do_not_depend_on_how_many_tokens_fit_at_once(monkeypatch, case):
    whole = summary.nearest(case.model, case.observations, n=5)
    monkeypatch.setattr(summary, "_TOKENS_AT_ONCE", 1)
    parts = summary.nearest(case.model, case.observations, n=5)
    np.testing.assert_array_equal(whole.images, parts.images)
    np.testing.assert_array_equal(whole.patches, parts.patches)


def test_fewer_images_than_a_gallery_has_room_for_are_all_shown(case):
    assert summary.nearest(case.model, planted(k=5, images=3, d=12).observations, n=12).images.shape == (8, 3)


def test_neighbours_are_the_nearest_concepts_in_use():
    means = np.array([[0.0], [1.0], [1.5], [10.0]])
    used = np.array([True, True, False, True])
    assert summary.neighbours(means, used, n=2) == [[1, 3], [0, 3], [1, 0], [1, 0]]
    assert summary.neighbours(np.zeros((1, 2)), np.array([True]), n=4) == [[]]


def test_what_all_classes_share_is_no_evidence_for_one():
    np.testing.assert_allclose(summary.evidence(np.array([[0.9, 0.9], [0.5, -0.5]])), [[0, 0], [0.5, -0.5]])
    assert summary.evidence(np.zeros((3, 0))).shape == (3, 0)


def test_the_concepts_of_a_class_are_held_by_its_images_and_speak_for_it():
    theta = np.array([[0.7, 0.3, 0.0], [0.6, 0.4, 0.0], [0.0, 0.995, 0.005]])
    speaks = np.array([[0.5, -0.5], [0.5, 0.5], [1.0, 1.0]])
    used = np.array([True, True, False])
    first, second = summary.class_concepts(theta, speaks, np.array([0, 0, 1]), used, concepts=2, images=2)
    assert [(c.concept, c.images) for c in first] == [(0, [0, 1]), (1, [1, 0])]  # concept 2 is not in use
    assert first[0].strength == pytest.approx(0.65 * 0.5)
    assert [(c.concept, c.images) for c in second] == [(1, [2])]  # concept 0 speaks against class 1


def test_a_class_that_nothing_is_predicted_as_rests_on_all_images():
    theta = np.array([[0.8, 0.2], [0.4, 0.6]])
    (found,) = summary.class_concepts(
        theta, np.array([[1.0], [0.5]]), None, np.array([True, True]), concepts=1, images=3
    )
    assert [(c.concept, c.images) for c in found] == [(0, [])]
    assert found[0].strength == pytest.approx(0.6)
