"""Tables and figures of what `cost.py --out` wrote, put into the documentation.

    uv run python benchmarks/cost_page.py docs/assets/cost-cpu.csv docs/assets/cost-cuda.csv --page docs/scaling.md

The page's text between `<!-- cost -->` and `<!-- /cost -->` is written anew, with a part for every file. Figures go
beside the files.
"""

import argparse
import csv
import io
import os
from collections.abc import Iterable
from dataclasses import Field, asdict, dataclass, fields
from pathlib import Path
from typing import get_args

import numpy as np
from common import AUTHORS

from pace.atomic import write_atomically

AXES = {"images": "M", "concepts": "K", "dim": "d"}
COVARIANCES = ("full", "tied", "diag")
WAYS = {"pace": "PACE", "sklearn": "scikit-learn", "printed": "printed procedure", "limit": "limit"}
BEGIN, END = "<!-- cost -->", "<!-- /cost -->"


@dataclass
class Row:
    """One point: what was varied, where it lies, and the seconds of a pass each way took."""

    machine: str
    covariance: str
    varied: str
    images: int
    concepts: int
    dim: int
    processes: int = 1
    pace: float | None = None
    sklearn: float | None = None
    sklearn_images: int | None = None  # that were timed
    printed: float | None = None
    printed_images: int | None = None
    printed_sweeps: float | None = None  # of a batch, on average
    limit: float | None = None
    weights: float | None = None  # concepts that a patch has weight in, on average
    error: str = ""

    def times(self, way: str) -> float | None:
        """How many times PACE's seconds this way took."""
        took = getattr(self, way)
        return took / self.pace if took and self.pace else None

    def scaled(self, way: str) -> bool:
        return (getattr(self, f"{way}_images", None) or self.images) < self.images


def write(rows: list[Row], path: str | Path) -> None:
    lines = io.StringIO()
    table = csv.DictWriter(lines, [field.name for field in fields(Row)], lineterminator="\n")
    table.writeheader()
    table.writerows(asdict(row) for row in rows)  # floats as they are: the page says what the screen said
    write_atomically(Path(path), lines.getvalue().encode())


def read(path: str | Path) -> list[Row]:
    def value(field: Field, text: str) -> object:
        if text == "":
            return field.default
        kind = next(kind for kind in (str, int, float) if kind in (field.type, *get_args(field.type)))
        return kind(text)

    with open(path, encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    return [Row(**{field.name: value(field, row[field.name]) for field in fields(Row)}) for row in found]


def line(row: Row) -> str:
    """A point as it is told while the others are still being measured."""
    where = f"{row.covariance:4} M = {row.images:<5} K = {row.concepts:<4} d = {row.dim:<4} processes {row.processes}"
    took = [f"{name} {getattr(row, way):.4g} s" for way, name in WAYS.items() if getattr(row, way) is not None]
    extra = [] if row.printed_sweeps is None else [f"{row.printed_sweeps:.0f} printed sweeps"]
    return "  ".join([where, *took, *extra, row.error])


def report(rows: list[Row]) -> str:
    """Everything as Markdown."""
    return "\n\n".join(part for part in (ratios(rows), exponents(rows), processes(rows), rate(rows)) if part)


def ratios(rows: list[Row]) -> str:
    """A row for every point: PACE's seconds, and the others' in units of them."""
    titles = {"full": ("PACE, full", "sklearn", "printed", "limit"), "tied": ("PACE, tied", "sklearn", "limit")}
    titles["diag"] = ("PACE, diag", *titles["tied"][1:])
    places = {(row.images, row.concepts, row.dim): None for row in rows if row.varied in AXES}
    found = {(row.covariance, row.images, row.concepts, row.dim): row for row in rows if row.varied in AXES}
    cells = []
    for place in places:
        cells.append([f"{number:,}" for number in place])
        for covariance, names in titles.items():
            row = found.get((covariance, *place))
            if row is None:
                cells[-1] += ["–"] * len(names)
                continue
            cells[-1].append("failed" if row.pace is None else f"{row.pace:.2g} s")
            cells[-1] += [_times(row, way) for way in ("sklearn", "printed")[: len(names) - 2]]
            cells[-1].append(_share(row.times("limit")))
    return _table([*AXES.values(), *(name for names in titles.values() for name in names)], cells) if cells else ""


def exponents(rows: list[Row]) -> str:
    """How seconds grow with each number: the slope of a straight line through the logarithms."""
    cells = []
    for covariance in COVARIANCES:
        for way, name in WAYS.items():
            slopes = [_slope([row for row in rows if row.covariance == covariance], way, axis) for axis in AXES]
            if any(slope is not None for slope in slopes):
                cells.append([covariance, name, *("–" if slope is None else f"{slope:.2f}" for slope in slopes)])
    return _table(["covariance", "way", *AXES.values()], cells) if cells else ""


def processes(rows: list[Row]) -> str:
    cells = []
    for covariance in COVARIANCES:
        took = {r.processes: r.pace for r in rows if r.varied == "processes" and r.covariance == covariance and r.pace}
        for number, seconds in took.items():
            gain = f"{took[1] / number / seconds:.0%}" if 1 in took else "–"
            cells.append([covariance, str(number), f"{seconds:.2f} s", gain])
    return _table(["covariance", "processes", "an epoch", "efficiency"], cells) if cells else ""


def rate(rows: list[Row]) -> str:
    """Images a second where the authors' is known."""
    known = [row for row in rows if (row.concepts, row.dim) == (100, 25) and row.pace]
    told = [f"{row.images / row.pace:,.0f} ({row.covariance})" for row in known]
    plain = [f", the printed procedure in plain torch {row.images / row.printed:,.0f}" for row in known if row.printed]
    if not known:
        return ""
    return (
        f"K = 100, d = 25: PACE takes {', '.join(told)} images a second in two views{''.join(plain)}; "
        f"the authors' public code was reported at {AUTHORS:.0f} on an H200."
    )


def _slope(rows: list[Row], way: str, axis: str) -> float | None:
    some = [row for row in rows if row.varied == axis and getattr(row, way)]
    assumed = axis == "images" and any(row.scaled(way) for row in some)
    if len(some) < 2 or assumed:
        return None
    x, y = ([float(np.log(getattr(row, name))) for row in some] for name in (axis, way))
    return float(np.polyfit(x, y, 1)[0])


def _times(row: Row, way: str) -> str:
    times = row.times(way)
    return "–" if times is None else f"{'≈ ' * row.scaled(way)}{times:.2g}"


def _share(times: float | None) -> str:
    return "–" if times is None else f"{times:.2f}"


def _table(titles: list[str], cells: Iterable[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *cells]
    return "\n".join(f"| {' | '.join(cell)} |" for cell in lines)


def draw(rows: list[Row], picture: Path) -> None:
    """Seconds against M, K and d: a colour for each covariance, a line style for each way."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    styles = {"pace": ("-", "o", 2.0), "sklearn": ("--", "s", 1.2), "printed": (":", "^", 1.2), "limit": ("-", "", 0.8)}
    colours = dict(zip(COVARIANCES, ("C0", "C1", "C2"), strict=True))
    figure = Figure(figsize=(11, 4), layout="constrained")
    by_axis = {axis: [row for row in rows if row.varied == axis] for axis in AXES}
    shown = {axis: points for axis, points in by_axis.items() if points}
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, (axis, points) in zip(panels, shown.items(), strict=True):
        for covariance, colour in colours.items():
            for way, (style, marker, width) in styles.items():
                some = [row for row in points if row.covariance == covariance and getattr(row, way)]
                x, y = [getattr(row, axis) for row in some], [getattr(row, way) for row in some]
                axes.plot(x, y, style, color=colour, marker=marker, markersize=4, linewidth=width,
                          alpha=0.4 if way == "limit" else 1)  # fmt: skip
        ticks = sorted({getattr(row, axis) for row in points})
        held = ", ".join(f"{AXES[other]} = {getattr(points[0], other):,}" for other in AXES if other != axis)
        axes.set(xscale="log", yscale="log", xlabel=AXES[axis], title=held)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
        axes.minorticks_off()
        axes.grid(alpha=0.2)
    figure.axes[0].set_ylabel("seconds of one pass")
    keys = [Line2D([], [], color=colour, label=covariance) for covariance, colour in colours.items()]
    for way, (style, marker, width) in styles.items():
        keys.append(
            Line2D([], [], color="0.3", linestyle=style, marker=marker, markersize=4, linewidth=width, label=WAYS[way])
        )
    figure.legend(handles=keys, loc="outside right center", fontsize=8)
    figure.savefig(picture, metadata={"Date": None})


def section(path: Path, page: Path) -> str:
    rows, picture = read(path), path.with_suffix(".svg")
    draw(rows, picture)
    link = Path(os.path.relpath(picture, page.parent)).as_posix()
    failed = [f"- {line(row)}" for row in rows if row.error]
    machine = rows[0].machine
    shown = f"![Seconds of one pass against M, K and d, {machine}]({link})"
    parts = [f"### {machine}", shown, report(rows), *failed]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--page", type=Path, default=Path("docs/scaling.md"))
    arguments = parser.parse_args()
    before, begin, rest = arguments.page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{arguments.page} has no {BEGIN} … {END}")
    sections = "\n\n".join(section(path, arguments.page) for path in arguments.files)
    write_atomically(arguments.page, f"{before}{begin}\n\n{sections}\n\n{end}{after}".encode())
    print(f"wrote {arguments.page}")


if __name__ == "__main__":
    main()
