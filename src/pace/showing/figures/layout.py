"""What all figures share: sizes in points, a palette for every eye, text that is never markup, and saving."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, wraps
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from pace.atomic import write_atomically

INK, MUTED, RULE = "#1a1a1a", "#5c5c5c", "#c8c8c8"
SMALL, BODY, HEAD = 6.0, 7.0, 8.5  # points

# Okabe and Ito's colours, which people of all colour visions can tell apart, and hatches for print without colour.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#4D4D4D")
HATCHES = ("", "/////", ".....", "xxxxx", "-----", "\\\\\\\\\\", "+++++")

_METADATA = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
_INVISIBLE = re.compile("[\u200b-\u200f\u2060\ufe00-\ufe0f\U000e0000-\U000e007f]")  # joiners and emoji variations

P = ParamSpec("P")
R = TypeVar("R")


class Look(NamedTuple):
    """How a concept is told from the others of a figure."""

    color: str
    hatch: str


def look(position: int) -> Look:
    """The first 56 differ in colour or hatch, the first 7 in both."""
    return Look(PALETTE[position % 8], HATCHES[(position + position // 8) % 7])


class Sheet(Figure):
    """A figure laid out in points from its upper left corner. A notebook shows it without pyplot."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width / 72, height / 72), dpi=150, facecolor="white")
        FigureCanvasAgg(self)
        self.width, self.height = width, height
        self.suppressComposite = True  # pictures stay apart, at their own resolution, in SVG and PDF
        self.paper = self.add_axes(
            (0, 0, 1, 1), xlim=(0, width), ylim=(height, 0)
        )  # one for all: axes are slow to make
        self.paper.set_axis_off()

    def place(self, x: float, y: float, width: float, height: float, frame: bool = False) -> Axes:
        """Axes on a rectangle of the sheet; without a frame they are a bare canvas."""
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
        line = plain(text) if room is None else shorten(text, room, size, weight)
        return self.text(
            x / self.width, 1 - y / self.height, line, ha=align, va="top", fontsize=size, color=color,
            fontweight=weight, parse_math=False, usetex=False,
        )  # fmt: skip

    def swatch(self, x: float, y: float, side: float, style: Look) -> None:
        self.paper.add_patch(
            Rectangle((x, y), side, side, facecolor=style.color, edgecolor="white", hatch=style.hatch, linewidth=0)
        )

    def _repr_png_(self) -> bytes:
        return render(self, "png", 150)


def drawn(figure_function: Callable[P, R]) -> Callable[P, R]:
    """The figure looks the same whatever style the user has set. Only the fonts are theirs."""

    @wraps(figure_function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with matplotlib.rc_context(_style()):
            return figure_function(*args, **kwargs)

    return wrapper


def save(figure: Figure, path: str | PathLike[str], dpi: float = 300) -> Path:
    """Write a figure as .png, .svg or .pdf, whole or not at all. The same figure gives the same bytes."""
    path = Path(path)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in _METADATA:
        raise ValueError(f"{path.name}: figures are saved as .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} to save {path.name} in")
    write_atomically(path, render(figure, kind, dpi))
    return path


def render(figure: Figure, kind: str, dpi: float) -> bytes:
    buffer = BytesIO()
    # The salt makes the identifiers in an SVG the same every time; type 42 keeps text in a PDF text.
    with matplotlib.rc_context(_style() | {"svg.hashsalt": "pace", "pdf.fonttype": 42}):
        figure.savefig(buffer, format=kind, dpi=dpi, metadata=_METADATA[kind])
    return buffer.getvalue()


def plain(text: object) -> str:
    """One line that matplotlib can draw: no control characters, and □ for what no chosen font has."""
    line = str(text).encode("utf-8", "replace").decode()  # file names may hold lone surrogates
    line = " ".join(_INVISIBLE.sub("", line).split())
    return re.sub("□+", "□", "".join(c if c.isprintable() and _drawable(c, _families()) else "□" for c in line))


def shorten(text: object, room: float, size: float = BODY, weight: str = "normal") -> str:
    """As much of the text as fits into `room` points, with … where it was cut."""
    line = plain(text)
    if width_of(line, size, weight) <= room:
        return line
    low, high = 0, len(line)
    while low < high:
        middle = (low + high + 1) // 2
        if width_of(line[:middle].rstrip() + "…", size, weight) <= room:
            low = middle
        else:
            high = middle - 1
    return line[:low].rstrip() + "…"


def width_of(text: str, size: float = BODY, weight: str = "normal") -> float:
    """In points, wherever it is drawn."""
    font = FontProperties(size=size, weight=weight)
    ruler: Any = _ruler()
    return float(ruler.get_text_width_height_descent(text, font, ismath=False)[0]) / _SCALE * _HINTING


_SCALE = 8
_HINTING = 1.06  # fitted to the dots of a screen, letters are up to this much wider than in print


@lru_cache(1)
def _ruler() -> RendererAgg:
    return RendererAgg(1, 1, 72 * _SCALE)  # type: ignore[no-untyped-call]


def _families() -> tuple[str, ...]:
    return tuple(matplotlib.rcParams["font.family"])


@lru_cache(4096)
def _drawable(character: str, families: tuple[str, ...]) -> bool:
    fonts = (get_font(findfont(FontProperties(family=[family]))) for family in families)
    return any(font.get_char_index(ord(character)) for font in fonts)


def _style() -> Any:  # a dictionary whose type is one of every parameter's name
    foreign = (
        "font.",
        "backend",
        "webagg",
        "interactive",
        "toolbar",
        "timezone",
        "tk.",
        "date.",
        "animation.",
        "keymap.",
    )
    usual = {name: value for name, value in matplotlib.rcParamsDefault.items() if not name.startswith(foreign)}
    return usual | {
        "text.parse_math": False,
        "hatch.linewidth": 0.5,
        "axes.linewidth": 0.5,
        "axes.edgecolor": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.labelsize": SMALL,
        "ytick.labelsize": SMALL,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.major.width": 0.5,
        "ytick.major.width": 0.5,
        "xtick.major.size": 2.5,
        "ytick.major.size": 2.5,
    }
