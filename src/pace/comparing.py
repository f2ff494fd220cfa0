"""Which concepts of two fits, or of two models, are the same: `compare`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from pace.explanation import Array, Explanation

_SAMPLE = 100  # images of the fit that both look at


class Match(NamedTuple):
    """A concept of one fit and its counterpart in the other."""

    one: int
    other: int
    one_name: str
    other_name: str
    alike: float  # of the patches that either holds, the share that both hold, 0 to 1


def compare(one: Any, other: Any, images: Any = None) -> list[Match]:
    """The concepts of two fits matched one to one by where they are in the same images, most alike first.

    Two `ModelExplainer`, of the same model or of two, or two explanations of the same images. `images` are what both look at;
    by default up to 100 of those that `one` was learned from. Hidden ones, and those without a patch of these, are left out.
    """
    if not isinstance(one, Explanation):
        if images is None:
            if one.images is None:
                raise ValueError("images: say which both should look at, since those of the first fit are not known")
            images = one.images.subset(np.unique(np.linspace(0, len(one.images) - 1, _SAMPLE).astype(int)).tolist())
        one, other = one(images), other(images)
    if len(one) != len(other):
        raise ValueError(f"expected explanations of the same images; found {len(one)} and {len(other)} images")
    maps = _maps(one), _maps(other)
    grid = np.max([found.shape[1:3] for found in maps], 0)  # patches of the coarser one are repeated
    ours, theirs = (found[:, _places(found, grid, 1)][:, :, _places(found, grid, 2)] for found in maps)
    both = np.einsum("mrck,mrcl->kl", ours, theirs, optimize=True)
    either = np.square(ours).sum((0, 1, 2))[:, None] + np.square(theirs).sum((0, 1, 2)) - both
    # 1 for the same maps; where every patch has one concept, a plain share of patches.
    alike = both / either.clip(1e-12)
    held = ours.sum((0, 1, 2))[:, None] + theirs.sum((0, 1, 2))
    pairs = [pair for pair in zip(*linear_sum_assignment(alike, maximize=True), strict=True) if held[pair] >= 1]
    names = one.names, other.names
    matches = [
        Match(int(k), int(n), names[0][k].long, names[1][n].long, float(alike[k, n]))
        for k, n in pairs
        if not (names[0][k].hidden or names[1][n].hidden)
    ]
    return sorted(matches, key=lambda match: -match.alike)


def _maps(explanation: Explanation) -> Array:
    """φ (M, rows, columns, K)."""
    phi, grid = explanation._patches()
    return phi[:, explanation.prefix_tokens :].reshape(len(phi), *grid, -1)


def _places(maps: Array, grid: Array, axis: int) -> Array:
    return np.asarray(np.arange(grid[axis - 1]) * maps.shape[axis] // grid[axis - 1])
