"""Points of many dimensions on a plane, for the map of concepts."""

from __future__ import annotations

import numpy as np
from scipy.spatial.distance import cdist

from pace.explanation import Array

_SWEEPS, _SPREADING = 200, 60
_ROOM = 0.6  # of the distance that points would have in a regular grid: the least they keep


def positions(points: Array) -> Array:
    """Places (K, 2), from 0 to 1 across and from 0 down, whose distances are like those of `points` (K, d).

    Multidimensional scaling in which distances to near points count most (weights d⁻², as Kamada and Kawai have them), by
    majorisation from the two principal components; then points that would cover each other are pushed apart.
    """
    count = len(points)
    if count < 3:
        return np.linspace([0.25, 0], [0.75, 0], count) if count > 1 else np.full((count, 2), [0.5, 0.0])
    wanted = cdist(points, points)
    wanted = np.maximum(wanted, 1e-3 * (wanted.max() or 1))
    weights = wanted**-2.0
    np.fill_diagonal(weights, 0)
    inverse = np.linalg.pinv(np.diag(weights.sum(1)) - weights)
    left, size, _ = np.linalg.svd(points - points.mean(0), full_matrices=False)
    found = np.zeros((count, 2))
    found[:, : len(size[:2])] = left[:, :2] * size[:2]
    for _ in range(_SWEEPS):
        ratio = weights * wanted / np.maximum(cdist(found, found), 1e-9 * wanted.max())
        found = inverse @ (ratio.sum(1)[:, None] * found - ratio @ found)
    axes = np.linalg.svd(found - found.mean(0), full_matrices=False)[2]  # wider than high
    axes *= np.where(axes[np.arange(len(axes)), np.abs(axes).argmax(1)] < 0, -1, 1)[:, None]
    found = _scaled(found @ axes.T)
    for _ in range(_SPREADING):
        found = _scaled(found + _pushed(found))
    return found


def _scaled(found: Array) -> Array:
    found = found - found.min(0)
    return found / (found[:, 0].max() or 1)


def _pushed(found: Array) -> Array:
    """How far every point moves away from those nearer than it has room."""
    least = _ROOM * np.sqrt(max(found[:, 1].max(), 0.3) / len(found))
    apart = cdist(found, found)
    np.fill_diagonal(apart, np.inf)
    by = np.maximum(least - apart, 0) / np.maximum(apart, 1e-9) / 4
    moves: Array = by.sum(1)[:, None] * found - by @ found
    return moves
