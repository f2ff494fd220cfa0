"""Stability: does an explanation stay the same when the image is perturbed, and does it tell images apart at all?

All distances are relative and Euclidean, ‖θ_m − θ_n‖ / ‖θ_m‖, between L1-normalised θ (signs kept).
"""

from __future__ import annotations

import math
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
    return Measure.mean(_movement(*_pairs(theta, theta_perturbed)))


@metric(title="Stability when the prediction holds", better="lower", range=(0, math.inf))
def stability_when_prediction_holds(theta: Any, theta_perturbed: Any, yhat: Any, yhat_perturbed: Any) -> Measure:
    """Stability over the images whose predicted class survives the perturbation.

    On other images a faithful explanation has to move. NaN if the prediction survives on no image.
    """
    original, perturbed = _pairs(theta, theta_perturbed)
    holds = _prediction_holds(yhat, yhat_perturbed, len(original))
    return Measure.mean(np.where(holds, _movement(original, perturbed), np.nan))


@metric(title="Prediction survival", better=None, range=(0, 1))
def prediction_survival(yhat: Any, yhat_perturbed: Any) -> Measure:
    """Share of images whose predicted class survives the perturbation; a property of the transformer alone.

    No explanation should be steadier than the prediction it explains.
    """
    return Measure.mean(_prediction_holds(yhat, yhat_perturbed, len(yhat)).astype(np.float64))


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
    rows, perturbed = _pairs(theta, theta_perturbed)
    moved = Measure.mean(_movement(rows, perturbed))
    return Measure(
        len(rows), lambda weights: (moved.values(weights) + _SAME) / (_distance_between(rows, weights) + _SAME)
    )


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
    centre = original.mean(0)  # distances stay the same, with less cancellation
    original, perturbed = original - centre, perturbed - centre
    found = np.empty(len(original))
    for start in range(0, len(original), _BLOCK):
        distances = _distances(perturbed[start : start + _BLOCK], original)
        nearest = distances <= distances.min(1, keepdims=True) + _SAME
        own = nearest[np.arange(len(nearest)), start + np.arange(len(nearest))]
        found[start : start + _BLOCK] = own / nearest.sum(1)
    return Measure.mean(found)


def _pairs(theta: Any, theta_perturbed: Any) -> tuple[Array, Array]:
    """L1-normalised θ of the images and of their perturbed versions."""
    original, perturbed = theta_of(theta), theta_of(theta_perturbed, "theta_perturbed")
    if original.shape != perturbed.shape:
        raise ValueError(f"theta_perturbed: expected shape {original.shape} as theta has; found {perturbed.shape}")
    return l1_normalised(original), l1_normalised(perturbed)


def _movement(original: Array, perturbed: Array) -> Array:
    found: Array = np.linalg.norm(original - perturbed, axis=1) / np.linalg.norm(original, axis=1)
    return found


def _prediction_holds(yhat: Any, yhat_perturbed: Any, images: int) -> Array:
    found: Array = labels_of(yhat, images) == labels_of(yhat_perturbed, images, "yhat_perturbed")
    return found


def _distance_between(rows: Array, weights: Array) -> Array:
    """Weighted mean distance (B,) over pairs of different images; an image drawn twice is not such a pair."""
    lengths = np.linalg.norm(rows, axis=1)
    centred = rows - rows.mean(0)
    total = np.zeros(len(weights))
    for start in range(0, len(rows), _BLOCK):
        part = slice(start, start + _BLOCK)
        relative = _distances(centred[part], centred) / lengths[part, None]
        np.fill_diagonal(relative[:, start:], 0)  # exactly 0, in spite of rounding
        total += ((weights[:, part] @ relative) * weights).sum(1)
    pairs = weights.sum(1) ** 2 - (weights**2).sum(1)
    found: Array = np.divide(total, pairs, out=np.full(len(weights), np.nan), where=pairs > 0)
    return found


def _distances(some: Array, others: Array) -> Array:
    squared = (some**2).sum(1)[:, None] + (others**2).sum(1) - 2 * some @ others.T
    found: Array = np.sqrt(squared.clip(0))
    return found
