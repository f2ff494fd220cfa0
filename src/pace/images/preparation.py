"""From an image to what a model reads: resize and crop, then normalise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

INTERPOLATIONS = ("bicubic", "bilinear")


class PreprocessingLike(Protocol):
    """What a model wants its images to be.

    size : (height, width) of the input
    interpolation : "bicubic" or "bilinear"
    crop_ratio : part of the resized image's sides that the centre crop keeps (1 for no margin), or None to squash the
        whole image into `size` whatever its proportions
    mean, std : of every channel, on the scale 0 … 1
    """

    @property
    def size(self) -> tuple[int, int]: ...
    @property
    def interpolation(self) -> str: ...
    @property
    def crop_ratio(self) -> float | None: ...
    @property
    def mean(self) -> Sequence[float]: ...
    @property
    def std(self) -> Sequence[float]: ...


class _Fit(NamedTuple):
    """An image is resized to (height, width); the input is cut out of that at (top, left)."""

    height: int
    width: int
    top: int
    left: int


def prepare(image: Tensor, preprocessing: PreprocessingLike) -> Tensor:
    """An image (3, h, w), uint8 or float in [0, 1], as a float tensor (3, H, W) in [0, 1], not yet normalised."""
    if image.ndim != 3 or image.shape[0] != 3 or 0 in image.shape:
        raise ValueError(f"image: expected shape (3, height, width); found {tuple(image.shape)}")
    if image.dtype != torch.uint8 and not image.is_floating_point():
        raise ValueError(f"image: expected uint8 or float in [0, 1]; found {image.dtype}")
    if preprocessing.interpolation not in INTERPOLATIONS:
        raise ValueError(
            f"interpolation: expected {' or '.join(INTERPOLATIONS)}; found {preprocessing.interpolation!r}"
        )
    fit = _fit((image.shape[1], image.shape[2]), preprocessing)
    if image.dtype == torch.uint8 and image.device.type != "cpu":
        image = image.float() / 255
    if (fit.height, fit.width) != image.shape[1:]:
        # uint8 stays uint8 on the CPU: many times faster, and it rounds as Pillow does, which models were trained with.
        size, mode = (fit.height, fit.width), preprocessing.interpolation
        image = F.interpolate(image[None], size, mode=mode, antialias=True)[0]
    height, width = preprocessing.size
    image = image[:, fit.top : fit.top + height, fit.left : fit.left + width]
    if image.dtype == torch.uint8:
        return image.to(torch.float32, memory_format=torch.contiguous_format) / 255
    return image.contiguous().clamp(0, 1)  # bicubic overshoots


def prepare_points(points: Tensor, image_size: tuple[int, int], preprocessing: PreprocessingLike) -> Tensor:
    """Where points (…, 2) of an image, x and y in pixels, lie once it is prepared: outside it if they are cut off."""
    fit = _fit(image_size, preprocessing)
    scale = points.new_tensor([fit.width / image_size[1], fit.height / image_size[0]])
    return points * scale - points.new_tensor([fit.left, fit.top])


def normalize(batch: Tensor, preprocessing: PreprocessingLike) -> Tensor:
    """Images (…, 3, H, W) in [0, 1], normalised with the model's own mean and standard deviation."""
    if not batch.is_floating_point() or batch.ndim < 3 or batch.shape[-3] != 3:
        raise ValueError(f"batch: expected floats of shape (…, 3, H, W); found {batch.dtype} {tuple(batch.shape)}")
    mean, std = (
        _by_channel(tuple(values), batch.dtype, batch.device) for values in (preprocessing.mean, preprocessing.std)
    )
    return (batch - mean) / std


@lru_cache(maxsize=32)
def _by_channel(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """(3, 1, 1) on the device. Kept, since copying even three numbers to a GPU waits for all it has still to do."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device).reshape(-1, 1, 1)


def _fit(image_size: tuple[int, int], preprocessing: PreprocessingLike) -> _Fit:
    (h, w), (height, width), ratio = image_size, preprocessing.size, preprocessing.crop_ratio
    if ratio is None:
        return _Fit(height, width, 0, 0)
    if not 0 < ratio <= 1:
        raise ValueError(f"crop_ratio: expected above 0 and at most 1, or None to squash; found {ratio}")
    # Both sides cover the target and one of them equals it; rounding as in torchvision's Resize and CenterCrop.
    target_height, target_width = math.floor(height / ratio), math.floor(width / ratio)
    if target_height * w >= target_width * h:
        resized_height, resized_width = target_height, max(target_width, int(target_height * w / h))
    else:
        resized_height, resized_width = max(target_height, int(target_width * h / w)), target_width
    return _Fit(resized_height, resized_width, round((resized_height - height) / 2), round((resized_width - width) / 2))
