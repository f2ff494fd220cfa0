"""Where the true parts are, in an image and in a perturbed view of it."""

from types import SimpleNamespace

import numpy as np
import pytest
import true_parts

BIRD = (
    SimpleNamespace(  # in the upper half: one part to the left, one to the right, and one that cannot be seen between
        parts=lambda number: np.array([[28, 56, 1], [112, 56, 0], [196, 56, 1]], np.float32),
        box=lambda number: np.array([0, 0, 224, 112], np.float32),
    )
)
EXPECTED = np.repeat([[0] * 8 + [2] * 8, [3] * 16], 8, axis=0)


@pytest.fixture(autouse=True)
def size(monkeypatch):
    monkeypatch.setattr(true_parts, "image_size", lambda images, number: (224, 224))


def seen(perturbation=None) -> np.ndarray:
    return true_parts.parts_seen(BIRD, np.array([7]), perturbation).reshape(true_parts.GRID)


def test_a_patch_shows_the_nearest_part_that_can_be_seen_and_the_background_outside_the_box():
    np.testing.assert_array_equal(seen(), EXPECTED)


@pytest.mark.parametrize("flip", [False, True])
def test_a_perturbed_view_shows_what_is_in_its_crop(flip):
    crops = np.array([[0.5, 0.25, 0, 0.75] if flip else [0, 0.25, 0.5, 0.75]])
    found = seen(SimpleNamespace(crops=lambda numbers, size: crops))
    np.testing.assert_array_equal(found, np.repeat([[0] * 16, [3] * 16], 8, axis=0))
    crops = np.array([[1, 0, 0, 0.5] if flip else [0, 0, 1, 0.5]])
    found = seen(SimpleNamespace(crops=lambda numbers, size: crops))
    np.testing.assert_array_equal(found, np.repeat(EXPECTED[:1, ::-1] if flip else EXPECTED[:1], 16, axis=0))


def test_what_does_not_count_is_left_out_of_an_image_unless_it_is_all_there_is():
    concepts = np.array([[0, 1, 1, 2], [2, 2, 2, 2]])
    found = true_parts.mixtures(concepts, 4, concepts < 2)
    np.testing.assert_allclose(found, [[1 / 3, 2 / 3, 0, 0], [0, 0, 1, 0]])
