"""What all figures share: sizes in points, colours that everyone can tell apart, text that is never markup, and saving."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.textpath import text_to_path

from pace.atomic import write_atomically

INK, MUTED, RULE = "#1a1a1a", "#5c5c5c", "#c8c8c8"
SMALL, BODY, HEAD = 6.0, 7.0, 8.5  # points

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
    **{f"{axis}.labelsize": SMALL for axis in ("xtick", "ytick")},
    **{f"{axis}.color": MUTED for axis in ("xtick", "ytick")},
    **{f"{axis}.major.width": 0.5 for axis in ("xtick", "ytick")},
    **{f"{axis}.major.size": 2.5 for axis in ("xtick", "ytick")},
}
# Without dates, the same figure gives the same file.
_METADATA = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
_HINTING = 1.06  # fitted to the dots of a screen, letters are up to this much wider than in print


class Fill(NamedTuple):
    """How a concept is told from the others of a figure."""

    color: str
    hatch: str


def fill(position: int) -> Fill:
    """The first 56 differ in colour or hatch, the first 7 in both."""
    return Fill(PALETTE[position % 8], HATCHES[(position + position // 8) % 7])


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

    def panel(self, x: float, y: float, width: float, height: float, frame: bool = False) -> Axes:
        """Axes of their own on a rectangle of the figure; without `frame`, neither ticks nor spines."""
        bottom = self.height - y - height
        box = (x / self.width, bottom / self.height, width / self.width, height / self.height)
        axes = self.add_axes(box)
        if not frame:
            axes.set_axis_off()
        return axes

    def write(
        self, x: float, y: float, text: str, *, size: float = BODY, color: str = INK, bold: bool = False,
        align: str = "left", room: float | None = None,
    ) -> Text:  # fmt: skip
        """A line of text whose top is at y; shortened where it would be wider than `room`."""
        weight = "bold" if bold else "normal"
        line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
        if room is not None:
            line = shortened(line, room, size, weight)
        return self.text(
            x / self.width, 1 - y / self.height, line, ha=align, va="top", fontsize=size, color=color,
            fontweight=weight, parse_math=False, usetex=False,
        )  # fmt: skip

    def note(self, x: float, y: float, text: str, *, align: str = "left", room: float | None = None) -> None:
        """A line of small grey text."""
        self.write(x, y, text, size=SMALL, color=MUTED, align=align, room=room)

    def swatch(self, x: float, y: float, side: float, look: Fill) -> None:
        self.paper.add_patch(
            Rectangle((x, y), side, side, facecolor=look.color, edgecolor="white", hatch=look.hatch, linewidth=0)
        )

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


def shortened(line: str, room: float, size: float, weight: str) -> str:
    """As much of the line as fits into `room` points, with … where it was cut."""
    if width_of(line, size, weight) <= room:
        return line
    too_long = bisect_right(range(len(line)), room, key=lambda length: width_of(line[:length] + "…", size, weight))
    return line[: too_long - 1].rstrip() + "…"


def width_of(text: str, size: float = BODY, weight: str = "normal") -> float:
    """In points, wherever it is drawn."""
    font = FontProperties(size=size, weight=weight)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]) * _HINTING
