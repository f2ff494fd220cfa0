"""Heat maps of concepts over an image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure

from pace.explanation import Array, Explanation
from pace.images.preparation import PreprocessingLike
from pace.showing.figures.pieces import Grid, chosen, faded, show
from pace.showing.figures.sheet import INK, MUTED, SMALL, Sheet, drawn
from pace.showing.patches import Images, Pictures, Pixels

_MARGIN, _GAP, _PICTURE, _HEAD, _COLUMNS = 4.0, 8.0, 112.0, 22.0, 4
_HEAT = LinearSegmentedColormap.from_list(
    "heat", colormaps["OrRd"](np.linspace(0, 0.7, 64))
)  # darker is more, in print too


@drawn
def overlay(
    images: Images,
    explanation: Explanation,
    image: int,
    concepts: int | Sequence[int] | None = None,
    *,
    preprocessing: PreprocessingLike | None = None,
    n_concepts: int = 3,
    level: float = 0.9,
) -> Figure:
    """φ of one concept or several over an image, beside the image itself; a line goes around φ ≥ 0.5.

    `concepts` is one concept, several for small multiples, or None for those with the largest θ in the image.
    `images` and `explanation` belong together image by image.
    """
    pictures = Pictures(images, preprocessing)
    if len(pictures) != len(explanation):
        raise ValueError(f"images: expected the {len(explanation)} that were explained; found {len(pictures)}")
    pixels = pictures[image]
    wanted = chosen(concepts, explanation.shown_concepts(image, n_concepts), explanation.n_concepts)
    low, high = (end[0] for end in explanation[image].interval(level))
    theta = explanation.theta[image]

    columns = min(_COLUMNS, len(wanted) + 1)
    lines = -(-(len(wanted) + 1) // columns)
    tall = _PICTURE * min(1.0, pixels.shape[0] / pixels.shape[1])
    block = _HEAD + tall + _GAP
    bar = 34.0
    sheet = Sheet(2 * _MARGIN + columns * (_PICTURE + _GAP) + bar, 2 * _MARGIN + lines * block - _GAP)
    for position, k in enumerate([None, *wanted]):
        line, column = divmod(position, columns)
        x, y = _MARGIN + column * (_PICTURE + _GAP), _MARGIN + line * block
        if k is None:
            sheet.write(x, y, f"image {range(len(pictures))[image]}", bold=True, room=_PICTURE)
            show(sheet, pixels, x, y + _HEAD, _PICTURE, tall)
            continue
        sheet.write(x, y, f"Concept {k}", bold=True, room=_PICTURE)
        note = f"θ {theta[k]:.2f}, {100 * level:.0f} % in [{low[k]:.2f}, {high[k]:.2f}]"
        sheet.write(x, y + 10, note, size=SMALL, color=MUTED, room=_PICTURE)
        heat = explanation.patch_map(image, k)
        place = show(sheet, heated(pixels, heat), x, y + _HEAD, _PICTURE, tall)
        edges = outline(heat >= 0.5, pixels.shape[:2])
        for color, thickness in (("white", 1.7), (INK, 0.8)):
            border = LineCollection(edges, colors=color, linewidths=thickness, capstyle="projecting", transform=place)
            sheet.paper.add_collection(border, autolim=False)
    scale = sheet.place(sheet.width - _MARGIN - bar + 4, _MARGIN + _HEAD + tall * 0.1, 6, tall * 0.8, frame=True)
    colorbar = sheet.colorbar(ScalarMappable(Normalize(0, 1), _HEAT), cax=scale, ticks=[0, 0.5, 1])
    colorbar.outline.set_linewidth(0.5)
    sheet.write(sheet.width - _MARGIN - bar + 4, _MARGIN + _HEAD + tall * 0.1 - 11, "φ", color=MUTED)
    return sheet


def heated(pixels: Pixels, heat: Array) -> Array:
    """The image in grey, multiplied by the colours of `heat` (rows, columns), so that what it shows stays visible."""
    colors = _HEAT(_enlarged(heat, pixels.shape[:2]))[:, :, :3]
    shown: Array = (faded(pixels) * colors).astype(np.uint8)
    return shown


def outline(inside: Array, size: Sequence[int]) -> list[list[tuple[float, float]]]:
    """The edges, in pixels, between the patches that are inside and those that are not."""
    rows, columns = inside.shape
    padded = np.pad(inside, 1)
    down, across = (np.round(np.arange(n + 1) * s / n) for n, s in ((rows, size[0]), (columns, size[1])))
    upright = np.argwhere(padded[1:-1, 1:] != padded[1:-1, :-1])
    level = np.argwhere(padded[1:, 1:-1] != padded[:-1, 1:-1])
    lines = [[(across[c], down[r]), (across[c], down[r + 1])] for r, c in upright]
    return lines + [[(across[c], down[r]), (across[c + 1], down[r])] for r, c in level]


def _enlarged(heat: Array, size: Grid | tuple[int, ...]) -> Array:
    """Every patch's value on its own pixels: nothing is smoothed that the model did not say."""
    rows, columns = heat.shape
    down = np.diff(np.round(np.arange(rows + 1) * size[0] / rows).astype(int))
    across = np.diff(np.round(np.arange(columns + 1) * size[1] / columns).astype(int))
    return np.asarray(heat, np.float64).repeat(down, 0).repeat(across, 1)
