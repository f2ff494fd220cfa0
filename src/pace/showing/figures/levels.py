"""The three-level figure: concepts of the dataset, of an image, and of its patches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from scipy.ndimage import distance_transform_edt, label

from pace.explainer import PACE
from pace.explanation import Array, Explanation
from pace.images.preparation import PreprocessingLike
from pace.observations import Observations
from pace.showing.figures.pieces import (
    Grid,
    bar_room,
    chosen,
    faded,
    fitted,
    grid_of,
    in_use,
    label_width,
    looks_like,
    names_of,
    nearest,
    percent,
    pictures_of,
    plural,
    predicted,
    shares,
    show,
    show_bars,
    show_patch,
    theta_rows,
)
from pace.showing.figures.sheet import HEAD, INK, MUTED, SMALL, Look, Sheet, drawn, width_of
from pace.showing.patches import Images, Pixels

_MARGIN, _GAP, _TOP = 4.0, 14.0, 30.0  # around everything; between the levels; above the pictures, for the heads
_PICTURE, _CAPTION, _TILE, _BARS = 82.0, 16.0, 31.0, 108.0


@drawn
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
        Which concepts to show. By default `n_concepts`, taken by turns from the images shown, largest θ first.
    n_patches, margin
        Patches nearest to μ_k, each of another image, and how many patches around them are shown.
    factor
        The φ of `factor` × `factor` patches are averaged for the patch level.
    level
        Of the credible intervals.
    """
    pictures, grid = pictures_of(images, preprocessing, observations), grid_of(observations)
    classes = predicted(observations)
    rows = _mixed(model, observations, classes) if shown is None else [range(len(observations))[m] for m in shown]
    if not rows:
        raise ValueError("shown: expected at least one image; found none")
    explanation = model.explain(observations[rows])
    used = in_use(model)
    usual = used[np.argsort(-_by_turns(explanation.theta[:, used]), kind="stable")[:n_concepts]]
    wanted = chosen(concepts, usual, explanation.n_concepts)
    tiles = [nearest(model, observations, k, n_patches) for k in wanted]
    looks = looks_like(
        np.array([np.mean([pictures.patch(*where, grid).mean((0, 1)) for where in own], 0) for own in tiles])
    )
    names = names_of(class_names, images, observations.n_classes)

    label = label_width(wanted) + 16
    left = label + n_patches * (_TILE + 3) - 3
    image_x = _MARGIN + left + _GAP
    bars_x = image_x + _PICTURE + _GAP
    map_x = bars_x + _BARS + _GAP
    row_height = max(_PICTURE, 11 * (len(wanted) + 1)) + _CAPTION
    pitch = max(_TILE + 6, (len(rows) * row_height - _CAPTION + 6) / len(wanted)) if len(wanted) > 2 else _TILE + 6
    height = _TOP + max(len(wanted) * pitch - 6, len(rows) * row_height - 4) + _MARGIN
    sheet = Sheet(map_x + _PICTURE + _MARGIN, height)

    _head(sheet, _MARGIN, "Dataset level", "patches nearest to the mean μ of each concept", left)
    _head(sheet, image_x, "Image level", f"share θ of each concept, {100 * level:.0f} % intervals", map_x - image_x - 4)
    _head(sheet, map_x, "Patch level", f"by {factor} × {factor} patches" if factor > 1 else "by patches", _PICTURE)

    use = shares(model)
    for position, (k, style, own) in enumerate(zip(wanted, looks, tiles, strict=True)):
        y = _TOP + position * pitch
        sheet.swatch(_MARGIN, y + 0.5, 7, style)
        sheet.write(_MARGIN + 10, y, f"Concept {k}", bold=True)
        sheet.write(_MARGIN + 10, y + 10, percent(float(use[k])), size=SMALL, color=MUTED)
        for column, where in enumerate(own):
            show_patch(sheet, pictures, where, grid, margin, _MARGIN + label + column * (_TILE + 3), y, _TILE)

    bars = [theta_rows(explanation, position, wanted, looks, level, rest=True) for position in range(len(rows))]
    bar_labels, scale = bar_room(bars)
    coarse = explanation.aggregate(factor)
    for position, m in enumerate(rows):
        y = _TOP + position * row_height
        pixels = pictures[m]
        show(sheet, pixels, image_x, y, _PICTURE, _PICTURE)
        caption = f"image {m}" if classes is None else names[classes[m]]
        sheet.write(image_x, y + row_height - _CAPTION + 3, caption, size=SMALL, color=MUTED, room=map_x - image_x - 4)
        step = min((row_height - _CAPTION) / len(bars[position]), 15)
        show_bars(sheet, bars[position], bars_x, y, _BARS, step, bar_labels, scale)
        _show_map(sheet, pixels, coarse, position, grid, factor, wanted, looks, map_x, y)
    return sheet


def _head(sheet: Sheet, x: float, title: str, note: str, room: float) -> None:
    sheet.write(x, _MARGIN, title, size=HEAD, bold=True, room=room)
    sheet.write(x, _MARGIN + 12, note, size=SMALL, color=MUTED, room=room)


def _mixed(model: PACE, observations: Observations, classes: Array | None) -> list[int]:
    """Of the two largest predicted classes, the image whose second largest θ is largest: a mixture that can be seen."""
    second = np.sort(np.asarray(model.transform(observations)), 1)[:, -2:][:, 0]
    mixed = np.argsort(-second, kind="stable")
    if classes is None:
        return [int(m) for m in mixed[:2]]
    largest = np.argsort(-np.bincount(classes), kind="stable")[:2]
    return [int(mixed[classes[mixed] == n][0]) for n in largest if (classes == n).any()]


def _by_turns(theta: Array) -> Array:
    """Ranks concepts (K,): the largest of every image, then the second largest of every image, and so on."""
    order = np.argsort(-theta, 1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(theta.shape[1])[None, :], 1)
    ranking: Array = -(rank.min(0) - theta.max(0) / 2)
    return ranking


def _show_map(
    sheet: Sheet, pixels: Pixels, coarse: Explanation, image: int, grid: Grid, factor: int, wanted: Sequence[int],
    looks: Sequence[Look], x: float, y: float,
) -> None:  # fmt: skip
    """The image in grey, tinted by the main concept of its cells; a line around each region, and its number in it."""
    rows, columns = grid_of(coarse)
    phi = coarse.phi[image].reshape(rows, columns, -1)  # type: ignore[index]
    main = phi.argmax(2)
    ground = faded(pixels).astype(np.float64)
    down, across = _edges(grid[0], factor, pixels.shape[0]), _edges(grid[1], factor, pixels.shape[1])
    for k, style in zip(wanted, looks, strict=True):
        strength = np.where(main == k, 0.25 + 0.45 * phi[:, :, k], 0.0)
        alpha = strength.repeat(np.diff(down), 0).repeat(np.diff(across), 1)[:, :, None]
        ground = (1 - alpha) * ground + alpha * 255 * np.array(to_rgb(style.color))
    place = show(sheet, ground.astype(np.uint8), x, y, _PICTURE, _PICTURE)
    held = np.where(np.isin(main, wanted), main, -1)
    upright, level = np.argwhere(held[:, 1:] != held[:, :-1]), np.argwhere(held[1:] != held[:-1])
    borders = [[(across[c + 1], down[r]), (across[c + 1], down[r + 1])] for r, c in upright]
    borders += [[(across[c], down[r + 1]), (across[c + 1], down[r + 1])] for r, c in level]
    lines = LineCollection(borders, colors=INK, linewidths=0.7, capstyle="projecting", transform=place)
    sheet.paper.add_collection(lines, autolim=False)
    wide, _ = fitted(pixels.shape, _PICTURE, _PICTURE)
    points = wide / pixels.shape[1]
    for k in wanted:
        regions, count = label(held == k)
        for number in range(1, count + 1):
            # The cell farthest from the region's edge, of those the one nearest to the region's middle.
            inside = np.pad(regions == number, 1)
            depth = distance_transform_edt(inside)[1:-1, 1:-1]
            cells = np.argwhere(depth == depth.max())
            r, c = cells[np.abs(cells - cells.mean(0)).sum(1).argmin()]
            cell_width, cell_height = (across[c + 1] - across[c]) * points, (down[r + 1] - down[r]) * points
            if width_of(str(k), SMALL, "bold") <= cell_width * (2 * depth[r, c] - 1) - 1 and cell_height > SMALL:
                middle = (across[c] + across[c + 1]) / 2, (down[r] + down[r + 1]) / 2
                sheet.paper.text(
                    *middle, str(k), ha="center", va="center_baseline", fontsize=SMALL, fontweight="bold", color=INK,
                    parse_math=False, transform=place, path_effects=[withStroke(linewidth=1.2, foreground="white")],
                )  # fmt: skip
    elsewhere = float((held < 0).mean())
    note = plural(len(np.unique(main)), "concept")
    if elsewhere:
        note = f"{percent(elsewhere)} of the cells: others"
    sheet.write(x, y + _PICTURE + 3, note, size=SMALL, color=MUTED, room=_PICTURE)


def _edges(count: int, factor: int, pixels: int) -> list[int]:
    """Pixels at which cells of `factor` patches begin and end."""
    return [round(patch * pixels / count) for patch in [*range(0, count, factor), count]]
