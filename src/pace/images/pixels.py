"""Operations on batches of images in [0, 1], each image with its own parameters, as torchvision defines them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def crop_and_resize(batch: Tensor, boxes: Tensor) -> Tensor:
    """The part of each image in its box (B, 4: left, top, right, bottom), resized to the image's size, bilinear."""
    _, _, height, width = batch.shape
    left, top, right, bottom = boxes.to(batch.device, batch.dtype).T[:, :, None]
    x, y = _positions(left, right, width), _positions(top, bottom, height)
    grid = torch.stack((x[:, None, :].expand(-1, height, -1), y[:, :, None].expand(-1, -1, width)), dim=-1)
    return F.grid_sample(batch, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _positions(start: Tensor, stop: Tensor, count: int) -> Tensor:
    """Where `count` output pixels sample the input from `start` to `stop` (B, 1), never outside it, for grid_sample."""
    centres = torch.arange(count, device=start.device, dtype=start.dtype) + 0.5
    positions = (start + centres * ((stop - start) / count) - 0.5).clamp(start, stop - 1)
    return (2 * positions + 1) / count - 1


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
    red, green, blue = batch.unbind(1)
    value = batch.amax(1)
    chroma = value - batch.amin(1)
    scale = 1 / chroma.clamp_min(torch.finfo(batch.dtype).tiny)  # grey has no hue: any will do
    beyond_green = torch.where(value == green, 2 + (blue - red) * scale, 4 + (red - green) * scale)
    sixths = torch.where(value == red, (green - blue) * scale, beyond_green)
    sixths += 6 * factors.to(batch)[:, None, None]
    turned = torch.empty_like(batch)
    for channel, start in enumerate((5, 3, 1)):
        place = torch.remainder(sixths + start, 6)
        share = torch.minimum(place, 4 - place).clamp_(0, 1)
        turned[:, channel] = torch.addcmul(value, chroma, share, value=-1)
    return turned


def blur(batch: Tensor, sigma: Tensor, kernel: int) -> Tensor:
    """By a Gaussian of so many pixels, an odd number, reflected at the border."""
    count, channels, reach = *batch.shape[:2], kernel // 2
    places = torch.arange(-reach, reach + 1, device=batch.device, dtype=batch.dtype)
    weights = (-(places / sigma.to(batch)[:, None]).square() / 2).softmax(1).repeat_interleave(channels, 0)[:, None]
    padded = F.pad(batch, [reach] * 4, mode="reflect").flatten(0, 1)[None]  # as channels, each with a kernel of its own
    down = F.conv2d(padded, weights[:, :, :, None], groups=count * channels)
    return F.conv2d(down, weights[:, :, None], groups=count * channels).view_as(batch)


def _blend(start: Tensor, end: Tensor, factors: Tensor) -> Tensor:
    """From `start` (0) to `end` (1) and beyond."""
    weight = _per_image(factors, end)
    return (weight * end + (1 - weight) * start).clamp(0, 1)


def _per_image(factors: Tensor, batch: Tensor) -> Tensor:
    return factors.to(batch.device, batch.dtype).reshape(-1, 1, 1, 1)
