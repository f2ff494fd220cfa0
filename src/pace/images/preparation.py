"""From an image to a model's input: resize and crop, convert to float, normalise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class PreprocessingLike(Protocol):
    """How a model wants its images: the fields of `pace.backbones.Preprocessing`."""

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


def to_float(pixels: Tensor) -> Tensor:
    """Pixels as float32 in [0, 1]: uint8 is divided by 255, floats are in that range already."""
    if pixels.dtype == torch.uint8:
        white = torch.tensor(255, dtype=torch.float32, device="cpu")
        return pixels / white  # one pass; `.float() / 255` would take two
    return pixels.float()


def prepare(image: Tensor, preprocessing: PreprocessingLike) -> Tensor:
    """An image (3, h, w), uint8 or float in [0, 1], as a float tensor (3, H, W) in [0, 1], not yet normalised."""
    return to_float(resize_and_crop(image, preprocessing))


def resize_and_crop(image: Tensor, preprocessing: PreprocessingLike) -> Tensor:
    """An image (3, h, w) at the model's size (3, H, W); uint8 stays uint8, floats stay in [0, 1]."""
    if image.ndim != 3 or image.shape[0] != 3 or 0 in image.shape:
        raise ValueError(f"image: expected shape (3, height, width); found {tuple(image.shape)}")
    if image.dtype != torch.uint8 and not image.is_floating_point():
        raise ValueError(f"image: expected uint8 or float in [0, 1]; found {image.dtype}")
    mode = preprocessing.interpolation
    if mode not in ("bicubic", "bilinear"):
        raise ValueError(f"interpolation: expected bicubic or bilinear; found {mode!r}")
    resized, (top, left) = _fit((image.shape[1], image.shape[2]), preprocessing)
    if resized != image.shape[1:]:
        # On the CPU uint8 is many times faster, and rounds as Pillow does, with which models were trained.
        image = image if image.device.type == "cpu" else to_float(image)
        image = F.interpolate(image[None], resized, mode=mode, antialias=True)[0]
    height, width = preprocessing.size
    image = image[:, top : top + height, left : left + width].contiguous()
    return image if image.dtype == torch.uint8 else image.clamp(0, 1)  # bicubic overshoots


def prepare_points(points: Tensor, image_size: tuple[int, int], preprocessing: PreprocessingLike) -> Tensor:
    """Where points (…, 2) of an image, x and y in pixels, are after `prepare`: outside the image if cropped away."""
    (height, width), (top, left) = _fit(image_size, preprocessing)
    scale = points.new_tensor([width / image_size[1], height / image_size[0]])
    return points * scale - points.new_tensor([left, top])


def normalize(batch: Tensor, preprocessing: PreprocessingLike) -> Tensor:
    """Images (…, 3, H, W) in [0, 1], normalised with the model's own mean and standard deviation."""
    if not batch.is_floating_point() or batch.ndim < 3 or batch.shape[-3] != 3:
        raise ValueError(f"batch: expected floats of shape (…, 3, H, W); found {batch.dtype} {tuple(batch.shape)}")
    mean = _per_channel(tuple(preprocessing.mean), batch.dtype, batch.device)
    std = _per_channel(tuple(preprocessing.std), batch.dtype, batch.device)
    return (batch - mean) / std


@lru_cache(maxsize=32)
def _per_channel(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """(3, 1, 1) on the device. Cached, since copying even three numbers to a GPU waits for all pending work."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device).reshape(-1, 1, 1)


def _fit(image_size: tuple[int, int], preprocessing: PreprocessingLike) -> tuple[tuple[int, int], tuple[int, int]]:
    """Height and width the image is resized to, and top and left of the part of it that the model gets."""
    (h, w), (height, width), ratio = image_size, preprocessing.size, preprocessing.crop_ratio
    if ratio is None:
        return (height, width), (0, 0)
    if not 0 < ratio <= 1:
        raise ValueError(f"crop_ratio: expected above 0 and at most 1, or None to squash; found {ratio}")
    # Both sides cover the target and one of them equals it; rounding as in torchvision's Resize and CenterCrop.
    target_height, target_width = math.floor(height / ratio), math.floor(width / ratio)
    if target_height * w >= target_width * h:
        resized = target_height, max(target_width, int(target_height * w / h))
    else:
        resized = max(target_height, int(target_width * h / w)), target_width
    return resized, (round((resized[0] - height) / 2), round((resized[1] - width) / 2))
