"""The class figure: the top concepts of classes, as the paper shows them for CUB and Cars."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from pace.explainer import PACE
from pace.explanation import Array
from pace.images.preparation import PreprocessingLike
from pace.observations import Observations
from pace.showing.figures.pieces import (
    grid_of,
    in_use,
    names_of,
    nearest,
    pictures_of,
    plural,
    predicted,
    show,
    show_patch,
)
from pace.showing.figures.sheet import HEAD, MUTED, SMALL, Sheet, drawn
from pace.showing.patches import Images

_MARGIN, _GAP, _LABEL, _TILE, _BETWEEN = 4.0, 12.0, 84.0, 44.0, 4.0


@drawn
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
    """The concepts that carry a class, each with the patches of the whole dataset nearest to its mean.

    A class is what the transformer predicts. Its top concepts are those that add most to its score over the other
    classes in its own images: mean θ_k of the images predicted as n, times η_kn minus the mean of η_k over classes. η
    alone would choose concepts that never occur in the class, θ alone the background that all classes share. There are
    fewer than `n_concepts` if fewer speak for the class. Beside them, the image of the class that they add most to.

    `classes` are shown in the order given; by default the three with most images.
    """
    head = np.asarray(model.label_head_, np.float64)
    labels = predicted(observations)
    if labels is None or head.shape[1] == 0:
        raise ValueError("classes need predictions, in the observations and when the model was fitted")
    pictures, grid = pictures_of(images, preprocessing, observations), grid_of(observations)
    names = names_of(class_names, images, observations.n_classes)
    wanted = _classes(classes, labels, observations.n_classes)
    theta, used = np.asarray(model.transform(observations), np.float64), in_use(model)
    lift = head - head.mean(1, keepdims=True)
    tops = [_top(theta[labels == n], lift[:, n], used, n_concepts) for n in wanted]

    count = max(len(top) for top in tops)
    picture = count * (_TILE + _BETWEEN) - _BETWEEN
    block = 14 + picture + 14
    tiles_x = _MARGIN + picture + _GAP + _LABEL
    width = tiles_x + n_patches * (_TILE + _BETWEEN) - _BETWEEN + _MARGIN
    sheet = Sheet(width, 2 * _MARGIN + len(wanted) * block - 14)
    for position, (n, top) in enumerate(zip(wanted, tops, strict=True)):
        y = _MARGIN + position * block
        own = np.flatnonzero(labels == n)
        number = plural(len(own), "image")
        sheet.write(_MARGIN, y, names[n], size=HEAD, bold=True, room=width - 2 * _MARGIN - 60)
        sheet.write(width - _MARGIN, y + 2, number, size=SMALL, color=MUTED, align="right")
        best = own[(theta[own][:, top] @ lift[top, n]).argmax()]
        show(sheet, pictures[best], _MARGIN, y + 14, picture, picture)
        for line, k in enumerate(top):
            row = y + 14 + line * (_TILE + _BETWEEN)
            _describe(sheet, _MARGIN + picture + _GAP, row, int(k), theta, own, head[k, n])
            for tile, where in enumerate(nearest(model, observations, int(k), n_patches)):
                show_patch(sheet, pictures, where, grid, margin, tiles_x + tile * (_TILE + _BETWEEN), row, _TILE)
    return sheet


def _top(theta: Array, lift: Array, used: Array, n: int) -> Array:
    """Of the concepts in use those that speak for a class in its images, strongest first; one at least."""
    strength = theta[:, used].mean(0) * lift[used]
    order = np.argsort(-strength, kind="stable")[:n]
    top: Array = used[order[: max(1, (strength[order] > 0).sum())]]
    return top


def _describe(sheet: Sheet, x: float, y: float, k: int, theta: Array, own: Array, weight: float) -> None:
    sheet.write(x, y + 1, f"Concept {k}", bold=True, room=_LABEL - 4)
    here, everywhere = theta[own, k].mean(), theta[:, k].mean()
    lines = (f"θ {here:.2f} in this class", f"θ {everywhere:.2f} in all images", f"η {weight:+.2f}".replace("-", "−"))
    for number, line in enumerate(lines):
        sheet.write(x, y + 12 + number * 9, line, size=SMALL, color=MUTED, room=_LABEL - 4)


def _classes(classes: int | Sequence[int] | None, labels: Array, n_classes: int) -> list[int]:
    counts = np.bincount(labels, minlength=n_classes)
    if classes is None:
        return [int(n) for n in np.argsort(-counts, kind="stable")[:3] if counts[n]]
    wanted = [int(n) for n in np.atleast_1d(classes)]
    for n in wanted:
        if not 0 <= n < n_classes:
            raise ValueError(f"classes: expected 0 to {n_classes - 1}; found {n}")
        if not counts[n]:
            raise ValueError(f"classes: no image is predicted as class {n}")
    if not wanted:
        raise ValueError("classes: expected at least one; found none")
    return wanted
