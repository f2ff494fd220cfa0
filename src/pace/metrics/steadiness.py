"""Does an explanation stay the same when the image is perturbed, and does it tell images apart at all?

All distances are relative and Euclidean, ‖θ_m − θ_n‖ / ‖θ_m‖, between L1-normalised θ (signs kept).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pace.metrics.declare import Array, Measure, metric
from pace.metrics.inputs import l1_normalised, labels_of, pair_of, theta_of

_BLOCK = 512  # images whose distances to all others are in memory at once
_SAME = 1e-6  # distances below this are rounding


@metric(
    title="Stability",
    better="lower",
    range=(0, math.inf),
    meaning="How far the explanation moves when the image is perturbed, relative to its own length.",
)
def stability(theta: Any, theta_perturbed: Any) -> Measure:
    """Mean of ‖θ_m − θ'_m‖ / ‖θ_m‖ over images, as in the paper, on L1-normalised θ.

    A constant θ gets a perfect 0: read it beside `stability_ratio`.
    """
    return Measure.mean(_moved(*pair_of(theta, theta_perturbed)))


@metric(
    title="Stability when the prediction holds",
    better="lower",
    range=(0, math.inf),
    meaning="Stability over the images whose predicted class survives the perturbation.",
)
def stability_when_prediction_holds(theta: Any, theta_perturbed: Any, yhat: Any, yhat_perturbed: Any) -> Measure:
    """`stability` over the images for which the transformer predicts the same class before and after.

    Elsewhere a faithful explanation has to move. NaN if the prediction survives on no image.
    """
    original, perturbed = pair_of(theta, theta_perturbed)
    return Measure.mean(np.where(_held(yhat, yhat_perturbed, len(original)), _moved(original, perturbed), np.nan))


@metric(
    title="Prediction survival",
    better=None,
    range=(0, 1),
    meaning="Share of images whose predicted class survives the perturbation; a trait of the transformer alone.",
)
def prediction_survival(yhat: Any, yhat_perturbed: Any) -> Measure:
    """No explanation should be steadier than the prediction it explains."""
    return Measure.mean(_held(yhat, yhat_perturbed, len(yhat)).astype(np.float64))


@metric(
    title="Distance between images",
    better=None,
    range=(0, math.inf),
    meaning="How far the explanations of two different images are apart; near 0, every image has the same explanation.",
)
def between_images(theta: Any) -> Measure:
    """Mean of ‖θ_m − θ_n‖ / ‖θ_m‖ over pairs of different images, on L1-normalised θ."""
    rows = l1_normalised(theta_of(theta))
    _need_two(rows)
    return Measure(len(rows), lambda weights: _between(rows, weights))


@metric(
    title="Stability ratio",
    better="lower",
    range=(0, math.inf),
    meaning="Movement under perturbation ÷ distance between images; at 1 a perturbed image might as well be a stranger.",
)
def stability_ratio(theta: Any, theta_perturbed: Any) -> Measure:
    """`stability` ÷ `between_images`. Where images do not differ at all it is 1, however small the movement."""
    original, perturbed = pair_of(theta, theta_perturbed)
    _need_two(original)
    moved, rows = Measure.mean(_moved(original, perturbed)), l1_normalised(original)
    return Measure(len(rows), lambda weights: (moved.values(weights) + _SAME) / (_between(rows, weights) + _SAME))


@metric(
    title="Re-identification",
    better="higher",
    range=(0, 1),
    meaning="Share of perturbed images whose nearest original is their own; chance is 1 over the number of images.",
)
def reidentification(theta: Any, theta_perturbed: Any) -> Measure:
    """Among all M originals, by Euclidean distance of L1-normalised θ. n originals at the same distance share the point.

    Chance is 1/M, which is also what a constant θ gets. The bootstrap draws perturbed images; all originals stay.
    """
    original, perturbed = (l1_normalised(rows) for rows in pair_of(theta, theta_perturbed))
    _need_two(original)
    centre = original.mean(0)  # distances do not change, and cancel less
    original, perturbed = original - centre, perturbed - centre
    found = np.empty(len(original))
    for start in range(0, len(original), _BLOCK):
        distances = _distances(perturbed[start : start + _BLOCK], original)
        nearest = distances <= distances.min(1, keepdims=True) + _SAME
        own = nearest[np.arange(len(nearest)), start + np.arange(len(nearest))]
        found[start : start + _BLOCK] = own / nearest.sum(1)
    return Measure.mean(found)


def _moved(original: Array, perturbed: Array) -> Array:
    original, perturbed = l1_normalised(original), l1_normalised(perturbed)
    found: Array = np.linalg.norm(original - perturbed, axis=1) / np.linalg.norm(original, axis=1)
    return found


def _held(yhat: Any, yhat_perturbed: Any, images: int) -> Array:
    found: Array = labels_of(yhat, images) == labels_of(yhat_perturbed, images, "yhat_perturbed")
    return found


def _between(rows: Array, weights: Array) -> Array:
    """Weighted mean distance over pairs of different images (B,); an image drawn twice is no pair of different images."""
    lengths = np.linalg.norm(rows, axis=1)
    centred = rows - rows.mean(0)
    total = np.zeros(len(weights))
    for start in range(0, len(rows), _BLOCK):
        part = slice(start, start + _BLOCK)
        relative = _distances(centred[part], centred) / lengths[part, None]
        np.fill_diagonal(relative[:, start:], 0)  # exactly, where rounding left a trace
        total += ((weights[:, part] @ relative) * weights).sum(1)
    pairs = weights.sum(1) ** 2 - (weights**2).sum(1)
    found: Array = np.divide(total, pairs, out=np.full(len(weights), np.nan), where=pairs > 0)
    return found


def _distances(some: Array, others: Array) -> Array:
    squared = (some**2).sum(1)[:, None] + (others**2).sum(1) - 2 * some @ others.T
    found: Array = np.sqrt(squared.clip(0))
    return found


def _need_two(theta: Array) -> None:
    if len(theta) < 2:
        raise ValueError("theta: expected at least two images to compare; found one")
