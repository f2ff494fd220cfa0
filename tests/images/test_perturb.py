"""The paper's perturbation: torchvision's operations, and parameters that belong to the image alone."""

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as T
from torchvision.transforms import RandomResizedCrop

from pace.images import Perturbation
from pace.images.perturb import BLUR_KERNEL, STAGES

SIZE = (40, 52)
# float32 rounding of pixel positions, hue and sums; a step of an 8-bit image is 4e-3
TOLERANCE = 1e-4


def batch(count, size=SIZE, seed=0):
    """Images with smooth colours, sharp edges, pure colours, greys and black."""
    generator = torch.Generator().manual_seed(seed)
    smooth = torch.nn.functional.interpolate(torch.rand(count, 3, 5, 5, generator=generator), size, mode="bilinear")
    images = torch.where(torch.rand(count, 3, *size, generator=generator) < 0.1, smooth.round(), smooth)
    images[:, :, :4] = images[:, :1, :4]
    images[:, :, -3:] = 0
    return images


def torchvision_view(image, draws, row, stages):
    """One image by torchvision's own functions, with given parameters."""
    if "flip" in stages and draws.flips[row]:
        image = T.horizontal_flip(image)
    if "crop" in stages:
        left, top, right, bottom = draws.boxes[row].tolist()
        image = T.resized_crop(image, top, left, bottom - top, right - left, list(image.shape[1:]), antialias=True)
    if "jitter" in stages and draws.jittered[row]:
        functions = [T.adjust_brightness, T.adjust_contrast, T.adjust_saturation, T.adjust_hue]
        for number in draws.order[row]:
            image = functions[number](image, draws.factors[row, number])
    if "grey" in stages and draws.greyed[row]:
        image = T.rgb_to_grayscale(image, num_output_channels=3)
    if "blur" in stages:
        image = T.gaussian_blur(image, [BLUR_KERNEL, BLUR_KERNEL], [float(draws.sigma[row])] * 2)
    return image


@pytest.mark.parametrize("stages", [*((stage,) for stage in STAGES), STAGES], ids="+".join)
def test_every_stage_equals_torchvision(stages):
    images = batch(24)
    perturbation = Perturbation(seed=3, stages=stages)
    found = perturbation(images, range(24))
    draws = perturbation.draw(range(24), SIZE)
    assert draws.flips.any()
    assert draws.jittered.any()
    assert draws.greyed.any()
    expected = torch.stack([torchvision_view(image, draws, row, stages) for row, image in enumerate(images)])
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    assert (found - images).abs().max() > 0.05


def test_an_image_is_perturbed_alike_in_any_batch_and_order():
    images = batch(12)
    perturb = Perturbation(seed=1)
    whole = perturb(images, torch.arange(12))
    alone = torch.cat([perturb(images[i : i + 1], [i]) for i in range(12)])
    order = torch.tensor([7, 2, 11, 0, 5, 9, 1, 3, 10, 4, 8, 6])
    mixed = torch.empty_like(images)
    mixed[order] = perturb(images[order], order)
    torch.testing.assert_close(alone, whole, atol=1e-6, rtol=0)
    torch.testing.assert_close(mixed, whole, atol=1e-6, rtol=0)


def test_seeds_and_names_and_numbers_differ():
    images = batch(3)
    perturb = Perturbation()
    assert not torch.allclose(perturb(images, [0, 1, 2]), Perturbation(seed=1)(images, [0, 1, 2]))
    names = ["a/1.jpg", "a/2.jpg", "b/1.jpg"]
    whole = perturb(images, names)
    torch.testing.assert_close(perturb(images[2:], names[2:]), whole[2:], atol=1e-6, rtol=0)
    assert not torch.allclose(whole, perturb(images, [0, 1, 2]))
    assert perturb(images, ["\udcff.png", "\udcfe.png", "é.png"]).isfinite().all()  # names of files need not be text


def test_parameters_are_fixed_for_good():
    """Stored observations of perturbed images stay valid only as long as these numbers do not change."""
    draws = Perturbation(seed=7).draw([0, 123456], (224, 224))
    assert draws.flips.tolist() == [False, True]
    assert draws.boxes.tolist() == [[7, 36, 137, 172], [11, 68, 178, 215]]
    assert draws.jittered.tolist() == [False, True]
    assert draws.order.tolist() == [[0, 1, 2, 3], [3, 0, 2, 1]]
    np.testing.assert_allclose(draws.factors[1], [1.10044497, 1.05265075, 0.85565382, 0.09100114], atol=1e-7)
    assert draws.greyed.tolist() == [False, True]
    np.testing.assert_allclose(draws.sigma, [1.14743321, 1.73415999], atol=1e-7)


def test_switching_a_stage_off_leaves_the_others_as_they_were():
    """Geometry then colour then blur, each alone, is the whole perturbation."""
    images = batch(10)
    step = images
    for stage in STAGES:
        step = Perturbation(seed=5, stages=(stage,))(step, range(10))
    torch.testing.assert_close(step, Perturbation(seed=5)(images, range(10)), atol=1e-6, rtol=0)
    assert torch.equal(Perturbation(stages=())(images, range(10)), images)


def test_chances_and_ranges_are_the_papers():
    draws = Perturbation().draw(range(4000), (224, 224))
    assert draws.flips.mean() == pytest.approx(0.5, abs=0.03)
    assert draws.jittered.mean() == pytest.approx(0.8, abs=0.03)
    assert draws.greyed.mean() == pytest.approx(0.2, abs=0.03)
    for number, (low, high) in enumerate([(0.5, 1.5), (0.5, 1.5), (0.5, 1.5), (-0.1, 0.1)]):
        values = draws.factors[:, number]
        assert low <= values.min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < values.max() <= high
    assert 0.1 <= draws.sigma.min() < 0.12
    assert 1.98 < draws.sigma.max() <= 2.0
    counts = np.unique(draws.order, axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert counts.min() > 4000 / 24 * 0.7


@pytest.mark.parametrize("size", [(224, 224), (60, 400)])
def test_boxes_are_distributed_as_torchvisions(size):
    """Same mean and spread of position, area and proportions as torchvision's own draws, in wide images too."""
    left, top, right, bottom = Perturbation().draw(range(1500), size).boxes.T
    height, width = size
    assert (left >= 0).all() and (top >= 0).all() and (right <= width).all() and (bottom <= height).all()  # noqa: PT018
    torch.manual_seed(0)
    image = torch.empty(3, *size)
    reference = np.array([RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(1500)]).T
    for found, expected in zip((top, left, bottom - top, right - left), reference, strict=True):
        error = 5 * np.hypot(found.std(), expected.std()) / np.sqrt(1500)
        assert abs(found.mean() - expected.mean()) < error + 1e-9
        assert found.std() == pytest.approx(expected.std(), rel=0.1, abs=0.5)


def test_an_image_too_narrow_for_any_crop_is_cropped_in_the_middle():
    draws = Perturbation().draw(range(200), (10, 1000))
    middle = draws.boxes[(draws.boxes == [493, 0, 506, 10]).all(1)]
    assert len(middle) > 50  # torchvision: the height, 10 · 4/3 rounded wide, (1000 − 13) // 2 from the left


def test_crops_say_where_every_pixel_came_from():
    """An image that holds its own coordinates, perturbed, shows the coordinates that `crops` promises."""
    y, x = torch.meshgrid((torch.arange(48) + 0.5) / 48, (torch.arange(64) + 0.5) / 64, indexing="ij")
    images = torch.stack([x, y, torch.zeros_like(x)]).expand(16, -1, -1, -1)
    perturb = Perturbation(seed=2, stages=("flip", "crop"))
    crops = perturb.crops(range(16), (48, 64))
    assert crops.shape == (16, 4)
    assert crops.dtype == np.float32
    assert 0 < (crops[:, 0] > crops[:, 2]).sum() < 16  # mirrored
    for view, (left, top, right, bottom) in zip(perturb(images, range(16)), crops.tolist(), strict=True):
        columns = left + (right - left) * (torch.arange(64) + 0.5) / 64
        rows = top + (bottom - top) * (torch.arange(48) + 0.5) / 48
        # Up to the half pixel at the border, where there is nothing to interpolate with.
        assert (view[0] - columns).abs().max() <= 0.5 / 64 + 1e-5
        assert (view[1].T - rows).abs().max() <= 0.5 / 48 + 1e-5
        assert (view[0] - columns)[:, 8:-8].abs().max() < 1e-5
    only_flips = Perturbation(stages=("flip",)).crops(range(20), (30, 50))  # no crop is the whole image
    assert {tuple(crop) for crop in only_flips.tolist()} == {(0, 0, 1, 1), (1, 0, 0, 1)}


def test_values_stay_in_range_dtype_and_input_are_kept_and_autocast_changes_nothing():
    images = batch(16)
    before = images.clone()
    found = Perturbation()(images, range(16))
    assert torch.equal(images, before)
    assert 0 <= found.min() <= found.max() <= 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = Perturbation()(images, range(16))
    torch.testing.assert_close(inside, found, atol=1e-6, rtol=0)
    half = Perturbation()(images.half(), range(16))
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), found, atol=5e-3, rtol=0)


def test_fingerprints_tell_seed_and_stages_apart():
    prints = {p.fingerprint() for p in (Perturbation(), Perturbation(seed=1), Perturbation(stages=("crop",)))}
    assert len(prints) == 3
    assert Perturbation().fingerprint() == Perturbation(stages=tuple(reversed(STAGES))).fingerprint()


@pytest.mark.parametrize(
    ("images", "indices", "message"),
    [
        (torch.zeros(2, 1, 8, 8), [0, 1], r"batch: expected floats of shape \(B, 3, H, W\)"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), [0, 1], "batch: expected floats"),
        (torch.zeros(2, 3, 8, 8) - 1.5, [0, 1], r"expected values in \[0, 1\], not yet normalised; found -1.5 to -1.5"),
        (torch.full((2, 3, 8, 8), torch.nan), [0, 1], r"expected values in \[0, 1\]"),
        (torch.zeros(2, 3, 8, 8), [0], "indices: expected one for each of 2 images; found 1"),
        (torch.zeros(2, 3, 8, 8), [0, -1], "indices: expected whole numbers from 0 or names; found -1"),
        (torch.zeros(2, 3, 8, 8), [0, 0.5], "indices: expected whole numbers from 0 or names; found 0.5"),
    ],
)
def test_wrong_input_says_what_would_work(images, indices, message):
    with pytest.raises(ValueError, match=message):
        Perturbation()(images, indices)


def test_wrong_settings_say_what_would_work():
    with pytest.raises(ValueError, match=r"stages: expected some of \('flip', .*; found \('gray',\)"):
        Perturbation(stages=("gray",))
    with pytest.raises(ValueError, match="stages: expected some of"):
        Perturbation(stages="crop")
    with pytest.raises(ValueError, match="seed: expected 0 or more; found -1"):
        Perturbation(seed=-1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_gpu_and_cpu_agree():
    images = batch(32, (224, 224))
    found = Perturbation(seed=3)(images.cuda(), range(32))
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), Perturbation(seed=3)(images, range(32)), atol=TOLERANCE, rtol=0)
