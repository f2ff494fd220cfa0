import numpy as np
import pytest
from planted import planted

from pace import PACE
from pace.showing import summary

OBSERVATIONS = planted(k=3, images=24, d=12, grid=(4, 6)).observations


def test_patches_are_weighted_by_their_attention():
    phi = np.array([[[1.0, 0.0], [0.0, 1.0]], [[0.5, 0.5], [0.0, 1.0]]])
    held = summary.patches_held(phi, np.array([[3.0, 1.0], [2.0, 2.0]]))
    np.testing.assert_allclose(held, [2.0, 2.0])  # of four patches


def test_concepts_in_use_hold_at_least_one_patch_and_come_by_share():
    use = summary.use_of(np.array([2.0, 47.1, 0.9]))
    np.testing.assert_allclose(use.shares, [0.04, 0.942, 0.018])
    assert use.used.tolist() == [True, True, False]
    assert use.order == [1, 0]


def test_typical_patches_are_the_nearest_one_from_each_image():
    model = PACE(3, n_init=1, progress=False).fit(OBSERVATIONS)
    typical = summary.typical_patches(model.means_, OBSERVATIONS, n=24)
    for concept in range(3):
        nearest = model.nearest_patches(OBSERVATIONS, concept, n=24 * 24)
        first = np.sort(np.unique(nearest.images, return_index=True)[1])
        np.testing.assert_array_equal(typical[concept, :, 0], nearest.images[first])
        np.testing.assert_array_equal(typical[concept, :, 1], nearest.patches[first])


def test_own_patches_are_of_the_concept_alone():
    means = np.asarray(OBSERVATIONS.embeddings[:2, 0])
    phi = np.zeros((*OBSERVATIONS.shape[:2], 3))
    phi[:, :, 1] = 1  # all patches are of concept 1, but for two
    phi[4, 2:4] = (1, 0, 0)
    both = np.concatenate([means, means[:1]])
    first, second, none = summary.own_patches(both, OBSERVATIONS, 6, phi)
    assert {tuple(place) for place in first.tolist()} <= {(4, 2), (4, 3)}
    assert len(second) == 6
    assert none.tolist() == summary.typical_patches(both, OBSERVATIONS, 6)[2].tolist()


def test_with_few_images_typical_patches_share_them():
    means = np.zeros((1, 12))
    assert summary.typical_patches(means, OBSERVATIONS[:2], n=6).shape == (1, 6, 2)
    pairs = summary.typical_patches(means, OBSERVATIONS[:2], n=60)[0].tolist()
    assert len(set(map(tuple, pairs))) == 48  # all there are


def test_the_concepts_of_a_class_are_in_its_images_in_use_and_speak_for_it():
    theta = np.array([[0.7, 0.3, 0.0, 0.0], [0.6, 0.3, 0.0, 0.1]])
    found = summary.class_concepts(theta, np.array([0.5, 0.6, 1.0, -1.0]), np.array([True, True, False, True]), n=3)
    assert [k for k, _ in found] == [0, 1]  # concept 2 is not in use, concept 3 speaks against the class
    assert found[0][1] == pytest.approx(0.65 * 0.5)
    assert summary.class_concepts(theta, np.array([0.5, 0.6, 0, 0]), np.ones(4, bool), n=1) == found[:1]


def test_what_tells_two_classes_apart_is_the_parts_of_which_they_have_different_kinds():
    part_of = np.array([0, 0, 1, 1, 2, 3, 3])
    of_a, of_b = [0.3, 0.0, 0.2, 0.1, 0.4, 0.0, 0.0], [0.0, 0.2, 0.1, 0.2, 0.3, 0.1, 0.1]
    theta, classes = np.array([of_a, of_a, of_b, np.full(7, 1 / 7)]), np.array([4, 4, 7, 1])
    found = summary.contrast(theta, part_of, classes, 4, 7)
    # Part 2 has one kind, and class 4 does not show part 3.
    assert [one[:3] for one in found] == [(0, 0, 1), (1, 2, 3)]
    assert [one.difference for one in found] == pytest.approx([1, 1 / 3])
    back = summary.contrast(theta, part_of, classes, 7, 4)
    assert [one[:3] for one in back] == [(0, 1, 0), (1, 3, 2)]
    assert summary.contrast(theta, part_of, classes, 4, 4) == summary.contrast(theta, part_of, classes, 4, 99) == []


def test_class_names_are_those_given_or_numbers():
    assert summary.class_names(None, None, 2) == ["class 0", "class 1"]
    assert summary.class_names(["a", "b"], None, 2) == ["a", "b"]
    with pytest.raises(ValueError, match="class_names: expected 2, one for each class; found 1"):
        summary.class_names(["a"], None, 2)
