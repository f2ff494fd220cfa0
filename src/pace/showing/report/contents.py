"""What a report carries as JSON: the images' mixtures, the concepts, the classes, and how far to trust them."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.spatial.distance import cdist
from scipy.stats import entropy

from pace.explainer import PACE
from pace.explanation import Array, Explanation
from pace.images import ImageSet
from pace.metrics.inputs import concept_counts
from pace.naming import Name, class_titles, hidden_among
from pace.observations import Observations
from pace.places import matching_patches
from pace.showing import summary
from pace.showing.patches import Images, grid_of, mean_color
from pace.showing.report.pictures import MIME, contact_sheet
from pace.showing.report.plane import positions

if TYPE_CHECKING:
    from PIL.Image import Image

    from pace.metrics import Scores

LEVEL = 0.9  # probability of the credible intervals

_PATCH_CONCEPTS = 4  # concepts kept of every patch; φ is close to one of them nearly always
_TYPICAL_PATCHES = 12
_NEIGHBOURS = 4
_CLASS_CONCEPTS = 5
_CLASS_IMAGES = 6
_PREDICTIONS = 5  # classes kept of every prediction
_OTHERS = 0.1  # share that the largest concept of an image must leave to others: one that is everywhere is kept anyhow
_HELD = 0.01  # share below which an image does not show a concept; parts.js has the same


def of_images(
    model: PACE, images: Images, observations: Observations, explanation: Explanation, names: list[str],
    pictures: Sequence[Image],
) -> dict[str, Any]:  # fmt: skip
    """The images, not perturbed, their concepts, and the classes, which have `names`."""
    return {
        "grid": grid_of(observations),
        "prefix": observations.prefix_tokens,
        "level": LEVEL,
        "picture": {"type": MIME, "width": pictures[0].width, "height": pictures[0].height},
        "sheet": contact_sheet(pictures),
        "names": images.names if isinstance(images, ImageSet) else [f"image {m}" for m in range(len(images))],
        "labels": _labels(images),
        "original": view(explanation, observations, bool(names)),
        "perturbed": None,
        "perturbedPictures": False,
        "places": None,
        "telling": [_most_covered(_leading(explanation))],
        **_concepts(model, observations, explanation, names, pictures),
    }


def _labels(images: Images) -> list[str] | None:
    """What the dataset calls every image, which need not be a class the transformer knows."""
    if not isinstance(images, ImageSet) or images.labels is None:
        return None
    names = images.class_names
    titles = None if names is None else class_titles(names)
    return [f"class {label}" if titles is None else titles[label] for label in images.labels.tolist()]


def view(explanation: Explanation, observations: Observations, with_predictions: bool) -> dict[str, Any]:
    """One view of the images, original or perturbed: θ with intervals, φ, attention, predictions if there are classes."""
    phi = np.asarray(explanation.phi)
    strongest = np.argsort(-phi, axis=2, kind="stable")[:, :, :_PATCH_CONCEPTS]
    low, high = explanation.interval(LEVEL)
    attention = summary.whole_array(observations.attention)
    return {
        "theta": packed(explanation.theta, "u16", 65535),
        "low": packed(low, "u16", 65535),
        "high": packed(high, "u16", 65535),
        **_part_intervals(explanation),
        "kept": strongest.shape[2],
        "concept": packed(strongest, "u8" if explanation.n_concepts <= 256 else "u16"),
        "phi": packed(np.take_along_axis(phi, strongest, 2), "u8", 255),
        "weight": packed(attention / attention.sum(1, keepdims=True), "u16", 65535),
        "predictions": _predictions(observations) if with_predictions else None,
    }


def _part_intervals(explanation: Explanation) -> dict[str, Any]:
    if explanation.part_of is None:
        return {}
    low, high = explanation.part_interval(LEVEL)
    return {"partLow": packed(low, "u16", 65535), "partHigh": packed(high, "u16", 65535)}


def beside(
    explanation: Explanation, perturbed: Explanation, observations: Observations, with_predictions: bool
) -> dict[str, Any]:
    """The perturbed view, and what follows from what it shows of the picture, if that is known."""
    shown = {"perturbed": view(perturbed, observations, with_predictions)}
    if observations.crops is None:
        return shown
    return shown | followed(explanation, perturbed, observations.crops[:], grid_of(observations))


def followed(explanation: Explanation, perturbed: Explanation, crops: Array, grid: tuple[int, int]) -> dict[str, Any]:
    """The patch of the picture that each patch of a perturbed view shows, and the images that tell most about them.

    A place keeps its concept if it has the same leading concept in picture and view.
    """
    places, leading = matching_patches(crops, grid), _leading(explanation)
    there = np.take_along_axis(leading, places, 1)
    kept = (there == _leading(perturbed)).mean(1)
    varied = np.flatnonzero(_largest(there)[0] <= 1 - _OTHERS)
    best = [_telling("best", varied[kept[varied].argmax()], kept)] if varied.size else []
    return {
        "places": packed(places, "u8" if places.shape[1] <= 256 else "u16"),
        "telling": [*best, _telling("worst", kept.argmin(), kept), _most_covered(leading)],
    }


def _most_covered(leading: Array) -> dict[str, Any]:
    share, concept = _largest(leading)
    m = share.argmax()
    return {**_telling("covered", m, share), "concept": int(concept[m])}


def _telling(why: str, image: Any, share: Array) -> dict[str, Any]:
    return {"why": why, "image": int(image), "share": float(share[image])}


def _leading(explanation: Explanation) -> Array:
    """The strongest concept of every patch (M, patches)."""
    concepts: Array = np.asarray(explanation.phi)[:, explanation.prefix_tokens :].argmax(2)
    return concepts


def _largest(concepts: Array) -> tuple[Array, Array]:
    """The share (M,) of the patches (M, patches) that an image's largest concept has, and which concept that is."""
    counts = concept_counts(concepts)
    return counts.max(1) / concepts.shape[1], counts.argmax(1)


def _concepts(
    model: PACE, observations: Observations, explanation: Explanation, names: list[str], pictures: Sequence[Image]
) -> dict[str, Any]:
    """The concepts by use, and the classes they speak for.

    Concepts that stayed empty when they were learned and hold nothing here are not shown.
    """
    grid, phi = grid_of(observations), np.asarray(explanation.phi)
    attention = summary.whole_array(observations.attention)
    use = summary.use_of(summary.patches_held(phi, attention))
    shown = use.used | summary.use_of(model.concept_weights_).used
    most = min(_TYPICAL_PATCHES, len(observations))
    typical = [own.tolist() for own in summary.own_patches(model.means_, observations, most, phi)]
    called = explanation.names
    listed = use.used & ~hidden_among(called)
    neighbours = nearest_concepts(model.means_, listed, _NEIGHBOURS)
    order = [k for k in np.argsort(-use.shares, kind="stable").tolist() if shown[k] and not called[k].hidden]
    return {
        "concepts": [
            {
                "name": called[k].long,
                "short": called[k].short,
                "kind": called[k].given or f"kind {called[k].kind}",
                "given": called[k].given is not None,
                "hidden": called[k].hidden,
                "into": called[k].into,
                "part": None if explanation.part_of is None else int(explanation.part_of[k]),
                "share": float(use.shares[k]),
                "used": bool(use.used[k]),
                "near": typical[k] if shown[k] else [],
                "colour": mean_color(pictures, typical[k], grid).round().tolist() if shown[k] else None,
                "neighbours": neighbours[k] if shown[k] else [],
            }
            for k in range(len(shown))
        ],
        "order": order,
        "map": _map(model.means_, listed),
        "parts": _parts(explanation, use, order, called),
        "effective": float(np.exp(entropy(use.shares))),  # equally used concepts that would be as diverse as these
        "prefixWeight": float((attention[:, : observations.prefix_tokens].sum(1) / attention.sum(1)).mean()),
        **_classes(model, observations, explanation.theta, names, listed),
    }


def _map(means: Array, used: Array) -> list[list[float] | None]:
    """Where every concept in use lies on the map, from 0 to 1 across."""
    found: list[list[float] | None] = [None] * len(means)
    for k, place in zip(np.flatnonzero(used), positions(means[used]).round(4).tolist(), strict=True):
        found[k] = place
    return found


def _parts(
    explanation: Explanation, use: summary.Use, order: list[int], called: Sequence[Name]
) -> list[dict[str, Any]] | None:
    """Where concepts are kinds of parts: every part's letter, name, share, and kinds that are shown, by use."""
    part_of = explanation.part_of
    if part_of is None:
        return None
    kinds = [[k for k in order if part_of[k] == part] for part in range(explanation.n_parts)]
    return [
        {
            "letter": called[int(np.argmax(part_of == part))].part,
            "name": called[int(np.argmax(part_of == part))].part_long,
            "share": float(use.shares[part_of == part].sum()),
            "kinds": own,
        }
        for part, own in enumerate(kinds)
    ]


def _classes(model: PACE, observations: Observations, theta: Array, names: list[str], used: Array) -> dict[str, Any]:
    """The concepts that speak for each class, and the images of the class that have most of them."""
    evidence = model.evidence_
    predicted = summary.predicted_classes(observations)
    found = []
    for n in range(len(names)):
        own = np.flatnonzero(predicted == n)
        top = summary.class_concepts(theta[own] if own.size else theta, evidence[:, n], used, _CLASS_CONCEPTS)
        found.append([(k, strength, _holders(theta[:, k], own)) for k, strength in top])
    return {
        "classes": class_titles(names),
        "classNames": names,  # as the model has them
        "evidence": packed(evidence, "i16", 32767),  # from -1 to 1
        # The class that θ points to through η, whatever the transformer said.
        "pointed": (theta @ model.label_head_).argmax(1).tolist() if names else None,
        "classConcepts": found,
    }


def learning(model: PACE) -> dict[str, Any]:
    """The bound after every epoch, and how the number of concepts was found, if it was."""
    bounds = [[_number(term) for term in bound] for bound in model.lower_bounds_]
    selection = model.selection_
    found = selection and {
        "images": selection.images,
        "concepts": len(model.means_),
        "numbers": selection.numbers.tolist(),
        "bounds": selection.bounds.tolist(),
        "evidence": [_number(nats) for nats in selection.evidence.tolist()],
    }
    return {"bounds": bounds, "selection": found}


def trust(scores: Scores | None) -> dict[str, Any]:
    """The verdict, the warnings and the scores."""
    if scores is None:
        return {"verdict": None, "warnings": [], "scores": None, "main": []}
    entries = [
        {name: _number(value) if isinstance(value, float) else value for name, value in score.as_dict().items()}
        for score in scores.values()
    ]
    main = [score.name for score in scores.main]
    return {"verdict": scores.verdict, "warnings": scores.warnings, "scores": entries, "main": main}


def nearest_concepts(means: Array, used: Array, n: int) -> list[list[int]]:
    """For every concept the n concepts in use whose means are nearest to its own, nearest first."""
    distances = cdist(means, means)
    np.fill_diagonal(distances, np.inf)
    distances[:, ~used] = np.inf
    order = np.argsort(distances, axis=1, kind="stable")[:, :n]
    return [[int(k) for k in row if np.isfinite(distances[concept, k])] for concept, row in enumerate(order)]


def packed(values: Array, kind: str, scale: float = 1) -> dict[str, str]:
    """Numbers as small integers in base64, after multiplying by `scale`; data.js divides by the same."""
    dtype = np.dtype({"u8": "u1", "u16": "<u2", "i16": "<i2"}[kind])
    limits = np.iinfo(dtype)
    steps = np.rint(np.clip(values * scale, limits.min, limits.max)).astype(dtype)
    return {"kind": kind, "base64": b64encode(steps.tobytes()).decode()}


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


def _number(value: float) -> float | None:
    """As JSON has it: NaN and infinities are no numbers there."""
    return value if np.isfinite(value) else None
