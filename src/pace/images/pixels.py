"""Operations on batches of images in [0, 1], each image with its own parameters, as torchvision defines them.

kornia is used where its definition is the same (hue, blur). Its brightness (additive), contrast (around 0) and
saturation (in HSV) differ from torchvision's, and its crop aligns corners instead of pixel edges.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def crop_and_resize(batch: Tensor, boxes: Tensor) -> Tensor:
    """The part of each image in its box (B, 4: left, top, right, bottom), resized to the image's size, bilinear."""
    _, _, height, width = batch.shape
    boxes = boxes.to(batch.device, batch.dtype)
    x = _positions(boxes[:, 0], boxes[:, 2], width)
    y = _positions(boxes[:, 1], boxes[:, 3], height)
    # grid_sample counts from -1 at the first pixel's outer edge to 1 at the last one's.
    x, y = (2 * x + 1) / width - 1, (2 * y + 1) / height - 1
    grid = torch.stack((x[:, None, :].expand(-1, height, -1), y[:, :, None].expand(-1, -1, width)), dim=-1)
    return F.grid_sample(batch, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _positions(start: Tensor, stop: Tensor, count: int) -> Tensor:
    """Where `count` output pixels sample each interval of input pixels, never outside it."""
    centres = torch.arange(count, device=start.device, dtype=start.dtype) + 0.5
    positions = start[:, None] + centres * ((stop - start) / count)[:, None] - 0.5
    return positions.clamp(start[:, None], stop[:, None] - 1)


def grey(batch: Tensor) -> Tensor:
    """Luma (B, 1, H, W)."""
    red, green, blue = batch.unbind(1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue)[:, None]


def brightness(batch: Tensor, factors: Tensor) -> Tensor:
    return (batch * _per_image(factors, batch)).clamp(0, 1)


def contrast(batch: Tensor, factors: Tensor) -> Tensor:
    return _blend(grey(batch).mean(dim=(1, 2, 3), keepdim=True), batch, factors)


def saturation(batch: Tensor, factors: Tensor) -> Tensor:
    return _blend(grey(batch), batch, factors)


def hue(batch: Tensor, factors: Tensor) -> Tensor:
    """Turn the colour wheel; a factor of 1 is a full turn."""
    from kornia.enhance import adjust_hue

    return adjust_hue(batch, factors.to(batch.device, batch.dtype) * (2 * math.pi)).clamp(0, 1)


def blur(batch: Tensor, sigma: Tensor, kernel: int) -> Tensor:
    from kornia.filters import gaussian_blur2d

    return gaussian_blur2d(batch, kernel, sigma[:, None].expand(-1, 2).to(batch.device, batch.dtype), "reflect")


def _blend(start: Tensor, end: Tensor, factors: Tensor) -> Tensor:
    """From `start` (0) to `end` (1) and beyond."""
    weight = _per_image(factors, end)
    return (weight * end + (1 - weight) * start).clamp(0, 1)


def _per_image(factors: Tensor, batch: Tensor) -> Tensor:
    return factors.to(batch.device, batch.dtype).reshape(-1, 1, 1, 1)
