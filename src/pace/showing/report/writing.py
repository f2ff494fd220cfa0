"""`write_report`: from a fitted model, its images and observations to one HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pace.atomic import write_atomically
from pace.explainer import PACE
from pace.explanation import Explanation
from pace.images import ImageSet, PreprocessingLike
from pace.observations import Observations
from pace.showing.patches import Images, grid_of
from pace.showing.report import contents
from pace.showing.report.encoding import base64
from pace.showing.report.page import render
from pace.showing.report.pictures import MIME, contact_sheet, encode, read_pictures
from pace.showing.summary import class_names as names_of_classes

if TYPE_CHECKING:
    from pace.metrics.scores import Score

_LIMIT = 19_000_000  # bytes of the whole file; a report stays under 20 MB


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
        ``model.explain(observations)``, if you have it already.
    scores
        ``pace.metrics.evaluate(…)``, for the Trust view.
    class_names
        Names of the N classes the transformer predicts. By default those of the `ImageSet`, if there are N.
    preprocessing
        How an `ImageSet` was prepared for the model: ``backbone.preprocessing``.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: there is no such folder to write {path.name} to")
    grid_of(observations)
    n_classes = model.label_head_.shape[1]
    names = names_of_classes(class_names, images, n_classes)
    shown = _explained(model, observations, explanation, "explanation")
    moved = None
    if perturbed is not None:
        if perturbed.shape != observations.shape or perturbed.grid != observations.grid:
            raise ValueError(f"perturbed: expected the same images as {observations}; found {perturbed}")
        moved = _explained(model, perturbed, None, "perturbed")
    pictures = read_pictures(images, len(observations), preprocessing, "images")
    sheet = contact_sheet(pictures)
    if perturbed_images is not None:
        if perturbed is None:
            raise ValueError("perturbed_images: needs perturbed, the observations of these images, as well")
        pictures += read_pictures(perturbed_images, len(observations), preprocessing, "perturbed_images")
        if pictures[0].size != pictures[-1].size:
            raise ValueError(f"perturbed_images: expected {pictures[0].size} pixels; found {pictures[-1].size}")
    data: dict[str, Any] = {
        "title": title,
        "grid": observations.grid,
        "prefix": observations.prefix_tokens,
        "level": contents.LEVEL,
        "picture": {"type": MIME, "width": pictures[0].width, "height": pictures[0].height},
        "perturbedPictures": perturbed_images is not None,
        "sheet": {"base64": base64(sheet.file), "columns": sheet.columns, "rows": sheet.rows},
        "names": images.names if isinstance(images, ImageSet) else [f"image {m}" for m in range(len(observations))],
        "labels": contents.true_labels(images),
        "original": contents.view(shown, observations, n_classes),
        "perturbed": None if moved is None or perturbed is None else contents.view(moved, perturbed, n_classes),
        **contents.concepts(model, observations, shown, pictures),
        **contents.classes(model, observations, shown, names),
        **contents.learning(model),
        **contents.trust(scores),
    }
    room = _LIMIT - len(render(title, data, []))
    # Base64 turns three bytes into four characters, and every picture ends with a line break.
    encoded = encode(pictures, room * 3 // 4 - 4 * len(pictures))
    write_atomically(path, render(title, data, [base64(file) for file in encoded]))
    return path


def _explained(model: PACE, observations: Observations, given: Explanation | None, name: str) -> Explanation:
    n_classes = model.label_head_.shape[1]
    if n_classes and observations.n_classes not in (0, n_classes):
        raise ValueError(f"predictions have {observations.n_classes} classes; the model was fitted with {n_classes}")
    explanation = model.explain(observations) if given is None else given
    expected = (len(observations), observations.n_tokens, len(model.means_))
    found = None if explanation.phi is None else explanation.phi.shape
    if found != expected:
        raise ValueError(f"{name}: expected φ of shape {expected}, as model.explain(observations) gives; found {found}")
    return explanation
