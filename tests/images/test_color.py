"""Color: what the paper says of it, and true patch colours that agree with the pixels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pace.images import COLOR_NAMES, Color, open_images

RGB = {"black": (0, 0, 0), "red": (255, 0, 0), "yellow": (255, 255, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


def test_1600_train_and_400_test_images_balanced_and_disjoint() -> None:
    train, test = Color("train"), Color("test")
    assert (len(train), len(test)) == (1600, 400)
    np.testing.assert_array_equal(np.bincount(train.labels), [800, 800])
    np.testing.assert_array_equal(np.bincount(test.labels), [200, 200])
    assert len({*train.names, *test.names}) == 2000
    assert train.class_names == ["red/yellow", "green/blue"]
    assert train[0].shape == (3, 224, 224)
    assert train[0].dtype == torch.uint8


def test_an_image_does_not_depend_on_what_was_drawn_before() -> None:
    images = Color(size=32)
    again = Color(size=32)
    late = again[1599]
    assert torch.equal(again[700], images[700])
    assert torch.equal(late, images[1599])
    assert not torch.equal(images[0], images[1])


def test_images_are_fixed_for_good() -> None:
    """Stored observations stay valid only as long as the same settings give the same images."""
    images = Color()
    cells = [images.patch_colors(index, grid=(2, 2)).tolist() for index in (0, 1, 800)]
    assert cells == [[[0, 0], [1, 0]], [[1, 2], [2, 1]], [[0, 3], [4, 3]]]
    assert images[0][:, 100, 100:102].tolist() == [[95, 37], [4, 17], [0, 15]]


def test_an_image_does_not_depend_on_the_number_of_images() -> None:
    few, many = Color(n_per_class=10, size=16), Color(n_per_class=500, size=16)
    shared = set(few.names) & set(many.names)
    assert shared
    for name in shared:
        assert torch.equal(few[few.names.index(name)], many[many.names.index(name)])


def test_seed_and_settings_change_images_and_fingerprint() -> None:
    plain = Color(size=16)
    assert not torch.equal(plain[0], Color(size=16, seed=1)[0])
    others = [Color(size=16, seed=1), Color(size=16, noise=0.2), Color(size=24), Color("test", size=16)]
    prints = {plain.fingerprint(), plain.subset([1]).fingerprint(), *(other.fingerprint() for other in others)}
    assert len(prints) == 6
    assert plain.fingerprint() == Color(size=16).fingerprint()


def test_flat_corners_hold_the_cells_and_the_middle_shifts_gradually() -> None:
    images = Color(n_per_class=20, noise=0)
    for index in range(len(images)):
        image = images[index].permute(1, 2, 0).numpy().astype(int)
        colors = images.patch_colors(index, grid=(2, 2))
        for row, column in np.ndindex(2, 2):
            corner = image[row * 168 : row * 168 + 56, column * 168 : column * 168 + 56]
            assert (corner == RGB[COLOR_NAMES[colors[row, column]]]).all()
        steps = np.abs(np.diff(image, axis=0)).max(), np.abs(np.diff(image, axis=1)).max()
        assert max(steps) <= 255 / 112 + 1  # a whole change of colour takes half the image


def test_classes_have_their_own_colours_and_are_never_all_black() -> None:
    images = Color(n_per_class=300, size=8)
    counts = np.zeros((2, 5), int)
    for index, label in enumerate(images.labels):
        cells = images.patch_colors(index, grid=(2, 2))
        assert cells.any()
        counts[label] += np.bincount(cells.ravel(), minlength=5)
    assert (counts[0, [3, 4]] == 0).all()
    assert (counts[1, [1, 2]] == 0).all()
    share = counts / counts.sum(1, keepdims=True)
    # A third each, less the images that would be all black: 1/3 (1 − 1/27) / (1 − 1/81) = 0.325 for black.
    np.testing.assert_allclose(share[0, [0, 1, 2]], [0.325, 0.3375, 0.3375], atol=0.05)
    np.testing.assert_allclose(share[1, [0, 3, 4]], [0.325, 0.3375, 0.3375], atol=0.05)


def test_noise_has_the_stated_strength() -> None:
    noisy, clean = Color(size=64, noise=0.05), Color(size=64, noise=0)
    differences = []
    for index in range(30):
        inner = (clean[index] > 64) & (clean[index] < 191)  # where nothing is clipped
        differences.append((noisy[index].float() - clean[index].float())[inner] / 255)
    noise = torch.cat(differences)
    assert noise.numel() > 10_000
    assert abs(noise.std() - 0.05) < 0.003
    assert abs(noise.mean()) < 0.003


def test_patch_colours_are_the_nearest_colours_of_the_noise_free_patches() -> None:
    images = Color(n_per_class=40, noise=0)
    palette = np.array([RGB[name] for name in COLOR_NAMES], float)
    agree = total = 0
    for index in range(len(images)):
        found = images.patch_colors(index)
        assert found.shape == (14, 14)
        present = np.unique(images.patch_colors(index, grid=(2, 2)))
        assert set(np.unique(found)) <= set(present)
        patches = images[index].float().reshape(3, 14, 16, 14, 16).mean(dim=(2, 4)).permute(1, 2, 0).numpy()
        distance = ((patches[:, :, None] - palette[present]) ** 2).sum(-1)
        agree += (present[distance.argmin(-1)] == found).sum()
        total += found.size
    assert agree / total > 0.99  # a mean over a patch and its centre differ only on the border between two colours


def test_patch_colours_of_a_box_are_those_of_the_cropped_image() -> None:
    images = Color(n_per_class=5)
    for index in range(len(images)):
        fine = images.patch_colors(index, grid=(224, 224))
        part = images.patch_colors(index, grid=(56, 112), box=(56, 112, 168, 168))
        np.testing.assert_array_equal(part, fine[112:168, 56:168])
        np.testing.assert_array_equal(images.patch_colors(index, flip=True), images.patch_colors(index)[:, ::-1])


def test_subsets_keep_their_colours() -> None:
    images = Color(n_per_class=20)
    np.testing.assert_array_equal(images.subset([7]).patch_colors(0), images.patch_colors(7))


def test_color_opens_by_name_and_checks_out() -> None:
    images = open_images("color", split="test")
    assert len(images) == 400
    images.check()


@pytest.mark.parametrize(
    "setting", [{"size": 1}, {"n_per_class": 1}, {"noise": -0.1}, {"noise": float("nan")}, {"seed": -1}]
)
def test_impossible_settings_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"Color: expected .* found .*{next(iter(setting))}="):
        Color(**setting)  # type: ignore[arg-type]
