"""What a report carries as JSON: the images' mixtures, the concepts, the classes, and how far to trust them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.spatial.distance import cdist

from pace.explainer import PACE
from pace.explanation import Array, Explanation
from pace.images import ImageSet
from pace.observations import Observations
from pace.showing import summary
from pace.showing.patches import grid_of
from pace.showing.report.encoding import packed
from pace.showing.report.pictures import mean_colour

if TYPE_CHECKING:
    from PIL.Image import Image

    from pace.metrics.scores import Score

LEVEL = 0.9  # probability of the credible intervals

_PATCH_CONCEPTS = 4  # concepts kept of every patch; φ is close to one of them nearly always
_TYPICAL_PATCHES = 12
_NEIGHBOURS = 4
_CLASS_CONCEPTS = 5
_CLASS_IMAGES = 6
_PREDICTIONS = 5  # classes kept of every prediction
_HELD = 0.01  # share below which an image does not show a concept; parts.js has the same


def view(explanation: Explanation, observations: Observations, n_classes: int) -> dict[str, Any]:
    """One view of the images, original or perturbed: θ with intervals, φ, attention, predictions."""
    phi = _phi(explanation)
    kept = min(_PATCH_CONCEPTS, explanation.n_concepts)
    strongest = np.argpartition(-phi, kept - 1, axis=2)[:, :, :kept]
    values = np.take_along_axis(phi, strongest, 2)
    order = np.argsort(-values, axis=2, kind="stable")
    low, high = explanation.interval(LEVEL)
    attention = summary.whole_array(observations.attention)
    return {
        "theta": packed(explanation.theta, "u16", 65535),
        "low": packed(low, "u16", 65535),
        "high": packed(high, "u16", 65535),
        "kept": kept,
        "concept": packed(np.take_along_axis(strongest, order, 2), "u8" if explanation.n_concepts <= 256 else "u16"),
        "phi": packed(np.take_along_axis(values, order, 2), "u8", 255),
        "weight": packed(attention / attention.sum(1, keepdims=True), "u16", 65535),
        "predictions": _predictions(observations) if n_classes else None,  # without η they cannot be explained
    }


def concepts(
    model: PACE, observations: Observations, explanation: Explanation, pictures: Sequence[Image]
) -> dict[str, Any]:
    """The concepts by use. Those that stayed empty when they were learned and hold nothing here are not shown."""
    grid = grid_of(observations)
    attention = summary.whole_array(observations.attention)
    use = _use(observations, explanation)
    shown = use.used | summary.use_of(model.concept_weights_).used
    typical = summary.typical_patches(model.means_, observations, min(_TYPICAL_PATCHES, len(observations)))
    near = [typical.pairs(k) if shown[k] else [] for k in range(len(shown))]
    neighbours = nearest_concepts(model.means_, use.used, _NEIGHBOURS)
    return {
        "concepts": [
            {
                "share": float(use.shares[k]),
                "used": bool(use.used[k]),
                "near": near[k],
                "colour": mean_colour(pictures, near[k], grid) if near[k] else None,
                "neighbours": neighbours[k] if shown[k] else [],
            }
            for k in range(len(shown))
        ],
        "order": [k for k in np.argsort(-use.shares, kind="stable").tolist() if shown[k]],
        "effective": use.effective_number,
        "prefixWeight": float((attention[:, : observations.prefix_tokens].sum(1) / attention.sum(1)).mean()),
    }


def classes(model: PACE, observations: Observations, explanation: Explanation, names: list[str]) -> dict[str, Any]:
    """The classes: the concepts that speak for each, and the images of the class that have most of them."""
    used = _use(observations, explanation).used
    evidence, theta = summary.evidence(model.label_head_), explanation.theta
    predicted = summary.predicted_classes(observations)
    found = []
    for n in range(len(names)):
        own = np.flatnonzero(predicted == n)
        top = summary.class_concepts(theta[own] if own.size else theta, evidence[:, n], used, _CLASS_CONCEPTS)
        found.append([(k, strength, _holders(theta[:, k], own)) for k, strength in top])
    return {
        "classes": names,
        "evidence": packed(evidence, "i16", 32767 / 2),  # from -2 to 2
        # The class that θ points to through η, whatever the transformer said.
        "pointed": (theta @ evidence).argmax(1).tolist() if names else None,
        "classConcepts": found,
    }


def learning(model: PACE) -> dict[str, Any]:
    """The bound after every epoch, and how the number of concepts was found, if it was."""
    bounds = [[_number(term) for term in bound] for bound in model.lower_bounds_]
    selection = model.selection_
    if selection is None:
        return {"bounds": bounds, "selection": None}
    found = {
        "images": selection.images,
        "concepts": len(model.means_),
        "numbers": selection.numbers.tolist(),
        "bounds": selection.bounds.tolist(),
        "evidence": [_number(nats) for nats in selection.evidence.tolist()],
    }
    return {"bounds": bounds, "selection": found}


def trust(scores: Mapping[str, Score] | None) -> dict[str, Any]:
    """The scores and their warnings."""
    if scores is None:
        return {"scores": None, "warnings": []}
    entries = [
        {
            "name": name,
            "title": score.title,
            "value": _number(score.value),
            "low": _number(score.low),
            "high": _number(score.high),
            "better": score.better,
            "range": [_number(end) for end in score.range],
            "meaning": score.meaning,
        }
        for name, score in scores.items()
    ]
    return {"scores": entries, "warnings": [str(warning) for warning in getattr(scores, "warnings", [])]}


def true_labels(images: Any) -> list[str] | None:
    """What the dataset calls every image, which need not be a class the transformer knows."""
    if not isinstance(images, ImageSet) or images.labels is None:
        return None
    names = images.class_names
    return [f"class {label}" if names is None else names[label] for label in images.labels.tolist()]


def nearest_concepts(means: Array, used: Array, n: int) -> list[list[int]]:
    """For every concept the n concepts in use whose means are nearest to its own, nearest first."""
    distances = cdist(means, means)
    np.fill_diagonal(distances, np.inf)
    distances[:, ~used] = np.inf
    order = np.argsort(distances, axis=1, kind="stable")[:, :n]
    return [[int(k) for k in row if np.isfinite(distances[concept, k])] for concept, row in enumerate(order)]


def _holders(share: Array, own: Array) -> list[int]:
    """The images of a class with the largest share of a concept."""
    order = own[np.argsort(-share[own], kind="stable")[:_CLASS_IMAGES]]
    return [int(m) for m in order if share[m] >= _HELD]


def _predictions(observations: Observations) -> list[list[tuple[int, float]]] | None:
    if observations.predictions is None:
        return None
    predictions = summary.whole_array(observations.predictions)
    best = np.argsort(-predictions, axis=1, kind="stable")[:, :_PREDICTIONS]
    return [[(int(n), round(float(row[n]), 4)) for n in top] for row, top in zip(predictions, best, strict=True)]


def _use(observations: Observations, explanation: Explanation) -> summary.Use:
    """Of the concepts in these images."""
    return summary.use_of(summary.patches_held(_phi(explanation), summary.whole_array(observations.attention)))


def _phi(explanation: Explanation) -> Array:
    assert explanation.phi is not None  # write_report has checked
    return explanation.phi


def _number(value: float | Array | None) -> float | None:
    """As JSON has it: NaN and infinities are no numbers there."""
    return float(value) if value is not None and np.isfinite(value) else None
