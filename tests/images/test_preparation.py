"""Preparing images as the libraries' own transforms do."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image

from pace.images import normalize, prepare, prepare_points


@dataclass
class Wanted:
    size: tuple[int, int] = (32, 32)
    interpolation: str = "bicubic"
    crop_ratio: float | None = 0.875
    mean: tuple[float, float, float] = (0.5, 0.4, 0.3)
    std: tuple[float, float, float] = (0.5, 0.25, 0.2)


def photo(height, width):
    """A smooth image with some detail."""
    coarse = torch.rand(1, 3, max(2, height // 6), max(2, width // 6), generator=torch.Generator().manual_seed(0))
    image = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)[0]
    return (image * 255).round().to(torch.uint8)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("ratio", [0.875, 1.0])
@pytest.mark.parametrize("size", [(100, 75), (20, 27), (64, 64)])
def test_resize_and_crop_equal_torchvision_on_pillow_images(interpolation, ratio, size):
    from torchvision.transforms import v2

    image = photo(*size)
    resize = v2.Resize(int(32 / ratio), interpolation=v2.InterpolationMode(interpolation))
    pipeline = v2.Compose([v2.ToPILImage(), resize, v2.CenterCrop(32), v2.PILToTensor()])
    found = prepare(image, Wanted(interpolation=interpolation, crop_ratio=ratio))
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    assert (found * 255 - pipeline(image)).abs().max() <= 2.01  # two steps of 255; Pillow rounds between its two passes


def test_squash_equals_a_plain_resize():
    image = photo(50, 90)
    found = prepare(image, Wanted(size=(24, 36), crop_ratio=None, interpolation="bilinear"))
    expected = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((36, 24), Image.Resampling.BILINEAR)
    assert np.abs(found.permute(1, 2, 0).numpy() * 255 - np.asarray(expected).astype(float)).max() <= 1.01


def test_an_image_of_the_right_size_is_untouched():
    image = photo(32, 32)
    assert torch.equal(prepare(image, Wanted(crop_ratio=1.0)), image.float() / 255)
    assert torch.equal(prepare(image, Wanted(crop_ratio=None)), image.float() / 255)


@pytest.mark.parametrize("size", [(32, 48), (30, 31)])
@pytest.mark.parametrize("image_size", [(40, 300), (300, 40), (1, 1)])
def test_any_image_fills_any_target(size, image_size):
    found = prepare(photo(*image_size), Wanted(size=size))
    assert found.shape == (3, *size)
    assert 0 <= found.min() <= found.max() <= 1


def test_float_images_are_prepared_alike_and_stay_in_range():
    image = photo(70, 90)
    whole, real = prepare(image, Wanted()), prepare(image.float() / 255, Wanted())
    assert (whole - real).abs().max() < 2 / 255
    steps = torch.zeros(3, 64, 64)
    steps[:, :, 32:] = 1
    assert 0 <= prepare(steps, Wanted()).min() <= prepare(steps, Wanted()).max() <= 1


@pytest.mark.parametrize("wanted", [Wanted(), Wanted(crop_ratio=None), Wanted(size=(24, 40), crop_ratio=1.0)])
def test_points_move_with_the_pixels(wanted):
    image = torch.zeros(3, 120, 90, dtype=torch.uint8)
    image[:, 50:60, 40:50] = 255  # centred on x = 45, y = 55
    x, y = prepare_points(torch.tensor([[45.0, 55.0]]), (120, 90), wanted)[0].tolist()
    mass = prepare(image, wanted)[0]
    rows, columns = torch.arange(mass.shape[0]) + 0.5, torch.arange(mass.shape[1]) + 0.5
    assert (mass.sum(1) @ rows / mass.sum()).item() == pytest.approx(y, abs=0.1)
    assert (mass.sum(0) @ columns / mass.sum()).item() == pytest.approx(x, abs=0.1)


def test_normalize_uses_mean_and_std_of_each_channel():
    batch = torch.rand(2, 3, 4, 5)
    found = normalize(batch, Wanted())
    torch.testing.assert_close(found[:, 1], (batch[:, 1] - 0.4) / 0.25)
    torch.testing.assert_close(found[:, 2], (batch[:, 2] - 0.3) / 0.2)


@pytest.mark.parametrize(
    ("image", "wanted", "message"),
    [
        (torch.zeros(1, 8, 8), Wanted(), r"image: expected shape \(3, height, width\); found \(1, 8, 8\)"),
        (torch.zeros(3, 8, 8, dtype=torch.int32), Wanted(), "expected uint8 or float"),
        (torch.zeros(3, 8, 8), Wanted(interpolation="nearest"), "interpolation: expected bicubic or bilinear"),
        (torch.zeros(3, 8, 8), Wanted(crop_ratio=1.5), "crop_ratio: expected above 0 and at most 1"),
    ],
)
def test_wrong_input_says_what_would_work(image, wanted, message):
    with pytest.raises(ValueError, match=message):
        prepare(image, wanted)


def test_normalize_refuses_whole_numbers():
    with pytest.raises(ValueError, match=r"batch: expected floats of shape \(…, 3, H, W\); found torch.uint8"):
        normalize(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), Wanted())
