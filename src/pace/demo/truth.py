"""The true colour of every patch of Color images, and how stable an explanation by them would be."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from pace.images import Color, Perturb
from pace.images.color import PALETTE
from pace.metrics import stability

_ALPHA = 0.1  # patches that every concept gets for free, as PACE's own prior gives them


def true_colours(images: Color, grid: tuple[int, int]) -> NDArray[np.int64]:
    """(M, rows, columns): the colour of every patch, an index into `COLOR_NAMES`."""
    return np.stack([images.patch_colors(index, grid) for index in range(len(images))])


def stability_of_true_colours(images: Color, perturb: Perturb, grid: tuple[int, int], n_concepts: int) -> float:
    """How far θ* moves under a perturbation, where θ* counts the patches of each true colour.

    A perturbed patch has the palette's colour nearest to its mean, so a perturbation that changes colours changes θ* too. No
    explanation by colours can be expected to be much more stable. `n_concepts` is at least the number of colours.
    """
    pixels = torch.stack([images[index] for index in range(len(images))]).float() / 255
    means = F.adaptive_avg_pool2d(perturb(pixels, range(len(images))), grid).permute(0, 2, 3, 1).numpy()
    moved = ((means[:, :, :, None] - PALETTE) ** 2).sum(-1).argmin(-1)
    return stability(_shares(true_colours(images, grid), n_concepts), _shares(moved, n_concepts))


def _shares(colours: NDArray[np.int64], n_concepts: int) -> NDArray[Any]:
    counts = (colours[:, :, :, None] == np.arange(n_concepts)).sum((1, 2)) + _ALPHA
    shares: NDArray[Any] = counts / counts.sum(1, keepdims=True)
    return shares
