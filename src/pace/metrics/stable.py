"""Stability: does an explanation stay the same when the image is perturbed, and does it tell images apart at all?

All distances are relative and Euclidean, ‖θ_m − θ_n‖ / ‖θ_m‖, between L1-normalised θ (signs kept).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from pace.metrics.declare import Array, Measure, metric
from pace.metrics.inputs import l1_normalised, labels_of, theta_of

_BLOCK = 512  # images whose distances to all others are in memory at once
_SAME = 1e-6  # distances below this are rounding


@metric(title="Stability", better="lower", range=(0, math.inf))
def stability(theta: Any, theta_perturbed: Any) -> Measure:
    """How far the explanation moves when the image is perturbed, relative to its own length.

    Mean of ‖θ_m − θ'_m‖ / ‖θ_m‖ over images, as in the paper, on L1-normalised θ.
    A constant θ gets a perfect 0: read it beside `stability_ratio`.
    """
    return Measure.mean(_movement(theta, theta_perturbed))


@metric(title="Stability when the prediction holds", better="lower", range=(0, math.inf))
def stability_when_prediction_holds(theta: Any, theta_perturbed: Any, yhat: Any, yhat_perturbed: Any) -> Measure:
    """Stability over the images whose predicted class survives the perturbation.

    On other images a faithful explanation has to move. NaN if the prediction survives on no image.
    """
    moved = _movement(theta, theta_perturbed)
    holds = labels_of(yhat, len(moved)) == labels_of(yhat_perturbed, len(moved), "yhat_perturbed")
    return Measure.mean(np.where(holds, moved, np.nan))


@metric(title="Prediction survival", better=None, range=(0, 1))
def prediction_survival(yhat: Any, yhat_perturbed: Any) -> Measure:
    """Share of images whose predicted class survives the perturbation; a property of the transformer alone.

    No explanation should be steadier than the prediction it explains.
    """
    classes = labels_of(yhat, None)
    return Measure.mean(classes == labels_of(yhat_perturbed, len(classes), "yhat_perturbed"))


@metric(title="Distance between images", better=None, range=(0, math.inf))
def between_images(theta: Any) -> Measure:
    """How far the explanations of two different images are apart; near 0, every image has the same explanation.

    Mean of ‖θ_m − θ_n‖ / ‖θ_m‖ over pairs of different images, on L1-normalised θ. NaN for a single image.
    """
    rows = l1_normalised(theta_of(theta))
    return Measure(len(rows), lambda weights: _distance_between(rows, weights))


@metric(title="Stability ratio", better="lower", range=(0, math.inf))
def stability_ratio(theta: Any, theta_perturbed: Any) -> Measure:
    """Movement under perturbation ÷ distance between images; at 1 a perturbed image is as far from its original as any
    other image is.

    `stability` ÷ `between_images`. Where images do not differ at all it is 1, however small the movement.
    """
    moved, apart = stability.measure(theta, theta_perturbed), between_images.measure(theta)
    return Measure(moved.images, lambda weights: (moved.values(weights) + _SAME) / (apart.values(weights) + _SAME))


@metric(title="Re-identification", better="higher", range=(0, 1))
def reidentification(theta: Any, theta_perturbed: Any) -> Measure:
    """Share of perturbed images whose nearest original is their own; chance is 1 over the number of images.

    Among all M originals, by Euclidean distance of L1-normalised θ. n originals at the same distance share the point.
    Chance is 1/M, which is also what a constant θ gets; NaN for a single image. The bootstrap resamples perturbed images; all
    originals stay.
    """
    original, perturbed = _pairs(theta, theta_perturbed)
    if len(original) == 1:
        return Measure.fixed(math.nan)
    found = np.empty(len(original))
    for part, distances in _distances(perturbed, original):
        nearest = distances <= distances.min(1, keepdims=True) + _SAME
        found[part] = nearest.diagonal(part.start) / nearest.sum(1)
    return Measure.mean(found)


def _pairs(theta: Any, theta_perturbed: Any) -> tuple[Array, Array]:
    """L1-normalised θ of the images and of their perturbed versions."""
    original, perturbed = theta_of(theta), theta_of(theta_perturbed, "theta_perturbed")
    if original.shape != perturbed.shape:
        raise ValueError(f"theta_perturbed: expected shape {original.shape} as theta has; found {perturbed.shape}")
    return l1_normalised(original), l1_normalised(perturbed)


def _movement(theta: Any, theta_perturbed: Any) -> Array:
    original, perturbed = _pairs(theta, theta_perturbed)
    found: Array = np.linalg.norm(original - perturbed, axis=1) / np.linalg.norm(original, axis=1)
    return found


def _distance_between(rows: Array, weights: Array) -> Array:
    """Weighted mean distance (B,) over pairs of different images; an image drawn twice is not such a pair."""
    lengths, total = np.linalg.norm(rows, axis=1), np.zeros(len(weights))
    for part, distances in _distances(rows, rows):
        np.fill_diagonal(distances[:, part.start :], 0)  # exactly 0, in spite of rounding
        total += ((weights[:, part] @ (distances / lengths[part, None])) * weights).sum(1)
    pairs = weights.sum(1) ** 2 - (weights**2).sum(1)
    found: Array = np.divide(total, pairs, out=np.full(len(weights), np.nan), where=pairs > 0)
    return found


def _distances(some: Array, others: Array) -> Iterator[tuple[slice, Array]]:
    """Distances of some rows to all others, a block of rows at a time."""
    centre = others.mean(0)  # distances stay the same, with less cancellation
    some, others = some - centre, others - centre
    for start in range(0, len(some), _BLOCK):
        rows = some[start : start + _BLOCK]
        squared = (rows**2).sum(1)[:, None] + (others**2).sum(1) - 2 * rows @ others.T
        yield slice(start, start + len(rows)), np.sqrt(squared.clip(0))
