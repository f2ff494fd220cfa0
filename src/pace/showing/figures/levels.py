"""The three-level figure: concepts of the dataset, of an image, and of its patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from scipy.ndimage import distance_transform_edt, gaussian_filter, label, maximum_position

from pace.explainer import PACE
from pace.explanation import Array, Explanation
from pace.images.preparation import PreprocessingLike
from pace.naming import Name, class_titles, hidden_among
from pace.observations import Observations
from pace.showing import summary
from pace.showing.figures import drawing
from pace.showing.figures.drawing import HEAD, MARGIN, PATCHES, ROW_WIDTH, SMALL, TILE, Fill, Layout, own_style
from pace.showing.patches import Grid, Images, Pictures, Pixels, grid_of, mean_color

_FACTOR = 2  # the patch level shows φ averaged over so many patches each way

# In points: pictures, the captions below them, and where the columns begin.
_PICTURE, _CAPTION, _TOP, _BETWEEN = 82.0, 16.0, 30.0, 14.0
_IMAGE_X = MARGIN + ROW_WIDTH + _BETWEEN
_BARS_X, _BARS = _IMAGE_X + _PICTURE + _BETWEEN, 108.0
_MAP_X = _BARS_X + _BARS + _BETWEEN


@own_style()
def three_levels(
    model: PACE,
    images: Images,
    observations: Observations,
    *,
    preprocessing: PreprocessingLike | None = None,
    shown: Sequence[int] | None = None,
    concepts: Sequence[int] | None = None,
    n_concepts: int = 4,
    level: float = 0.9,
    class_names: Sequence[str] | None = None,
    without: Sequence[dict[int, dict[str, Any]]] = (),
) -> Figure:
    """The paper's figure of Color and Flower: what PACE says about a dataset, about images, and about patches.

    Parameters
    ----------
    images
        The images that were observed: a batch as the model saw it, or an `ImageSet` and the model's `preprocessing`.
    shown
        Which of them to explain. By default a clear mixture from each of the two largest predicted classes.
    concepts
        Which concepts to show. By default `n_concepts`, taken in turn from the images shown, largest θ first.
    level
        Probability of the credible intervals.
    without
        For the first images: what is predicted without some concepts, as `pace.showing.report.write_report` takes it.
    """
    pictures, grid = Pictures(images, preprocessing, expected=len(observations)), grid_of(observations)
    classes = summary.predicted_classes(observations)
    rows = _mixed(model, observations, classes) if shown is None else [range(len(observations))[m] for m in shown]
    if not rows:
        raise ValueError("shown: expected at least one image; found none")
    names = [] if classes is None else class_titles(summary.class_names(class_names, images, observations.n_classes))
    explanation, use = model.explain(observations[rows]), summary.use_of(model.concept_weights_)
    wanted = drawing.chosen(
        concepts,
        _in_turn(explanation.theta, use.used & ~hidden_among(explanation.names))[:n_concepts],
        explanation.n_concepts,
    )
    typical = summary.typical_patches(model.means_[wanted], observations, PATCHES)
    colors = np.array([mean_color(pictures, patches, grid) for patches in typical])
    fills = dict(zip(wanted, drawing.fills_like(colors), strict=True))
    called = explanation.names
    bars = [drawing.theta_bars_of(explanation, position, fills, level, called) for position in range(len(rows))]

    row_height = max(_PICTURE, 11 * (len(wanted) + 1)) + _CAPTION
    pitch = max(TILE + 6, (len(rows) * row_height - _CAPTION + 6) / len(wanted))
    layout = Layout(_MAP_X + _PICTURE + MARGIN, _TOP + max(len(wanted) * pitch, len(rows) * row_height) + MARGIN)
    _head(layout, MARGIN, "Dataset level", "patches nearest to the mean μ of each concept")
    _head(layout, _IMAGE_X, "Image level", f"share θ of each concept, {level:.0%} intervals")
    _head(layout, _MAP_X, "Patch level", f"by {_FACTOR} × {_FACTOR} patches")
    for position, k in enumerate(wanted):
        share, y = f"{use.shares[k]:.1%}", _TOP + position * pitch
        drawing.show_concept(
            layout, drawing.title(called[k]), [share], pictures, typical[position], grid, MARGIN, y, fills[k]
        )
    coarse, scale = explanation.aggregate(_FACTOR), max(bar.high for image in bars for bar in image)
    for position, m in enumerate(rows):
        y = _TOP + position * row_height
        drawing.show(layout, pictures[m], _IMAGE_X, y, _PICTURE, _PICTURE)
        caption = f"image {m}" if classes is None else names[classes[m]]
        if m < len(without) and without[m]:
            k, most = min(without[m].items(), key=lambda one: one[1]["after"])
            what = called[k].part_long if called[k].part else called[k].long
            caption = f"{caption} {most['before']:.0%} → {most['after']:.0%} without {what}"
        layout.note(_IMAGE_X, y + row_height - _CAPTION + 3, caption, room=_MAP_X - _IMAGE_X - 4)
        step = min((row_height - _CAPTION) / len(bars[position]), 15)
        drawing.show_bars(layout, bars[position], _BARS_X, y, _BARS, step, scale)
        _show_map(layout, pictures[m], coarse, position, grid, fills, called, y)
    return layout


def _head(layout: Layout, x: float, title: str, note: str) -> None:
    layout.write(x, MARGIN, title, size=HEAD, bold=True)
    layout.note(x, MARGIN + 12, note)


def _mixed(model: PACE, observations: Observations, classes: Array | None) -> list[int]:
    """From each of the two largest predicted classes the image with the largest second share: a mixture easy to see."""
    second = np.sort(np.asarray(model.transform(observations)), 1)[:, -2:][:, 0]
    mixed = np.argsort(-second, kind="stable")
    if classes is None:
        return [int(m) for m in mixed[:2]]
    largest = np.argsort(-np.bincount(classes), kind="stable")[:2]
    return [int(mixed[classes[mixed] == n][0]) for n in largest if (classes == n).any()]


def _in_turn(theta: Array, used: Array) -> Array:
    """The concepts in use: the largest of every image, then the second largest of every image, and so on."""
    concepts = np.flatnonzero(used)
    theta = theta[:, concepts]
    rank = np.argsort(np.argsort(-theta, 1, kind="stable"), 1, kind="stable").min(0)
    ordered: Array = concepts[np.argsort(rank - theta.max(0) / 2, kind="stable")]
    return ordered


def _show_map(
    layout: Layout, pixels: Pixels, coarse: Explanation, image: int, grid: Grid, fills: dict[int, Fill],
    called: Sequence[Name], y: float,
) -> None:  # fmt: skip
    """The image in grey, tinted by the main concept of its cells; a line around each region, and its number in it."""
    rows, columns = grid
    phi = coarse.phi[image].reshape(*grid_of(coarse), -1)  # type: ignore[index]
    phi = phi.repeat(_FACTOR, 0).repeat(_FACTOR, 1)[:rows, :columns]
    main = phi.argmax(2)
    tinted = drawing.faded(pixels)
    for k, own in fills.items():
        alpha = drawing.on_pixels(np.where(main == k, 0.25 + 0.45 * phi[:, :, k], 0.0), pixels)[:, :, None]
        tinted = (1 - alpha) * tinted + alpha * 255 * np.array(to_rgb(own.color))
    place = drawing.show(layout, tinted.astype(np.uint8), _MAP_X, y, _PICTURE, _PICTURE)
    regions = np.where(np.isin(main, list(fills)), main, -1)
    drawing.show_borders(layout, np.pad(regions, 1, "edge"), pixels, place)
    across, down = pixels.shape[1] / columns, pixels.shape[0] / rows  # pixels of a patch
    wide, high = np.array([across, down]) * _FACTOR * _PICTURE / max(pixels.shape[:2])  # points of a cell
    for k in fills:
        region = regions[::_FACTOR, ::_FACTOR] == k
        depth = distance_transform_edt(np.pad(region, 1))[1:-1, 1:-1]
        parts, count = label(region)
        central = depth + 1e-3 * gaussian_filter(region.astype(float), 2, mode="constant")  # of equally deep cells
        for r, c in maximum_position(central, parts, range(1, count + 1)):
            if drawing.width_of(called[k].short, SMALL, "bold") <= wide * (2 * depth[r, c] - 1) - 1 and high > SMALL:
                middle = (min(_FACTOR * (c + 0.5), columns - 0.5) * across, min(_FACTOR * (r + 0.5), rows - 0.5) * down)
                drawing.show_number(layout.paper, *middle, called[k].short, place)
    others = float((regions < 0).mean())
    note = f"{others:.1%} of the cells: others" if others else drawing.plural(len(np.unique(main)), "concept")
    layout.note(_MAP_X, y + _PICTURE + 3, note, room=_PICTURE)
