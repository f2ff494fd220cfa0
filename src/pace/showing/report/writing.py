"""`write_report`: from a fitted model, its images and observations to one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from pace.atomic import write_atomically
from pace.explainer import PACE
from pace.explanation import Array, Explanation
from pace.images import ImageSet, PreprocessingLike
from pace.model.selecting import Selection
from pace.observations import Observations
from pace.showing.patches import Images
from pace.showing.report import packing, summary
from pace.showing.report.page import render
from pace.showing.report.pictures import MIME, contact_sheet, encode, mean_colour, read_pictures

if TYPE_CHECKING:
    from PIL.Image import Image

    from pace.metrics.scores import Score

LIMIT = 19_000_000  # bytes of the whole file; a report stays under 20 MB
LEVEL = 0.9  # of the credible intervals

_PATCH_CONCEPTS = 4  # concepts kept of every patch; φ is close to one of them nearly always
_GALLERY = 12  # nearest patches of a concept
_NEIGHBOURS = 4
_CLASS_CONCEPTS = 5
_CLASS_IMAGES = 6
_PREDICTIONS = 5  # classes kept of every prediction


def write_report(
    path: str | PathLike[str],
    model: PACE,
    images: Images,
    observations: Observations,
    *,
    perturbed: Observations | None = None,
    perturbed_images: Images | None = None,
    explanation: Explanation | None = None,
    scores: Mapping[str, Score] | None = None,
    class_names: Sequence[str] | None = None,
    preprocessing: PreprocessingLike | None = None,
    title: str = "What the transformer sees",
) -> Path:
    """Write a report that opens in any browser, from disk, without a network. The file appears whole or not at all.

    Parameters
    ----------
    images
        The images to show, one for each observation: an `ImageSet` (with `preprocessing`), or what the model saw, as a
        tensor (M, 3, H, W) or an array (M, H, W, 3), uint8 or float in [0, 1].
    observations
        What the transformer says about these images, with a grid.
    perturbed, perturbed_images
        The same images perturbed, to be shown beside the originals; without the images, only their θ is.
    explanation
        ``model.explain(observations)``, if it is there already.
    scores
        ``pace.metrics.evaluate(…)``: what the Trust view shows.
    class_names
        Names of the N classes the transformer predicts. By default those of the `ImageSet`, if there are N.
    preprocessing
        How an `ImageSet` was prepared for the model: ``backbone.preprocessing``.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: there is no such folder to write {path.name} to")
    if observations.grid is None:
        raise ValueError("the layout of the patches is unknown; pass grid=(rows, columns) to Observations")
    if perturbed_images is not None and perturbed is None:
        raise ValueError("perturbed_images: needs perturbed, the observations of these images, as well")
    classes = model.label_head_.shape[1]
    for some in (observations, perturbed):
        if some is not None and classes and some.n_classes not in (0, classes):
            raise ValueError(f"predictions have {some.n_classes} classes; the model was fitted with {classes}")
    shown = _explained(model, observations, explanation, "explanation")
    moved = None
    if perturbed is not None:
        if perturbed.shape != observations.shape or perturbed.grid != observations.grid:
            raise ValueError(f"perturbed: expected the same images as {observations}; found {perturbed}")
        moved = _explained(model, perturbed, None, "perturbed")
    pictures = read_pictures(images, len(observations), preprocessing, "images")
    if perturbed_images is not None:
        pictures += read_pictures(perturbed_images, len(observations), preprocessing, "perturbed_images")
        if pictures[0].size != pictures[-1].size:
            raise ValueError(
                f"perturbed_images: expected {pictures[0].size} pixels as images have; found {pictures[-1].size}"
            )

    sheet = contact_sheet(pictures[: len(observations)])
    data: dict[str, Any] = {
        "title": title,
        "grid": observations.grid,
        "prefix": observations.prefix_tokens,
        "level": LEVEL,
        "picture": {"type": MIME, "width": pictures[0].width, "height": pictures[0].height},
        "perturbedPictures": perturbed_images is not None,
        "sheet": {"base64": packing.base64(sheet.file), "columns": sheet.columns, "rows": sheet.rows},
        "names": images.names if isinstance(images, ImageSet) else [f"image {m}" for m in range(len(observations))],
        "labels": _labels(images),
        "original": _view(shown, observations, classes),
        "perturbed": None if moved is None or perturbed is None else _view(moved, perturbed, classes),
        **_concepts(model, observations, shown, pictures, _class_names(class_names, images, classes)),
        "selection": None if model.selection_ is None else _selection(model.selection_, len(model.means_)),
        "bounds": [[_number(term) for term in bound] for bound in model.lower_bounds_],
        "scores": None if scores is None else [_score(name, score) for name, score in scores.items()],
        "warnings": [str(warning) for warning in getattr(scores, "warnings", [])],
    }
    room = LIMIT - len(render(title, data, []))
    if room <= 0:
        raise ValueError(
            f"{len(observations)} images with {shown.n_concepts} concepts do not fit into a report under 20 MB; "
            "show fewer images"
        )
    # Base64 turns three bytes into four characters, and every picture ends with a line break.
    encoded = encode(pictures, room * 3 // 4 - 4 * len(pictures))
    write_atomically(path, render(title, data, [packing.base64(file) for file in encoded]))
    return path


def _explained(model: PACE, observations: Observations, given: Explanation | None, name: str) -> Explanation:
    explanation = model.explain(observations) if given is None else given
    expected = (len(observations), observations.n_tokens, len(model.means_))
    found = None if explanation.phi is None else explanation.phi.shape
    if found != expected:
        raise ValueError(f"{name}: expected φ of shape {expected}, as model.explain(observations) gives; found {found}")
    return explanation


def _view(explanation: Explanation, observations: Observations, classes: int) -> dict[str, Any]:
    """Everything the page knows about one view of the images: θ with intervals, φ, weights, predictions."""
    phi = explanation.phi
    assert phi is not None
    kept = min(_PATCH_CONCEPTS, explanation.n_concepts)
    strongest = np.argpartition(-phi, kept - 1, axis=2)[:, :, :kept]
    values = np.take_along_axis(phi, strongest, 2)
    order = np.argsort(-values, axis=2, kind="stable")
    low, high = explanation.interval(LEVEL)
    return {
        "theta": packing.shares(explanation.theta),
        "low": packing.shares(low),
        "high": packing.shares(high),
        "kept": kept,
        "concept": packing.indices(np.take_along_axis(strongest, order, 2), explanation.n_concepts),
        "phi": packing.rough_shares(np.take_along_axis(values, order, 2)),
        "weight": packing.shares(summary.weights(_whole(observations.attention))),
        "predictions": _predictions(observations) if classes else None,  # without η they cannot be explained
    }


def _predictions(observations: Observations) -> list[list[tuple[int, float]]] | None:
    if observations.predictions is None:
        return None
    predictions = _whole(observations.predictions)
    best = np.argsort(-predictions, axis=1, kind="stable")[:, :_PREDICTIONS]
    return [[(int(n), round(float(row[n]), 4)) for n in top] for row, top in zip(predictions, best, strict=True)]


def _concepts(
    model: PACE, observations: Observations, explanation: Explanation, pictures: Sequence[Image], names: list[str]
) -> dict[str, Any]:
    """Dataset level: the concepts in order of use, without empty ones, and the classes they speak for."""
    assert explanation.phi is not None
    assert observations.grid is not None
    weights = summary.weights(_whole(observations.attention))
    shares = summary.use(explanation.phi, weights)
    used = summary.in_use(shares, len(observations) * observations.n_tokens)
    empty = summary.left_empty(model, used)
    found = summary.nearest(model, observations, _GALLERY)
    # The patches nearest to an empty concept are as far from it as all others.
    near = [
        [] if empty[k] else list(zip(found.images[k].tolist(), found.patches[k].tolist(), strict=True))
        for k in range(explanation.n_concepts)
    ]
    neighbours = summary.neighbours(model.means_, used, _NEIGHBOURS)
    speaks = summary.evidence(model.label_head_)
    predicted = None if observations.predictions is None else _whole(observations.predictions).argmax(1)
    classes = summary.class_concepts(
        explanation.theta, speaks, predicted, used, concepts=_CLASS_CONCEPTS, images=_CLASS_IMAGES
    )
    return {
        "concepts": [
            {
                "share": float(shares[k]),
                "used": bool(used[k]),
                "near": near[k],
                "colour": mean_colour(pictures, near[k], observations.grid) if near[k] else None,
                "neighbours": [] if empty[k] else neighbours[k],
            }
            for k in range(explanation.n_concepts)
        ],
        "order": [k for k in np.argsort(-shares, kind="stable").tolist() if not empty[k]],
        "effective": summary.effective_number(shares),
        "prefixWeight": float(weights[:, : observations.prefix_tokens].sum(1).mean()),
        "evidence": packing.signed(speaks),
        "classes": names,
        # The class that θ points to through η, whatever the transformer said.
        "pointed": (explanation.theta @ speaks).argmax(1).tolist() if speaks.shape[1] else None,
        "classConcepts": [[[c.concept, c.strength, c.images] for c in strongest] for strongest in classes],
    }


def _selection(selection: Selection, concepts: int) -> dict[str, Any]:
    """How the number of concepts was found."""
    return {
        "images": selection.images,
        "concepts": concepts,
        "numbers": selection.numbers.tolist(),
        "bounds": selection.bounds.tolist(),
        "evidence": [_number(nats) for nats in selection.evidence.tolist()],
    }


def _class_names(given: Sequence[str] | None, images: Any, count: int) -> list[str]:
    if given is not None:
        if len(given) != count:
            raise ValueError(f"class_names: expected {count}, one for each class of the model; found {len(given)}")
        return [str(name) for name in given]
    known = images.class_names if isinstance(images, ImageSet) else None
    return list(known) if known is not None and len(known) == count else [f"class {n}" for n in range(count)]


def _labels(images: Any) -> list[str] | None:
    """What the dataset calls every image, which need not be a class the transformer knows."""
    if not isinstance(images, ImageSet) or images.labels is None:
        return None
    names = images.class_names
    return [f"class {label}" if names is None else names[label] for label in images.labels.tolist()]


def _score(name: str, score: Score) -> dict[str, Any]:
    return {
        "name": name,
        "title": score.title,
        "value": _number(score.value),
        "low": _number(score.low),
        "high": _number(score.high),
        "better": score.better,
        "range": [_number(end) for end in score.range],
        "meaning": score.meaning,
    }


def _whole(array: Any) -> Array:
    """All of an array of `Observations`, wherever it is kept."""
    part = array[:]
    return part.double().cpu().numpy() if isinstance(part, Tensor) else np.asarray(part, dtype=np.float64)


def _number(value: float | Array | None) -> float | None:
    """As JSON has it: NaN and infinities are no numbers there."""
    return float(value) if value is not None and np.isfinite(value) else None
