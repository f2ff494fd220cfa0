"""The class figure: the top concepts of classes, as the paper shows them for CUB and Cars."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from pace.explainer import PACE
from pace.explanation import Array
from pace.images.preparation import PreprocessingLike
from pace.observations import Observations
from pace.showing import summary
from pace.showing.figures.drawing import plural, show, show_patches
from pace.showing.figures.layout import HEAD, Layout, own_style
from pace.showing.patches import Images, Pictures, grid_of

_MARGIN, _GAP, _LABEL, _TILE, _BETWEEN = 4.0, 12.0, 84.0, 44.0, 4.0


@own_style()
def class_concepts(
    model: PACE,
    images: Images,
    observations: Observations,
    classes: int | Sequence[int] | None = None,
    *,
    preprocessing: PreprocessingLike | None = None,
    n_concepts: int = 3,
    n_patches: int = 5,
    margin: int = 1,
    class_names: Sequence[str] | None = None,
) -> Figure:
    """The concepts that speak for a class, each with the patches of the whole dataset nearest to its mean.

    A class is what the transformer predicts. Its top concepts are those that add most to its score over the other
    classes in its own images: mean θ_k of the images predicted as n, times η_kn minus the mean of η_k over classes. η
    alone would choose concepts that never occur in the class, θ alone the background that all classes share. There are
    fewer than `n_concepts` if fewer speak for the class. Beside them, the image of the class that they add most to.

    `classes` are shown in the order given; by default the three with most images.
    """
    labels = summary.predicted_classes(observations)
    if labels is None or model.label_head_.shape[1] == 0:
        raise ValueError("classes need predictions, in the observations and when the model was fitted")
    pictures, grid = Pictures(images, preprocessing, expected=len(observations)), grid_of(observations)
    names = summary.class_names(class_names, images, observations.n_classes)
    wanted = _chosen_classes(classes, labels, observations.n_classes)
    theta, evidence = np.asarray(model.transform(observations), np.float64), summary.evidence(model.label_head_)
    used = summary.use_of(model.concept_weights_).used
    top = {n: summary.class_concepts(theta[labels == n], evidence[:, n], used, n_concepts) for n in wanted}
    shown = sorted({k for found in top.values() for k, _ in found})
    typical = summary.typical_patches(model.means_[shown], observations, n_patches)

    picture = max(1, *(len(found) for found in top.values())) * (_TILE + _BETWEEN) - _BETWEEN
    labels_x = _MARGIN + picture + _GAP
    tiles_x = labels_x + _LABEL
    width = tiles_x + n_patches * (_TILE + _BETWEEN) - _BETWEEN + _MARGIN
    block = 14 + picture + 14
    layout = Layout(width, 2 * _MARGIN + len(wanted) * block - 14)
    for position, n in enumerate(wanted):
        y = _MARGIN + position * block
        own = np.flatnonzero(labels == n)
        layout.write(_MARGIN, y, names[n], size=HEAD, bold=True, room=width - 2 * _MARGIN - 60)
        layout.note(width - _MARGIN, y + 2, plural(len(own), "image"), align="right")
        concepts = [k for k, _ in top[n]]
        best = own[(theta[own][:, concepts] @ evidence[concepts, n]).argmax()]
        show(layout, pictures[best], _MARGIN, y + 14, picture, picture)
        if not concepts:
            layout.note(labels_x, y + 15, "No concept in use speaks for this class.")
        for line, k in enumerate(concepts):
            row = y + 14 + line * (_TILE + _BETWEEN)
            _describe(layout, labels_x, row, k, theta, own, model.label_head_[k, n])
            show_patches(layout, pictures, typical.pairs(shown.index(k)), grid, margin, tiles_x, row, _TILE, _BETWEEN)
    return layout


def _describe(layout: Layout, x: float, y: float, k: int, theta: Array, own: Array, weight: float) -> None:
    layout.write(x, y + 1, f"Concept {k}", bold=True, room=_LABEL - 4)
    here, everywhere = theta[own, k].mean(), theta[:, k].mean()
    lines = (f"θ {here:.2f} in this class", f"θ {everywhere:.2f} in all images", f"η {weight:+.2f}".replace("-", "−"))
    for number, line in enumerate(lines):
        layout.note(x, y + 12 + number * 9, line, room=_LABEL - 4)


def _chosen_classes(classes: int | Sequence[int] | None, labels: Array, n_classes: int) -> list[int]:
    counts = np.bincount(labels, minlength=n_classes)
    if classes is None:
        return [int(n) for n in np.argsort(-counts, kind="stable")[:3] if counts[n]]
    wanted = [int(n) for n in np.atleast_1d(classes)]
    if not wanted:
        raise ValueError("classes: expected at least one; found none")
    for n in wanted:
        if not 0 <= n < n_classes:
            raise ValueError(f"classes: expected 0 to {n_classes - 1}; found {n}")
        if not counts[n]:
            raise ValueError(f"classes: no image is predicted as class {n}")
    return wanted
