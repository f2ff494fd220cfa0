"""Colours and parts, where the model sees them."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pace.backbones import Preprocessing
from pace.images import Birds as DrawnBirds
from pace.images import Color, Folder, Perturbation, decode, prepare
from pace.metrics.ground_truth import known_truth, seen_colors, true_colors, true_parts, visible_parts

GRID = (4, 4)


def prepared_as(size, crop_ratio=1.0):
    return SimpleNamespace(size=size, interpolation="bilinear", crop_ratio=crop_ratio, mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.fixture(scope="module")
def images():
    return Color("test", n_per_class=10, size=64, noise=0.05)


def test_a_model_that_sees_the_middle_gets_the_colours_of_the_middle(images):
    whole = true_colors(images, prepared_as((32, 32)), GRID)
    middle = true_colors(images, prepared_as((32, 32), crop_ratio=0.5), GRID)
    for number in range(len(images)):
        np.testing.assert_array_equal(whole[number], images.patch_colors(number, GRID))
        np.testing.assert_array_equal(middle[number], images.patch_colors(number, GRID, (16, 16, 48, 48)))
    assert (whole != middle).any()


def test_colours_look_as_they_are_where_nothing_is_perturbed(images):
    preprocessing = prepared_as((32, 32), crop_ratio=0.8)
    seen = seen_colors(images, preprocessing, GRID, Perturbation(0, stages=()))
    assert (seen == true_colors(images, preprocessing, GRID)).mean() > 0.95
    jittered = seen_colors(images, preprocessing, GRID, Perturbation(0, stages=("jitter",)))
    assert (jittered != seen).any()


def test_parts_are_known_through_crops_and_flips():
    """A crop of the fine truth of the whole image, mirrored where the view is, is the truth of the view."""
    birds, preprocessing = DrawnBirds("test", n_per_class=5), prepared_as((112, 112))
    whole = true_parts(birds, preprocessing, (14, 14))
    np.testing.assert_array_equal(whole[3], birds.patch_parts(3))
    kinds = true_parts(birds, preprocessing, (14, 14), kinds=True)
    np.testing.assert_array_equal(kinds[3], birds.patch_kinds(3))
    perturbation = Perturbation(0, stages=("flip", "crop"))
    crops = perturbation.crops(range(len(birds)), (112, 112))
    assert 0 < (crops[:, 0] > crops[:, 2]).mean() < 1
    seen = true_parts(birds, preprocessing, (14, 14), crops)
    for number, (left, top, right, bottom) in enumerate(112 * crops):
        view = birds.patch_parts(number, (14, 14), (min(left, right), top, max(left, right), bottom))
        np.testing.assert_array_equal(seen[number], view[:, ::-1] if left > right else view)
    mirrored = np.tile([1, 0, 0, 1], (len(birds), 1))
    np.testing.assert_array_equal(true_parts(birds, preprocessing, (14, 14), mirrored), whole[:, :, ::-1])


def test_the_truth_about_birds_is_the_part_and_the_kind_of_every_patch_that_does_not_mix_them():
    from pace.images import Birds
    from pace.images.birds import KIND_PARTS

    birds = Birds("test", n_per_class=5, size=56)
    truth = known_truth(birds, prepared_as((56, 56)), (7, 7))
    assert truth.keys() == {"true_parts", "true_kinds"}
    known = truth["true_parts"] >= 0
    assert 0.7 < known.mean() < 1
    np.testing.assert_array_equal(known[3], birds.patch_parts(3, (7, 7), least=2 / 3) >= 0)
    np.testing.assert_array_equal(truth["true_kinds"] >= 0, known)
    np.testing.assert_array_equal(KIND_PARTS[truth["true_kinds"][known]], truth["true_parts"][known])


class Birds:
    """As much of CUB as its parts need: one image, 40 wide and 20 high, with three parts."""

    def __init__(self, folder: Path, **options) -> None:
        from PIL import Image

        Image.new("RGB", (40, 20)).save(folder / "bird.jpg", **options)
        self.folder, self.names = folder, ["bird.jpg"]

    def __len__(self):
        return 1

    def path(self, name):
        return self.folder / name

    def parts(self, index):
        return np.array([[20, 10, 1], [2, 10, 1], [20, 10, 0]], np.float32)


def test_a_picture_taken_upright_is_placed_upright(tmp_path):
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6
    birds = Birds(tmp_path, exif=exif)
    assert decode(tmp_path / "bird.jpg").shape == (3, 40, 20)
    # 20 wide and 40 high, resized to 10 x 20, from which 5 rows are cut: (2, 10) becomes (1, 0), and (20, 10) lies outside.
    np.testing.assert_array_equal(visible_parts(birds, prepared_as((10, 10)), (2, 2)), [[-1, 0, -1]])


@pytest.mark.parametrize(("shape", "ratio"), [((40, 60), None), ((60, 40), 0.7)])
def test_parts_lie_where_resizing_and_cropping_put_them(tmp_path, shape, ratio):
    """A bright spot is looked for in what the model is given."""
    from PIL import Image

    preprocessing = Preprocessing((32, 24), crop_ratio=ratio)
    height, width = shape
    for x, y in [(8, 8), (30, 20), (22, 31), (width - 6, height - 6)]:
        pixels = np.zeros((*shape, 3), np.uint8)
        pixels[y - 2 : y + 3, x - 2 : x + 3] = 255
        bird = Birds(tmp_path)
        Image.fromarray(pixels).save(tmp_path / "bird.png")
        bird.names, bird.parts = (
            ["bird.png"],
            lambda _, at=(x, y): np.array([[at[0] + 0.5, at[1] + 0.5, 1]], np.float32),
        )
        ((found,),) = visible_parts(bird, preprocessing, (8, 6))
        seen = prepare(decode(tmp_path / "bird.png"), preprocessing).mean(0)
        if found < 0:
            assert seen[2:-2, 2:-2].max() < 0.9
        else:
            place = np.array(np.unravel_index(int(seen.argmax()), seen.shape))
            assert np.abs(place // 4 - np.divmod(found, 6)).max() <= 1
            assert seen[4 * (found // 6) : 4 * (found // 6) + 4, 4 * (found % 6) : 4 * (found % 6) + 4].max() > 0.5


def test_what_is_known_goes_by_the_dataset(images, tmp_path, monkeypatch):
    preprocessing = prepared_as((32, 32), crop_ratio=0.5)
    (name, found) = next(iter(known_truth(images, preprocessing, GRID).items()))
    assert name == "colours"
    np.testing.assert_array_equal(found, true_colors(images, preprocessing, GRID))
    birds = Birds(tmp_path)
    monkeypatch.setattr("pace.metrics.ground_truth.CUB", Birds)
    # Resized to 20 x 10, of which the middle 10 x 10 are seen: (20, 10) becomes (5, 5), and x = 2 is cut off.
    np.testing.assert_array_equal(known_truth(birds, prepared_as((10, 10)), (2, 2))["parts"], [[3, -1, -1]])
    assert known_truth(Folder(tmp_path), preprocessing, GRID) == {}
