"""The paper's perturbation: SimCLR's augmentations, drawn for each image from its index or name and a seed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pace.images import pixels
from pace.images.imageset import short_hash

Indices = Tensor | NDArray[np.integer] | Sequence[int] | Sequence[str]
# Anything that turns images (B, 3, H, W) in [0, 1] and their indices or names into perturbed images.
Perturb = Callable[[Tensor, Indices], Tensor]

AUGMENT_SEED = 1 << 20  # added to a seed, so that a model is never trained on the perturbations it is tested with

STAGES = ("flip", "crop", "jitter", "grey", "blur")

# The paper's settings; torchvision's defaults where the paper gives none.
FLIP_CHANCE = 0.5
CROP_SCALE = (0.08, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)
JITTER_CHANCE = 0.8
JITTER = (pixels.brightness, pixels.contrast, pixels.saturation, pixels.hue)
JITTER_LOW, JITTER_HIGH = np.array([0.5, 0.5, 0.5, -0.1]), np.array([1.5, 1.5, 1.5, 0.1])
GREY_CHANCE = 0.2
BLUR_KERNEL = 9
BLUR_SIGMA = (0.1, 2.0)

_CROP_TRIES = 10
_RECIPE = 1  # part of the fingerprint: raise it whenever the same settings would give other images

# How many of an image's uniform numbers each parameter has, as `Perturbation.draw` lists them: each has its own, so that
# switching a stage off does not change the others.
_PLACES = (1, 4 * _CROP_TRIES, 1, 4, 4, 1, 1)


class Draws(NamedTuple):
    """The random parameters of B images; those of a stage that is switched off are not used."""

    flips: NDArray[np.bool_]  # (B,)
    boxes: NDArray[np.int64]  # (B, 4) left, top, right, bottom, after the flip
    jittered: NDArray[np.bool_]  # (B,)
    order: NDArray[np.int64]  # (B, 4) which of `JITTER` comes first, second, …
    factors: NDArray[np.float64]  # (B, 4) by adjustment, as `JITTER` lists them
    greyed: NDArray[np.bool_]  # (B,)
    sigma: NDArray[np.float64]  # (B,)


@dataclass(frozen=True)
class Perturbation:
    """Flip, resized crop, colour jitter, greyscale and blur, in the paper's order, on images in [0, 1].

    ``perturbation(batch, indices)`` gives the same result for an image whatever batch it comes in: its parameters
    depend on ``seed`` and its index (or name) alone. ``stages`` picks some of `STAGES`; the order stays.
    """

    seed: int = 0
    stages: tuple[str, ...] = STAGES

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed: expected 0 or more; found {self.seed}")
        if not set(self.stages) <= set(STAGES):
            raise ValueError(f"stages: expected some of {STAGES}; found {self.stages!r}")

    def __call__(self, batch: Tensor, indices: Indices) -> Tensor:
        if batch.ndim != 4 or batch.shape[1] != 3 or not batch.is_floating_point():
            raise ValueError(f"batch: expected floats of shape (B, 3, H, W); found {batch.dtype} {tuple(batch.shape)}")
        draws = self.draw(indices, (batch.shape[2], batch.shape[3]))
        if len(draws.flips) != len(batch):
            raise ValueError(f"indices: expected one for each of {len(batch)} images; found {len(draws.flips)}")
        low, high = (float(bound) for bound in batch.detach().aminmax())
        if not (low >= 0 and high <= 1):
            raise ValueError(f"batch: expected values in [0, 1], not yet normalised; found {low:.3g} to {high:.3g}")
        with torch.autocast(batch.device.type, enabled=False):
            return self._apply(batch.to(torch.float32, copy=True), draws).clamp(0, 1).to(batch.dtype)

    def _apply(self, batch: Tensor, draws: Draws) -> Tensor:
        """The perturbed batch; changes the one that is passed."""
        if "flip" in self.stages:
            _change(batch, draws.flips, lambda part: part.flip(-1))
        if "crop" in self.stages:
            batch = pixels.crop_and_resize(batch, torch.from_numpy(draws.boxes))
        if "jitter" in self.stages:
            for step in range(len(JITTER)):  # each image has an order of its own
                for number, adjust in enumerate(JITTER):
                    now = draws.jittered & (draws.order[:, step] == number)
                    _change(batch, now, adjust, torch.from_numpy(draws.factors[:, number]))
        if "grey" in self.stages:
            _change(batch, draws.greyed, lambda part: pixels.grey(part).expand_as(part))
        if "blur" in self.stages:
            batch = pixels.blur(batch, torch.from_numpy(draws.sigma), BLUR_KERNEL)
        return batch

    def draw(self, indices: Indices, size: tuple[int, int]) -> Draws:
        """All random parameters for these images of (height, width) pixels."""
        items = indices.tolist() if isinstance(indices, (Tensor, np.ndarray)) else list(indices)
        uniform = np.empty((len(items), sum(_PLACES)))
        for row, item in enumerate(items):
            key = np.array([self.seed, _key(item)], dtype=np.uint64)
            # One generator per image, and only its plainest draws, which stay the same across numpy releases.
            uniform[row] = np.random.Generator(np.random.Philox(key=key)).random(sum(_PLACES))
        flip, crop, jitter, order, factors, grey, sigma = np.split(uniform, np.cumsum(_PLACES)[:-1], axis=1)
        return Draws(
            flips=flip[:, 0] < FLIP_CHANCE,
            boxes=_boxes(crop, size),
            jittered=jitter[:, 0] < JITTER_CHANCE,
            order=order.argsort(1),
            factors=_between(JITTER_LOW, JITTER_HIGH, factors),
            greyed=grey[:, 0] < GREY_CHANCE,
            sigma=_between(*BLUR_SIGMA, sigma[:, 0]),
        )

    def crops(self, indices: Indices, size: tuple[int, int]) -> NDArray[np.float32]:
        """(B, 4): which part of each image of (height, width) pixels its view shows, as `Observations.crops` has it."""
        draws = self.draw(indices, size)
        shares: NDArray[np.float64] = draws.boxes / np.array([size[1], size[0]] * 2)
        if "crop" not in self.stages:
            shares[:] = 0, 0, 1, 1
        if "flip" in self.stages:  # comes first, so the box was drawn on the mirrored image
            shares[draws.flips, ::2] = 1 - shares[draws.flips, ::2]
        return shares.astype(np.float32)

    def fingerprint(self) -> str:
        """Short hex string that changes when the perturbation of any image does."""
        stages = tuple(stage for stage in STAGES if stage in self.stages)  # always applied in this order
        return short_hash(["Perturbation", _RECIPE, self.seed, stages])


@dataclass(frozen=True)
class ByName:
    """A perturbation whose draws depend on an image's name, not its number, so that it is the same in every subset."""

    perturbation: Perturbation
    names: Sequence[str]

    def __call__(self, batch: Tensor, indices: Indices) -> Tensor:
        return self.perturbation(batch, self._of(indices))

    def crops(self, indices: Indices, size: tuple[int, int]) -> NDArray[np.float32]:
        return self.perturbation.crops(self._of(indices), size)

    def fingerprint(self) -> str:
        return f"{self.perturbation.fingerprint()}, by name"

    def _of(self, indices: Indices) -> list[str]:
        return [self.names[int(number)] for number in indices]


def _key(item: object) -> int:
    if isinstance(item, str):
        return int.from_bytes(hashlib.blake2b(item.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")
    if isinstance(item, (int, np.integer)) and item >= 0:
        return int(item)
    raise ValueError(f"indices: expected whole numbers from 0 or names; found {item!r}")


def _between(low: Any, high: Any, uniform: NDArray[np.float64]) -> NDArray[np.float64]:
    return low + (high - low) * uniform  # type: ignore[no-any-return]


def _boxes(uniform: NDArray[np.float64], size: tuple[int, int]) -> NDArray[np.int64]:
    """torchvision's RandomResizedCrop: (B, 4) left, top, right, bottom from (B, 4 · tries) uniform numbers."""
    height, width = size
    area, ratio, down, right = np.moveaxis(uniform.reshape(len(uniform), _CROP_TRIES, 4), -1, 0)
    areas = height * width * _between(*CROP_SCALE, area)
    ratios = np.exp(_between(math.log(CROP_RATIO[0]), math.log(CROP_RATIO[1]), ratio))
    w, h = np.rint(np.sqrt(areas * ratios)), np.rint(np.sqrt(areas / ratios))
    fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
    first = np.arange(len(fits)), fits.argmax(1)
    # If no try fits, as in long and narrow images: the largest centred crop of allowed proportions.
    whole_w, whole_h = min(width, round(height * CROP_RATIO[1])), min(height, round(width / CROP_RATIO[0]))
    some = fits.any(1)
    w, h = np.where(some, w[first], whole_w), np.where(some, h[first], whole_h)
    left = np.where(some, np.floor(right[first] * (width - w + 1)), (width - w) // 2)
    top = np.where(some, np.floor(down[first] * (height - h + 1)), (height - h) // 2)
    return np.stack([left, top, left + w, top + h], axis=1).astype(np.int64)


def _change(batch: Tensor, chosen: NDArray[np.bool_], change: Callable[..., Tensor], *parameters: Tensor) -> None:
    """Change the chosen images in place; `change` gets these images and their parameters."""
    rows = torch.from_numpy(np.flatnonzero(chosen))
    if len(rows):
        there = rows.to(batch.device)
        batch.index_copy_(0, there, change(batch[there], *(values[rows] for values in parameters)))
