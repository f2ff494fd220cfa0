"""Points of many dimensions on a plane, for the map of concepts."""

from __future__ import annotations

import numpy as np
from scipy.spatial.distance import cdist

from pace.explanation import Array

_NEIGHBOURS = 6  # that stay near a point: t-SNE's perplexity
_EXACT = 500  # points from which on distances are approximated
_SPREADING = 60
_ROOM = 0.6  # of the distance that points would have in a regular grid: the least they keep


def positions(points: Array) -> Array:
    """Places (K, 2), from 0 to 1 across and from 0 down, where those of `points` (K, d) lie close that are near.

    By t-SNE from the two principal components; then points that would cover each other are pushed apart.
    """
    from sklearn.manifold import TSNE

    count = len(points)
    if count < 4 or not np.ptp(points, 0).any():
        return np.stack([(np.arange(count) + 0.5) / count, np.zeros(count)], 1)
    left, size, _ = np.linalg.svd(points - points.mean(0), full_matrices=False)
    main = np.zeros((count, 2))
    main[:, : len(size[:2])] = left[:, :2] * size[:2]
    main *= np.where(main[np.abs(main).argmax(0), [0, 1]] < 0, -1, 1)  # an SVD is free to choose the sign
    learner = TSNE(
        perplexity=min(_NEIGHBOURS, (count - 1) / 3),
        init=(1e-4 * main / main[:, 0].std()).astype(np.float32),
        method="exact" if count <= _EXACT else "barnes_hut",
        random_state=0,
    )
    found = learner.fit_transform(points)
    axes = np.linalg.svd(found - found.mean(0), full_matrices=False)[2]
    found = _scaled(found @ axes.T)  # wider than high
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
