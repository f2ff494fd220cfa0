"""The three-level figure: concepts of the dataset, of an image, and of its patches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from scipy.ndimage import distance_transform_edt, label

from pace.explainer import PACE
from pace.explanation import Array, Explanation
from pace.images.preparation import PreprocessingLike
from pace.observations import Observations
from pace.showing import summary
from pace.showing.figures import drawing
from pace.showing.figures.layout import HEAD, INK, SMALL, Fill, Layout, own_style, width_of
from pace.showing.patches import Grid, Images, Pictures, Pixels, grid_of

_MARGIN, _GAP, _TOP = 4.0, 14.0, 30.0  # around everything; between the levels; above the pictures, for the heads
_PICTURE, _CAPTION, _TILE, _BETWEEN, _BARS = 82.0, 16.0, 31.0, 3.0, 108.0


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
    n_patches: int = 5,
    factor: int = 2,
    margin: int = 1,
    level: float = 0.9,
    class_names: Sequence[str] | None = None,
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
    n_patches, margin
        Patches nearest to μ_k, each from another image, and how many patches around them are shown.
    factor
        The φ of `factor` × `factor` patches are averaged for the patch level.
    level
        Probability of the credible intervals.
    """
    pictures, grid = Pictures(images, preprocessing, expected=len(observations)), grid_of(observations)
    classes = summary.predicted_classes(observations)
    rows = _mixed(model, observations, classes) if shown is None else [range(len(observations))[m] for m in shown]
    if not rows:
        raise ValueError("shown: expected at least one image; found none")
    explanation, use = model.explain(observations[rows]), summary.use_of(model.concept_weights_)
    wanted = drawing.chosen(concepts, _in_turn(explanation.theta, use.used)[:n_concepts], explanation.n_concepts)
    typical = summary.typical_patches(model.means_[wanted], observations, n_patches)
    tiles = [typical.pairs(position) for position in range(len(wanted))]
    fills = drawing.fills_like(
        np.array([np.mean([pictures.patch(*pair, grid).mean((0, 1)) for pair in pairs], 0) for pairs in tiles])
    )

    label_room = drawing.label_width(wanted) + 16
    left = label_room + n_patches * (_TILE + _BETWEEN) - _BETWEEN
    image_x = _MARGIN + left + _GAP
    map_x = image_x + _PICTURE + _GAP + _BARS + _GAP
    row_height = max(_PICTURE, 11 * (len(wanted) + 1)) + _CAPTION
    pitch = max(_TILE + 6, (len(rows) * row_height - _CAPTION + 6) / len(wanted)) if len(wanted) > 2 else _TILE + 6
    height = _TOP + max(len(wanted) * pitch - 6, len(rows) * row_height - 4) + _MARGIN
    layout = Layout(map_x + _PICTURE + _MARGIN, height)

    _head(layout, _MARGIN, "Dataset level", "patches nearest to the mean μ of each concept", left)
    for position, (k, own) in enumerate(zip(wanted, fills, strict=True)):
        y = _TOP + position * pitch
        layout.swatch(_MARGIN, y + 0.5, 7, own)
        layout.write(_MARGIN + 10, y, f"Concept {k}", bold=True)
        layout.note(_MARGIN + 10, y + 10, drawing.percent(float(use.shares[k])))
        drawing.show_patches(layout, pictures, tiles[position], grid, margin, _MARGIN + label_room, y, _TILE, _BETWEEN)

    intervals = f"share θ of each concept, {100 * level:.0f} % intervals"
    _head(layout, image_x, "Image level", intervals, map_x - image_x - 4)
    _head(layout, map_x, "Patch level", f"by {factor} × {factor} patches" if factor > 1 else "by patches", _PICTURE)
    captions = [f"image {m}" for m in rows]
    if classes is not None:
        names = summary.class_names(class_names, images, observations.n_classes)
        captions = [names[classes[m]] for m in rows]
    bars = [drawing.theta_bars_of(explanation, position, wanted, fills, level) for position in range(len(rows))]
    bar_labels, scale = drawing.shared_scale(bars)
    coarse = explanation.aggregate(factor)
    for position, m in enumerate(rows):
        y = _TOP + position * row_height
        drawing.show(layout, pictures[m], image_x, y, _PICTURE, _PICTURE)
        layout.note(image_x, y + row_height - _CAPTION + 3, captions[position], room=map_x - image_x - 4)
        step = min((row_height - _CAPTION) / len(bars[position]), 15)
        drawing.show_bars(layout, bars[position], image_x + _PICTURE + _GAP, y, _BARS, step, bar_labels, scale)
        _show_map(layout, pictures[m], coarse, position, grid, factor, dict(zip(wanted, fills, strict=True)), map_x, y)
    return layout


def _head(layout: Layout, x: float, title: str, note: str, room: float) -> None:
    layout.write(x, _MARGIN, title, size=HEAD, bold=True, room=room)
    layout.note(x, _MARGIN + 12, note, room=room)


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
    layout: Layout, pixels: Pixels, coarse: Explanation, image: int, grid: Grid, factor: int, fills: dict[int, Fill],
    x: float, y: float,
) -> None:  # fmt: skip
    """The image in grey, tinted by the main concept of its cells; a line around each region, and its number in it."""
    phi = coarse.phi[image].reshape(*grid_of(coarse), -1)  # type: ignore[index]
    main = phi.argmax(2)
    down, across = (
        drawing.cell_edges(grid[0], pixels.shape[0], factor),
        drawing.cell_edges(grid[1], pixels.shape[1], factor),
    )
    tinted = drawing.faded(pixels).astype(np.float64)
    for k, own in fills.items():
        alpha = drawing.on_pixels(np.where(main == k, 0.25 + 0.45 * phi[:, :, k], 0.0), down, across)[:, :, None]
        tinted = (1 - alpha) * tinted + alpha * 255 * np.array(to_rgb(own.color))
    place = drawing.show(layout, tinted.astype(np.uint8), x, y, _PICTURE, _PICTURE)
    regions = np.where(np.isin(main, list(fills)), main, -1)
    drawing.show_borders(layout, drawing.borders(np.pad(regions, 1, "edge"), down, across), place, INK, 0.7)
    points = _PICTURE / max(pixels.shape[:2])  # of the page, in a pixel
    for k in fills:
        numbered, count = label(regions == k)
        for number in range(1, count + 1):
            r, c, depth = _deepest_cell(numbered == number)
            wide, high = (across[c + 1] - across[c]) * points, (down[r + 1] - down[r]) * points
            if width_of(str(k), SMALL, "bold") <= wide * (2 * depth - 1) - 1 and high > SMALL:
                layout.paper.text(
                    (across[c] + across[c + 1]) / 2, (down[r] + down[r + 1]) / 2, str(k), ha="center",
                    va="center_baseline", fontsize=SMALL, fontweight="bold", color=INK, parse_math=False, transform=place,
                    path_effects=[withStroke(linewidth=1.2, foreground="white")],
                )  # fmt: skip
    elsewhere = float((regions < 0).mean())
    note = drawing.plural(len(np.unique(main)), "concept")
    if elsewhere:
        note = f"{drawing.percent(elsewhere)} of the cells: others"
    layout.note(x, y + _PICTURE + 3, note, room=_PICTURE)


def _deepest_cell(region: Array) -> tuple[int, int, float]:
    """Row, column and depth of the cell farthest from the region's edge, near the middle if there are several."""
    depth = distance_transform_edt(np.pad(region, 1))[1:-1, 1:-1]
    cells = np.argwhere(depth == depth.max())
    r, c = cells[np.abs(cells - cells.mean(0)).sum(1).argmin()]
    return int(r), int(c), float(depth[r, c])
