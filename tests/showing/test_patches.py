from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pace.images import Color, prepare
from pace.showing.patches import mean_color, patch_box, seen

WANTED = SimpleNamespace(size=(20, 30), interpolation="bicubic", crop_ratio=0.8, mean=(0.5,) * 3, std=(0.5,) * 3)
BATCH = np.random.default_rng(0).integers(0, 256, (2, 20, 30, 3), dtype=np.uint8)


def test_patches_tile_the_image_row_by_row():
    covered = np.zeros((20, 30), int)
    for patch in range(4 * 5):
        covered[patch_box(patch, (4, 5), (20, 30))] += 1
    assert (covered == 1).all()
    assert patch_box(7, (4, 5), (20, 30)) == (slice(5, 10), slice(12, 18))  # row 1, column 2; 5 x 6 pixels each
    with pytest.raises(IndexError, match="patch 20 of 4 x 5"):
        patch_box(20, (4, 5), (20, 30))


def test_the_mean_colour_is_that_of_the_patches():
    expected = (BATCH[0, 5:10, 12:18].mean((0, 1)) + BATCH[1, :5, :6].mean((0, 1))) / 2
    np.testing.assert_allclose(mean_color(BATCH, [(0, 7), (1, 0)], (4, 5)), expected)


def test_a_window_keeps_its_size_at_the_border_and_always_holds_its_patch():
    for patch in range(4 * 5):
        box, window = patch_box(patch, (4, 5), (20, 30)), patch_box(patch, (4, 5), (20, 30), margin=1)
        assert [side.stop - side.start for side in window] == [15, 18]
        for own, around in zip(box, window, strict=True):
            assert around.start <= own.start < own.stop <= around.stop
    assert patch_box(1, (2, 2), (20, 30), margin=3) == (
        slice(0, 20),
        slice(0, 30),
    )  # wider than the grid: the whole image


def test_image_sets_and_lists_are_shown_as_the_backbone_prepares_them():
    images = Color("test", n_per_class=5, size=40)
    expected = (prepare(images[1], WANTED).permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
    found = seen(images, WANTED)
    assert found.shape == (2, 20, 30, 3)
    np.testing.assert_array_equal(found[1], expected)
    different_sizes = [np.full((h, w, 3), 80, np.uint8) for h, w in ((40, 50), (70, 33))]
    np.testing.assert_array_equal(seen(different_sizes, WANTED), np.full((2, 20, 30, 3), 80))


def test_a_batch_is_what_the_model_saw_already():
    np.testing.assert_array_equal(seen(BATCH, WANTED), BATCH)
    as_tensor = torch.from_numpy(BATCH).permute(0, 3, 1, 2)
    np.testing.assert_array_equal(seen(as_tensor), BATCH)
    np.testing.assert_array_equal(seen(as_tensor.float() / 255), BATCH)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (Color("test", n_per_class=5, size=8), "preprocessing: needed"),
        (np.zeros((2, 3, 8, 8), np.uint8), "images: expected a tensor"),
        ("color", "found str"),
        ([np.full((8, 8, 3), 2.0)], r"floats in \[0, 1\]; found torch.float64, 2 to 2"),
        ([np.zeros((8, 8, 4), np.uint8)], "height, width, 3"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_a_reason(images, message):
    with pytest.raises(ValueError, match=message):
        seen(images)
