"""What several figures are made of: pictures, patches, bars of θ, and the colours of concepts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Affine2D, Transform
from scipy.optimize import linear_sum_assignment

from pace.explanation import Array, Explanation
from pace.showing.figures.layout import BODY, INK, MUTED, PALETTE, RULE, SMALL, Fill, Layout, fill, width_of
from pace.showing.patches import Grid, Pictures, Pixels, patch_box

_WRITTEN = 0.005  # shares below this are written as 0.00


def percent(share: float) -> str:
    if 0 < share < 0.001:
        return "< 0.1 %"
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"


def plural(count: int, thing: str) -> str:
    return f"{count} {thing}" + ("" if count == 1 else "s")


def chosen(concepts: int | Sequence[int] | None, default: Sequence[int] | Array, total: int) -> list[int]:
    """The concepts asked for, of `total`, or the default ones."""
    found = [int(k) for k in np.atleast_1d(default if concepts is None else concepts)]
    wrong = [k for k in found if not 0 <= k < total]
    if wrong or not found:
        raise ValueError(f"concepts: expected some of 0 to {total - 1}; found {wrong or 'none'}")
    return found


# -- colours ----------------------------------------------------------------------------------------------------------


def fills_like(colors: Array) -> list[Fill]:
    """Fills for concepts whose patches have the mean colours (n, 3), from 0 to 255.

    Each gets the colour of the palette that suits it best, so that a concept of green patches is not drawn in blue.
    Hatches go by position. More concepts than the palette has colours are told apart by position alone.
    """
    fills = [fill(position) for position in range(len(colors))]
    if len(colors) > len(PALETTE):
        return fills
    palette = 255 * np.array([to_rgb(color) for color in PALETTE])
    cost = np.linalg.norm(_tone(colors)[:, None] - _tone(palette)[None], axis=2)
    return [own._replace(color=PALETTE[best]) for own, best in zip(fills, linear_sum_assignment(cost)[1], strict=True)]


def _tone(colors: Array) -> Array:
    """Hue before brightness: dark green is green."""
    brightness = colors.mean(1, keepdims=True)
    return np.hstack([colors - brightness, 0.8 * brightness])


def faded(pixels: Pixels) -> Array:
    """Grey and light: a background on which colours can be read."""
    grey = pixels.astype(np.float64) @ np.array([0.2989, 0.587, 0.114])
    light: Array = np.repeat((130 + grey * 125 / 255)[:, :, None], 3, 2).astype(np.uint8)
    return light


# -- pictures and patches ---------------------------------------------------------------------------------------------


def show(layout: Layout, pixels: Array, x: float, y: float, width: float, height: float) -> Transform:
    """A picture in the middle of its room. The transform returned is for drawing on it in its pixels.

    A hairline goes around it, which white images need.
    """
    scale = min(width / pixels.shape[1], height / pixels.shape[0])
    wide, high = scale * pixels.shape[1], scale * pixels.shape[0]
    left, top = x + (width - wide) / 2, y + (height - high) / 2
    # "antialiased" leaves enlarged pixels squares, so that a patch is not sharper on paper than the model saw it.
    layout.paper.imshow(pixels, extent=(left, left + wide, top + high, top), aspect="auto", interpolation="antialiased")
    layout.paper.add_patch(Rectangle((left, top), wide, high, fill=False, edgecolor=RULE, linewidth=0.5))
    return Affine2D().scale(scale).translate(left, top) + layout.paper.transData


def show_patches(
    layout: Layout, pictures: Pictures, pairs: Sequence[tuple[int, int]], grid: Grid, margin: int,
    x: float, y: float, side: float, gap: float,
) -> None:  # fmt: skip
    """A row of patches (image, patch) among their neighbours, framed in black and white to be seen on any picture."""
    for column, (image, patch) in enumerate(pairs):
        size = pictures[image].shape[:2]
        place = show(layout, pictures.patch(image, patch, grid, margin), x + column * (side + gap), y, side, side)
        if not margin:
            continue
        window, box = patch_box(patch, grid, size, margin), patch_box(patch, grid, size)
        corner, wide, high = (box.left - window.left, box.top - window.top), box.right - box.left, box.bottom - box.top
        for color, line in (("white", 1.8), (INK, 0.8)):
            frame = Rectangle(corner, wide, high, fill=False, edgecolor=color, linewidth=line, transform=place)
            layout.paper.add_patch(frame)


def cell_edges(count: int, pixels: int, factor: int = 1) -> list[int]:
    """Where cells of `factor` patches begin and end, in an image of `count` patches and so many pixels along one side."""
    return [round(patch * pixels / count) for patch in [*range(0, count, factor), count]]


def on_pixels(cells: Array, down: Sequence[int], across: Sequence[int]) -> Array:
    """Every cell's value on its own pixels; nothing is smoothed that the model did not say."""
    return cells.repeat(np.diff(down), 0).repeat(np.diff(across), 1)


def borders(padded: Array, down: Sequence[int], across: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Lines, in pixels, between neighbouring cells that differ; `padded` has a further cell on every side."""
    upright = np.argwhere(padded[1:-1, 1:] != padded[1:-1, :-1])
    level = np.argwhere(padded[1:, 1:-1] != padded[:-1, 1:-1])
    lines = [[(across[c], down[r]), (across[c], down[r + 1])] for r, c in upright]
    return lines + [[(across[c], down[r]), (across[c + 1], down[r])] for r, c in level]


def show_borders(
    layout: Layout, lines: list[list[tuple[int, int]]], place: Transform, color: str, width: float
) -> None:
    collection = LineCollection(lines, colors=color, linewidths=width, capstyle="projecting", transform=place)
    layout.paper.add_collection(collection, autolim=False)


# -- bars of θ --------------------------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """One row of a bar chart of θ."""

    label: str
    value: float
    low: float
    high: float
    fill: Fill


def theta_bars_of(
    explanation: Explanation, image: int, concepts: Sequence[int], fills: Sequence[Fill], level: float
) -> list[Bar]:
    """θ of some concepts of an image, then of all others together (sums of Dirichlet shares are Beta too).

    The others are counted if the image shows them. There is no such row if nothing of it would be seen.
    """
    part = explanation[image]
    low, high = part.interval(level)
    bars = [
        Bar(f"Concept {k}", float(part.theta[0, k]), float(low[0, k]), float(high[0, k]), own)
        for k, own in zip(concepts, fills, strict=True)
    ]
    others = np.setdiff1d(np.arange(explanation.n_concepts), concepts)
    shown = len(np.setdiff1d(part.shown_concepts(0), concepts))
    if len(others) and (shown or part.theta[0, others].sum() >= _WRITTEN):
        gamma = part.gamma.astype(np.float64)
        pooled = np.array([[gamma[0, others].sum(), gamma[0, list(concepts)].sum()]])
        low, high = Explanation(pooled, pooled).interval(level)
        name = plural(shown, "other") if shown else "the rest"
        bars.append(Bar(name, pooled[0, 0] / pooled.sum(), float(low[0, 0]), float(high[0, 0]), Fill(RULE, "")))
    return bars


def show_bars(
    layout: Layout, bars: Sequence[Bar], x: float, y: float, width: float, row: float, labels: float, scale: float
) -> None:
    """Bars with their credible intervals from 0 to `scale`, labelled on the left, with their values on the right."""
    values = width_of("0.00", SMALL) + 4
    span = width - labels - values
    axes = layout.panel(x + labels, y, span, row * len(bars))
    axes.set(xlim=(0, scale), ylim=(len(bars), 0))
    axes.plot([0, 0], [0, len(bars)], color=MUTED, linewidth=0.6, clip_on=False)
    for position, bar in enumerate(bars):
        middle = position + 0.5
        axes.barh(
            middle, bar.value, 0.62, color=bar.fill.color, hatch=bar.fill.hatch, edgecolor="white", linewidth=0, zorder=2
        )  # fmt: skip
        across = [bar.low, bar.low, bar.low, bar.high, bar.high, bar.high]
        down = [middle - 0.18, middle + 0.18, middle, middle, middle - 0.18, middle + 0.18]
        rim = [withStroke(linewidth=2, foreground="white")]  # seen on dark bars too
        axes.plot(across, down, color=INK, linewidth=0.9, clip_on=False, path_effects=rim, zorder=3)
        top = y + row * middle - SMALL * 0.5
        layout.write(x + labels - 4, top, bar.label, size=SMALL, align="right")
        layout.note(x + labels + span * bar.high / scale + 4, top, f"{bar.value:.2f}")


def shared_scale(panels: Sequence[Sequence[Bar]]) -> tuple[float, float]:
    """For panels side by side: the width of their labels, and a scale on which the longest interval fits."""
    bars = [bar for panel in panels for bar in panel]
    return max(width_of(bar.label, SMALL) for bar in bars) + 4, max(bar.high for bar in bars) or 1.0


def label_width(concepts: Sequence[int]) -> float:
    """Points that the longest of the names "Concept k" takes."""
    return max(width_of(f"Concept {k}", BODY, "bold") for k in concepts)
