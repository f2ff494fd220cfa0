"""The default augmentation of fine-tuning."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pace.images import pixels


@dataclass(frozen=True)
class Augmentation:
    """Flip, resized crop and colour jitter: a gentler version of the paper's perturbation.

    Like a perturbation, ``augmentation(batch, draws)`` only depends on the seed and the draw's number.
    """

    seed: int = 0
    scale: tuple[float, float] = (0.5, 1.0)  # share of the area that crops keep
    jitter: float = 0.4  # brightness, contrast and saturation change by up to this factor
    hue: float = 0.05  # of a turn
    chance: float = 0.8  # that there is any jitter

    def __call__(self, batch: Tensor, draws: Any) -> Tensor:
        keys = [np.array([self.seed, int(draw)], dtype=np.uint64) for draw in draws]
        uniform = np.stack([np.random.Generator(np.random.Philox(key=key)).random(10) for key in keys])
        flip, jittered, area, ratio, right, down, *factors = torch.from_numpy(uniform.T)
        mirrored = (flip < 0.5).to(batch.device)[:, None, None, None]
        batch = torch.where(mirrored, batch.flip(-1), batch)
        batch = pixels.crop_and_resize(batch, self._boxes(area, ratio, right, down, (batch.shape[2], batch.shape[3])))
        for adjust, factor in zip((pixels.brightness, pixels.contrast, pixels.saturation), factors[:3], strict=True):
            batch = adjust(batch, 1 + self.jitter * (2 * factor - 1) * (jittered < self.chance))
        return pixels.hue(batch, self.hue * (2 * factors[3] - 1) * (jittered < self.chance))

    def _boxes(self, area: Tensor, ratio: Tensor, right: Tensor, down: Tensor, size: tuple[int, int]) -> Tensor:
        """Left, top, right, bottom of crops with proportions between 3 : 4 and 4 : 3 of the image's own."""
        share = self.scale[0] + (self.scale[1] - self.scale[0]) * area
        stretch = torch.exp(math.log(4 / 3) / 2 * (2 * ratio - 1))
        sides = share.sqrt()
        width = (size[1] * sides * stretch).clamp(1, size[1])
        height = (size[0] * sides / stretch).clamp(1, size[0])
        left, top = right * (size[1] - width), down * (size[0] - height)
        return torch.stack([left, top, left + width, top + height], dim=1)
