"""Heat maps of concepts over an image."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure

from pace.explanation import Array, Explanation
from pace.images.preparation import PreprocessingLike
from pace.showing.figures.drawing import borders, cell_edges, chosen, faded, on_pixels, show, show_borders
from pace.showing.figures.layout import INK, MUTED, Layout, own_style
from pace.showing.patches import Images, Pictures, Pixels

_MARGIN, _GAP, _PICTURE, _HEAD, _COLUMNS, _SCALE = 4.0, 8.0, 112.0, 22.0, 4, 34.0
# Darker is more, in print too.
_HEAT = LinearSegmentedColormap.from_list("heat", colormaps["OrRd"](np.linspace(0, 0.7, 64)))


@own_style()
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

    `concepts` is one concept, several, or None for those with the largest θ in the image. `images` are those that were
    explained, in the same order.
    """
    pictures = Pictures(images, preprocessing, expected=len(explanation))
    pixels = pictures[image]
    wanted = chosen(concepts, explanation.shown_concepts(image, n_concepts), explanation.n_concepts)
    low, high = (end[0] for end in explanation[image].interval(level))
    columns = min(_COLUMNS, len(wanted) + 1)
    lines = -(-(len(wanted) + 1) // columns)
    tall = _PICTURE * min(1.0, pixels.shape[0] / pixels.shape[1])
    block = _HEAD + tall + _GAP
    layout = Layout(2 * _MARGIN + columns * (_PICTURE + _GAP) + _SCALE, 2 * _MARGIN + lines * block - _GAP)
    layout.write(_MARGIN, _MARGIN, f"image {range(len(pictures))[image]}", bold=True, room=_PICTURE)
    show(layout, pixels, _MARGIN, _MARGIN + _HEAD, _PICTURE, tall)
    for position, k in enumerate(wanted, 1):
        line, column = divmod(position, columns)
        x, y = _MARGIN + column * (_PICTURE + _GAP), _MARGIN + line * block
        layout.write(x, y, f"Concept {k}", bold=True, room=_PICTURE)
        interval = f"{100 * level:.0f} % in [{low[k]:.2f}, {high[k]:.2f}]"
        layout.note(x, y + 10, f"θ {explanation.theta[image, k]:.2f}, {interval}", room=_PICTURE)
        _show_heat(layout, pixels, explanation.patch_map(image, k), x, y + _HEAD, tall)
    _show_scale(layout, layout.width - _MARGIN - _SCALE + 4, _MARGIN + _HEAD + tall * 0.1, tall * 0.8)
    return layout


def _show_heat(layout: Layout, pixels: Pixels, heat: Array, x: float, y: float, tall: float) -> None:
    """The image in grey, multiplied by the colours of `heat` (rows, columns), so that what it shows stays visible."""
    down, across = (cell_edges(count, size) for count, size in zip(heat.shape, pixels.shape, strict=False))
    colors = _HEAT(on_pixels(np.asarray(heat, np.float64), down, across))[:, :, :3]
    place = show(layout, (faded(pixels) * colors).astype(np.uint8), x, y, _PICTURE, tall)
    outline = borders(np.pad(heat >= 0.5, 1), down, across)
    for color, thickness in (("white", 1.7), (INK, 0.8)):
        show_borders(layout, outline, place, color, thickness)


def _show_scale(layout: Layout, x: float, y: float, height: float) -> None:
    axes = layout.panel(x, y, 6, height, frame=True)
    colorbar = layout.colorbar(ScalarMappable(Normalize(0, 1), _HEAT), cax=axes, ticks=[0, 0.5, 1])
    colorbar.outline.set_linewidth(0.5)
    layout.write(x, y - 11, "φ", color=MUTED)
