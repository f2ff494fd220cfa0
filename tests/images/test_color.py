"""Color: what the paper says of it, and true patch colours that agree with the pixels."""

import numpy as np
import torch

from pace.images import COLOR_NAMES, Color

RGB = {"black": (0, 0, 0), "red": (255, 0, 0), "yellow": (255, 255, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


def test_images_are_fixed_for_good():
    """Stored observations stay valid only as long as the same settings give the same images."""
    images = Color()
    assert images.class_names == ["red/yellow", "green/blue"]
    cells = [images.patch_colors(index, grid=(2, 2)).tolist() for index in (0, 1, 800)]
    assert cells == [[[0, 0], [1, 0]], [[1, 2], [2, 1]], [[0, 3], [4, 3]]]
    assert images[0][:, 100, 100:102].tolist() == [[95, 37], [4, 17], [0, 15]]


def test_flat_corners_hold_the_cells_and_the_middle_shifts_gradually():
    images = Color(n_per_class=8, noise=0)
    for index in range(len(images)):
        image = images[index].permute(1, 2, 0).numpy().astype(int)
        colors = images.patch_colors(index, grid=(2, 2))
        for row, column in np.ndindex(2, 2):
            corner = image[row * 168 : row * 168 + 56, column * 168 : column * 168 + 56]
            assert (corner == RGB[COLOR_NAMES[colors[row, column]]]).all()
        steps = np.abs(np.diff(image, axis=0)).max(), np.abs(np.diff(image, axis=1)).max()
        assert max(steps) <= 255 / 112 + 1  # a whole change of colour takes half the image


def test_classes_have_their_own_colours_and_are_never_all_black():
    images = Color(n_per_class=300, size=8)
    counts = np.zeros((2, 5), int)
    for index, label in enumerate(images.labels):
        cells = images.patch_colors(index, grid=(2, 2))
        assert cells.any()
        counts[label] += np.bincount(cells.ravel(), minlength=5)
    # A third each, less the images that would be all black: 1/3 (1 − 1/27) / (1 − 1/81) = 0.325 for black.
    expected = [[0.325, 0.3375, 0.3375, 0, 0], [0.325, 0, 0, 0.3375, 0.3375]]
    np.testing.assert_allclose(counts / counts.sum(1, keepdims=True), expected, atol=0.05)
    assert (counts[np.array(expected) == 0] == 0).all()


def test_noise_has_the_stated_strength():
    noisy, clean = Color(size=64, noise=0.05), Color(size=64, noise=0)
    differences = []
    for index in range(30):
        inner = (clean[index] > 64) & (clean[index] < 191)  # where nothing is clipped
        differences.append((noisy[index].float() - clean[index].float())[inner] / 255)
    noise = torch.cat(differences)
    assert noise.numel() > 10_000
    assert abs(noise.std() - 0.05) < 0.003
    assert abs(noise.mean()) < 0.003


def test_patch_colours_are_the_nearest_colours_of_the_noise_free_patches():
    images = Color(n_per_class=10, noise=0)
    palette = np.array([RGB[name] for name in COLOR_NAMES], float)
    agree = []
    for index in range(len(images)):
        found = images.patch_colors(index)
        assert found.shape == (14, 14)
        present = np.unique(images.patch_colors(index, grid=(2, 2)))
        patches = images[index].float().reshape(3, 14, 16, 14, 16).mean(dim=(2, 4)).permute(1, 2, 0).numpy()
        distance = ((patches[:, :, None] - palette[present]) ** 2).sum(-1)
        agree.append(present[distance.argmin(-1)] == found)
        fine = images.patch_colors(index, grid=(224, 224))
        part = images.patch_colors(index, grid=(56, 112), box=(56, 112, 168, 168))
        np.testing.assert_array_equal(part, fine[112:168, 56:168])
    assert np.mean(agree) > 0.99  # a mean over a patch and its centre differ only on the border between two colours
    np.testing.assert_array_equal(images.subset([7]).patch_colors(0), images.patch_colors(7))
