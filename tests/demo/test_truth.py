import numpy as np
import pytest

from pace.demo import stability_of_true_colours, true_colours
from pace.images import COLOR_NAMES, Color, Perturbation

GRID = (14, 14)


@pytest.fixture(scope="module")
def images():
    return Color("test", n_per_class=40, size=112)


def test_true_colours_are_those_of_the_class_and_black(images):
    colours = true_colours(images, GRID)
    assert colours.shape == (len(images), *GRID)
    for label, names in enumerate([{"black", "red", "yellow"}, {"black", "green", "blue"}]):
        found = {COLOR_NAMES[colour] for colour in np.unique(colours[images.labels == label])}
        assert found == names


def test_true_colours_hardly_move_when_nothing_is_perturbed(images):
    assert stability_of_true_colours(images, lambda batch, indices: batch, GRID, 5) < 0.02


def test_the_whole_perturbation_moves_true_colours_further_than_its_crops(images):
    crops = stability_of_true_colours(images, Perturbation(0, ("flip", "crop")), GRID, 100)
    everything = stability_of_true_colours(images, Perturbation(0), GRID, 100)
    assert 0.1 < crops < everything < 0.9
