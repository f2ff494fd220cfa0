"""What all figures are made of: a page in points, text that is never markup, pictures, patches, bars of θ, and saving."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.textpath import text_to_path
from matplotlib.transforms import Affine2D, Transform
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from pace.atomic import write_atomically
from pace.explanation import Array, Explanation
from pace.naming import Name
from pace.showing.patches import Grid, Pictures, Pixels, patch_box

INK, MUTED, RULE = "#1a1a1a", "#5c5c5c", "#c8c8c8"
SMALL, BODY, HEAD = 6.0, 7.0, 8.5  # points
MARGIN = 4.0  # around everything

# Concepts are rows: a label, then patches.
PATCHES, TILE, GAP, _LABEL = 5, 34.0, 3.0, 72.0
ROW_WIDTH = _LABEL + PATCHES * (TILE + GAP) - GAP

# Okabe and Ito's colours, which people of all colour visions can tell apart, and hatches for print without colour.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#4D4D4D")
HATCHES = ("", "/////", ".....", "xxxxx", "-----", "\\\\\\\\\\", "+++++")

_STYLE = {
    "text.parse_math": False,
    "hatch.linewidth": 0.5,
    "axes.linewidth": 0.5,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
# Without dates, the same figure gives the same file.
_METADATA = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
_HINTING = 1.06  # fitted to the dots of a screen, letters are up to this much wider than in print
_WRITTEN = 0.005  # shares below this are written as 0.00


class Layout(Figure):
    """A figure laid out in points from its upper left corner. A notebook shows it without pyplot."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width / 72, height / 72), dpi=150, facecolor="white")
        FigureCanvasAgg(self)
        self.width, self.height = width, height
        self.suppressComposite = True  # pictures stay apart, at their own resolution, in SVG and PDF
        # One set of axes for all pictures, since axes are slow to make.
        self.paper = self.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        self.paper.set_axis_off()

    def panel(self, x: float, y: float, width: float, height: float) -> Axes:
        """Axes of their own on a rectangle of the figure."""
        bottom = self.height - y - height
        axes = self.add_axes((x / self.width, bottom / self.height, width / self.width, height / self.height))
        axes.tick_params(labelsize=SMALL, colors=MUTED, width=0.5, length=2.5)
        return axes

    def write(
        self, x: float, y: float, text: str, *, size: float = BODY, color: str = INK, bold: bool = False,
        align: str = "left", room: float = np.inf,
    ) -> None:  # fmt: skip
        """A line of text whose top is at y; shortened where it would be wider than `room`."""
        weight = "bold" if bold else "normal"
        line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
        if width_of(line, size, weight) > room:
            while line and width_of(line + "…", size, weight) > room:
                line = line[:-1].rstrip()
            line += "…"
        self.text(
            x / self.width, 1 - y / self.height, line, ha=align, va="top", fontsize=size, color=color,
            fontweight=weight, parse_math=False, usetex=False,
        )  # fmt: skip

    def note(self, x: float, y: float, text: str, *, align: str = "left", room: float = np.inf) -> None:
        """A line of small grey text."""
        self.write(x, y, text, size=SMALL, color=MUTED, align=align, room=room)

    def _repr_png_(self) -> bytes:
        return _render(self, "png", 150)


@contextmanager
def own_style(**changes: Any) -> Iterator[None]:
    """Figures look the same whatever style the user has set; only the fonts are theirs."""
    # By name, since reading the backend would import pyplot.
    fonts = {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name.startswith("font.")}
    with matplotlib.style.context(["default", fonts | _STYLE | changes]):
        yield


def save(figure: Figure, path: str | PathLike[str], dpi: float = 300) -> Path:
    """Write a figure as .png, .svg or .pdf, whole or not at all. The same figure gives the same bytes."""
    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in _METADATA:
        raise ValueError(f"{path.name}: figures are saved as .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} to save {path.name} in")
    write_atomically(path, _render(figure, kind, dpi))
    return path


def _render(figure: Figure, kind: str, dpi: float) -> bytes:
    buffer = BytesIO()
    # The salt makes the identifiers in an SVG the same every time; type 42 keeps text in a PDF text.
    with own_style(**{"svg.hashsalt": "pace", "pdf.fonttype": 42}):
        figure.savefig(buffer, format=kind, dpi=dpi, metadata=_METADATA[kind])
    return buffer.getvalue()


def width_of(text: str, size: float = BODY, weight: str = "normal") -> float:
    """In points, wherever it is drawn."""
    font = FontProperties(size=size, weight=weight)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]) * _HINTING


def plural(count: int, thing: str) -> str:
    return f"{count} {thing}" + ("" if count == 1 else "s")


def title(name: Name) -> str:
    """'Concept 12', or 'A · kind 3', which is as short, or what it is called."""
    return name.label if name.part or name.given else f"Concept {name.label}"


def chosen(concepts: int | Sequence[int] | None, default: Sequence[int] | Array, total: int) -> list[int]:
    """The concepts asked for, of `total`, or the default ones."""
    found = [int(k) for k in np.atleast_1d(default if concepts is None else concepts)]
    wrong = [k for k in found if not 0 <= k < total]
    if wrong or not found:
        raise ValueError(f"concepts: expected some of 0 to {total - 1}; found {wrong or 'none'}")
    return found


class Fill(NamedTuple):
    """How a concept is told from the others of a figure."""

    color: str
    hatch: str


def fill(position: int) -> Fill:
    """The first 56 differ in colour or hatch, the first 7 in both."""
    return Fill(PALETTE[position % 8], HATCHES[(position + position // 8) % 7])


def fills_like(colors: Array) -> list[Fill]:
    """For patches of the mean colours (n, 3), 0 to 255: up to eight get the colours of the palette that suit them best."""
    fills = [fill(position) for position in range(len(colors))]
    if len(colors) > len(PALETTE):
        return fills
    cost = cdist(colors, 255 * np.array([to_rgb(color) for color in PALETTE]))
    return [own._replace(color=PALETTE[best]) for own, best in zip(fills, linear_sum_assignment(cost)[1], strict=True)]


def faded(pixels: Pixels) -> Array:
    """Grey and light (height, width, 3): a background on which colours can be read."""
    grey = pixels.astype(np.float64) @ np.array([0.2989, 0.587, 0.114])
    return np.repeat(np.floor(130 + grey * 125 / 255)[:, :, None], 3, 2)


def show(layout: Layout, pixels: Array, x: float, y: float, width: float, height: float) -> Transform:
    """A picture in the middle of its room. The transform returned is for drawing on it in its pixels."""
    scale = min(width / pixels.shape[1], height / pixels.shape[0])
    wide, high = scale * pixels.shape[1], scale * pixels.shape[0]
    left, top = x + (width - wide) / 2, y + (height - high) / 2
    # "antialiased" leaves enlarged pixels squares, so that a patch is not sharper on paper than the model saw it.
    layout.paper.imshow(pixels, extent=(left, left + wide, top + high, top), aspect="auto", interpolation="antialiased")
    hairline = Rectangle((left, top), wide, high, fill=False, edgecolor=RULE, linewidth=0.5)  # which white images need
    layout.paper.add_patch(hairline)
    return Affine2D().scale(scale).translate(left, top) + layout.paper.transData


def show_concept(
    layout: Layout, name: str, notes: Sequence[str], pictures: Pictures, patches: Array, grid: Grid, x: float, y: float,
    fill: Fill | None = None,
) -> None:  # fmt: skip
    """A row of ROW_WIDTH x TILE points: a concept's name, notes below it, and its patches (n, 2) among their neighbours."""
    indent = 0 if fill is None else 10
    if fill is not None:
        swatch = Rectangle((x, y), 7, 7, facecolor=fill.color, hatch=fill.hatch, edgecolor="white", linewidth=0)
        layout.paper.add_patch(swatch)
    layout.write(x + indent, y, name, bold=True, room=_LABEL - indent - GAP)
    for line, note in enumerate(notes):
        layout.note(x + indent, y + 10 + 8 * line, note)
    for column, (image, patch) in enumerate(patches):
        pixels, left = pictures[image], x + _LABEL + column * (TILE + GAP)
        window, box = (patch_box(patch, grid, pixels.shape, margin) for margin in (1, 0))
        place = show(layout, pixels[window], left, y, TILE, TILE)
        down, across = (
            (own.start - around.start, own.stop - own.start) for own, around in zip(box, window, strict=True)
        )
        for color, thickness in (("white", 1.8), (INK, 0.8)):  # to be seen on any picture
            frame = Rectangle(
                (across[0], down[0]), across[1], down[1], fill=False, edgecolor=color, linewidth=thickness
            )
            frame.set_transform(place)
            layout.paper.add_patch(frame)


def on_pixels(cells: Array, pixels: Pixels) -> Array:
    """Every cell's value on its own pixels; nothing is smoothed that the model did not say."""
    (rows, columns), (height, width) = cells.shape[:2], pixels.shape[:2]
    spread: Array = cells[np.arange(height) * rows // height][:, np.arange(width) * columns // width]
    return spread


def show_borders(
    layout: Layout, padded: Array, pixels: Pixels, place: Transform, color: str = INK, thickness: float = 0.7
) -> None:
    """Lines between neighbouring cells of a picture that differ; `padded` has a further cell on every side."""
    upright = np.argwhere(padded[1:-1, 1:] != padded[1:-1, :-1])
    level = np.argwhere(padded[1:, 1:-1] != padded[:-1, 1:-1])
    lines = [[(c, r), (c, r + 1)] for r, c in upright] + [[(c, r), (c + 1, r)] for r, c in level]
    cell = Affine2D().scale(pixels.shape[1] / (padded.shape[1] - 2), pixels.shape[0] / (padded.shape[0] - 2))
    collection = LineCollection(
        lines, colors=color, linewidths=thickness, capstyle="projecting", transform=cell + place
    )
    layout.paper.add_collection(collection, autolim=False)


def show_number(axes: Axes, x: float, y: float, number: int | str, place: Transform | None = None) -> None:
    """The number of a concept around (x, y), readable on any colour."""
    axes.text(
        x, y, str(number), ha="center", va="center_baseline", fontsize=SMALL, fontweight="bold", color=INK, parse_math=False,
        transform=place or axes.transData, path_effects=[withStroke(linewidth=1.2, foreground="white")], zorder=4,
    )  # fmt: skip


class Bar(NamedTuple):
    """One row of a bar chart of θ."""

    label: str
    value: float
    low: float
    high: float
    fill: Fill


def theta_bars_of(
    explanation: Explanation, image: int, fills: dict[int, Fill], level: float, called: Sequence[Name]
) -> list[Bar]:
    """θ of some concepts of an image, then of all others together if any is seen."""
    names, looks = [title(called[k]) for k in fills], list(fills.values())
    pooled = explanation[image].merged([[k] for k in fills])
    theta, (low, high) = pooled.theta, pooled.interval(level)
    shown = len(np.setdiff1d(explanation.shown_concepts(image), list(fills)))
    if theta.shape[1] > len(names) and (shown or theta[0, -1] >= _WRITTEN):
        names.append(plural(shown, "other") if shown else "the rest")
        looks.append(Fill(RULE, ""))
    return [Bar(name, theta[0, n], low[0, n], high[0, n], looks[n]) for n, name in enumerate(names)]


def show_bars(layout: Layout, bars: Sequence[Bar], x: float, y: float, width: float, row: float, scale: float) -> None:
    """Bars with their credible intervals from 0 to `scale`, labelled on the left, with their values on the right."""
    labels, values = 42.0, 18.0
    span = width - labels - values
    axes = layout.panel(x + labels, y, span, row * len(bars))
    axes.set(xlim=(0, scale), ylim=(len(bars), 0))
    axes.set_axis_off()
    axes.plot([0, 0], [0, len(bars)], color=MUTED, linewidth=0.6, clip_on=False)
    for position, bar in enumerate(bars):
        middle = position + 0.5
        color, hatch = bar.fill
        axes.barh(middle, bar.value, 0.62, color=color, hatch=hatch, edgecolor="white", linewidth=0, zorder=2)
        across = [bar.low, bar.low, bar.low, bar.high, bar.high, bar.high]
        down = [middle - 0.18, middle + 0.18, middle, middle, middle - 0.18, middle + 0.18]
        rim = [withStroke(linewidth=2, foreground="white")]  # seen on dark bars too
        axes.plot(across, down, color=INK, linewidth=0.9, clip_on=False, path_effects=rim, zorder=3)
        top = y + row * middle - SMALL * 0.5
        layout.write(x + labels - 4, top, bar.label, size=SMALL, align="right", room=labels - 4)
        layout.note(x + labels + span * bar.high / scale + 4, top, f"{bar.value:.2f}")
