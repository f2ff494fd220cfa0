"""Results as tables: the paper's Tables 1 and 2, and the columns without which these can be fooled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pace.benchmark.methods import Method
from pace.benchmark.published import DESIDERATA, printed, printed_average, published
from pace.benchmark.results import Results, Row
from pace.metrics import Score
from pace.metrics.declare import METRICS
from pace.metrics.scores import Better

Mark = Literal["best", "second"]

TITLES = {"color": "Color", "flower": "Flower", "cars": "Cars", "cub": "CUB"}
_LEVELS = {3: "Full", 2: "Partial"}
_FAILED, _NOTHING = "failed", "–"
_WARNED = " ⚠"

# What exposes the paper's scores, in the order in which it is best read. The paper's own are in Table 1.
IMAGE_LEVEL = (
    "stability_ratio",
    "stability_when_prediction_holds",
    "reidentification",
    "between_images",
    "faithfulness_given_prediction",
    "nonlinear_faithfulness",
    "class_echo",
    "hoyer_sparsity",
    "effective_concepts",
)
PATCH_LEVEL = (
    "concepts_per_image",
    "patch_variety",
    "cls_weight",
    "deletion",
    "insertion",
    "colour_recovery",
    "colour_accuracy",
    "part_consistency",
)


@dataclass(frozen=True)
class Cell:
    text: str
    mark: Mark | None = None
    paper: str = ""  # what the paper prints
    interval: str = ""


@dataclass(frozen=True)
class Table:
    title: str
    head: list[str]
    rows: list[list[Cell]]
    notes: list[str]


def marks(values: Sequence[float | None], better: Better | None) -> list[Mark | None]:
    """Which values are best and second best as printed, to two digits. Equal ones share a place, as in the paper: two that
    are best leave no second."""
    if better is None:
        return [None] * len(values)
    rounded = [None if value is None else float(_short(value)) for value in values]
    known = sorted((value for value in rounded if value is not None), reverse=better == "higher")
    best = known[0] if known else None
    second = known[1] if len(known) > 1 and known[1] != best else None

    def mark(value: float | None) -> Mark | None:
        if value is None:
            return None
        return "best" if value == best else "second" if value == second else None

    return [mark(value) for value in rounded]


def table_1(results: Results) -> Table:
    """The five desiderata, ours and what the paper prints in brackets."""
    methods, datasets = results.methods, results.datasets
    columns: list[list[Cell]] = []
    head = ["Method"]
    for metric in DESIDERATA:
        for dataset in datasets:
            head.append(f"{_titled(metric)} {_dataset(dataset)}")
            values = [_value(results.row(dataset, method.label), metric) for method in methods]
            failed = [_failed(results.row(dataset, method.label)) for method in methods]
            paper = [printed(method.printed_as, metric, dataset) for method in methods]
            columns.append(_beside(_column(methods, values, METRICS[metric].better, failed), paper))
    head += ["Multi-level", f"{_titled('n_concepts')}"]
    columns.append([_levels(results, method) for method in methods])
    concepts = [_first(results, method, "n_concepts") for method in methods]
    paper = [printed(method.printed_as, "n_concepts", "") for method in methods]
    columns.append(_beside(_column(methods, concepts, "lower", digits=0), paper, digits=0))
    names = [Cell(method.title + _warned(results, method)) for method in methods]
    notes = [
        f"In brackets what the paper prints, with {published()['backbone']}: {published()['source']}.",
        "Best in bold, second best underlined, among the methods that compete; reference lines do not.",
    ]
    if any(_warned(results, method) for method in methods):
        notes.append(f"{_WARNED.strip()} the scores mislead on at least one dataset; see what exposes it below.")
    return Table("Table 1", head, [list(row) for row in zip(names, *columns, strict=True)], notes)


def table_2(results: Results) -> Table:
    """Averages over the datasets, of the methods that have a score on each."""
    methods, datasets = results.methods, results.datasets
    columns = []
    for metric in DESIDERATA:
        averages = [average(results, method.label, metric) for method in methods]
        paper = [printed_average(method.printed_as, metric, datasets) for method in methods]
        columns.append(_beside(_column(methods, averages, METRICS[metric].better), paper))
    head = ["Method", *(_titled(metric) for metric in DESIDERATA)]
    rows = [[Cell(method.title), *cells] for method, *cells in zip(methods, *columns, strict=True)]
    over = ", ".join(map(_dataset, datasets))
    return Table("Table 2", head, rows, [f"Averages over {over}; in brackets the paper's over the same."])


def average(results: Results, label: str, metric: str) -> float | None:
    values = [_value(results.row(dataset, label), metric) for dataset in results.datasets]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def exposing_tables(results: Results, dataset: str) -> list[Table]:
    """The scores that expose the others, with intervals, and the speed, for one dataset."""
    rows, titled = results.of_dataset(dataset), _dataset(dataset)
    image = _scores_table(f"{titled}: what exposes the scores", rows, IMAGE_LEVEL)
    speed = [Cell(_speed(row)) for row in rows]
    fit = [Cell(f"{row.seconds['fit']:.1f}" if "fit" in row.seconds else _NOTHING) for row in rows]
    image = Table(
        image.title,
        [*image.head, "Images a second", "Fit, seconds"],
        [[*cells, *more] for cells, *more in zip(image.rows, speed, fit, strict=True)],
        image.notes,
    )
    patch = _scores_table(f"{titled}: the patch level", [row for row in rows if _has_patches(row)], PATCH_LEVEL)
    return [image, patch] if patch.rows else [image]


def exposed(results: Results, dataset: str) -> list[str]:
    """A line for every row that failed, that scores mislead about, or that had something to note."""
    lines = []
    for row in results.of_dataset(dataset):
        said = [f"failed: {row.failed}"] if row.failed else [*row.warnings, *(f"{note}." for note in row.notes)]
        if row.spread:
            spread = [
                f"{METRICS[name].title.lower()} {row.spread[name]:.3f}" for name in DESIDERATA if name in row.spread
            ]
            said.append(f"Means of {row.runs} runs; their standard deviations are {', '.join(spread)}.")
        lines += [f"{row.method.title}: {' '.join(said)}"] if said else []
    return lines


def stage_table(results: Results) -> Table:
    """Seconds of every stage; of a method also what they went into, when it was computed."""
    parts = ("fit", "explain", "score")
    rows = []
    for stage in results.stages:
        row = results.row(stage.dataset, stage.name)
        spent = {} if row is None else row.seconds
        cells = [_dataset(stage.dataset), stage.name, "done before" if stage.cached else f"{stage.seconds:.1f}"]
        rows.append([*map(Cell, cells), *(Cell(f"{spent[part]:.1f}" if part in spent else "") for part in parts)])
    total = sum(stage.seconds for stage in results.stages)
    rows.append([*map(Cell, ("all", "", f"{total:.1f}")), *[Cell("")] * len(parts)])
    return Table("Time", ["Dataset", "Stage", "Seconds", *map(str.title, parts)], rows, _times(results))


def duration(seconds: float, digits: int = 0) -> str:
    return f"{seconds:.{digits}f} s" if seconds < 90 else f"{seconds / 60:.{digits}f} min"


def _times(results: Results) -> list[str]:
    """How long every dataset took from beginning to end, in the run that its model is of. Older results do not know."""
    known = {dataset: about for dataset, about in results.about.items() if "seconds" in about}
    if not known:
        return []
    each = [
        f"{_dataset(dataset)} {duration(about['seconds'], 1)}"
        + (" (going on from an earlier run)" if about["resumed"] else "")
        for dataset, about in known.items()
    ]
    total = sum(about["seconds"] for about in known.values())
    return [f"From beginning to end: {', '.join(each)}; {duration(total, 1)} in all."]


def _scores_table(title: str, rows: Iterable[Row], metrics: Sequence[str]) -> Table:
    rows = list(rows)
    there = [metric for metric in metrics if any(row.value(metric) is not None for row in rows)]
    methods = [row.method for row in rows]
    columns = []
    for metric in there:
        scores = [None if row.scores is None else row.scores.get(metric) for row in rows]
        values = [None if score is None else score.value for score in scores]
        failed = [_failed(row) for row in rows]
        cells = _column(methods, values, METRICS[metric].better, failed)
        intervals = ["" if score is None else _interval(score) for score in scores]
        columns.append([replace(cell, interval=ends) for cell, ends in zip(cells, intervals, strict=True)])
    names = [Cell(row.method.title + (_WARNED if row.warnings else "")) for row in rows]
    body = [list(cells) for cells in zip(names, *columns, strict=True)]
    return Table(title, ["Method", *map(_titled, there)], body, [])


def _column(
    methods: Sequence[Method],
    values: Sequence[float | None],
    better: Better | None,
    failed: Sequence[bool] | None = None,
    digits: int = 2,
) -> list[Cell]:
    """Values with the marks of those that compete."""
    competing = [None if method.is_reference else value for method, value in zip(methods, values, strict=True)]
    cells = []
    broken = failed or [False] * len(values)
    for value, mark, wrong in zip(values, marks(competing, better), broken, strict=True):
        empty = _FAILED if wrong else _NOTHING
        cells.append(Cell(empty if value is None else _short(value, digits), mark))
    return cells


def _beside(cells: Sequence[Cell], paper: Sequence[float | None], digits: int = 2) -> list[Cell]:
    """The same with what the paper prints."""
    texts = ["" if value is None else _short(value, digits) for value in paper]
    return [replace(cell, paper=text) for cell, text in zip(cells, texts, strict=True)]


def _value(row: Row | None, metric: str) -> float | None:
    return None if row is None else row.value(metric)


def _failed(row: Row | None) -> bool:
    return row is not None and row.failed is not None


def _first(results: Results, method: Method, metric: str) -> float | None:
    values = (_value(results.row(dataset, method.label), metric) for dataset in results.datasets)
    return next((value for value in values if value is not None), None)


def _levels(results: Results, method: Method) -> Cell:
    """The fewest levels it showed on any dataset."""
    found = [_value(results.row(dataset, method.label), "levels") for dataset in results.datasets]
    known = [value for value in found if value is not None]
    paper = published()["table_1"].get(method.printed_as, {}).get("levels", "")
    return Cell(_LEVELS.get(int(min(known)), "No") if known else _NOTHING, paper=paper)


def _warned(results: Results, method: Method) -> str:
    rows = (results.row(dataset, method.label) for dataset in results.datasets)
    return _WARNED if any(row is not None and row.warnings for row in rows) else ""


def _has_patches(row: Row) -> bool:
    return any(row.value(metric) is not None for metric in PATCH_LEVEL)


def _titled(metric: str) -> str:
    declared = METRICS[metric]
    arrow = {"higher": " ↑", "lower": " ↓", None: ""}[declared.better]
    return declared.title + arrow


def _dataset(name: str) -> str:
    return TITLES.get(name, name)


def _short(value: float, digits: int = 2) -> str:
    """Halves are rounded up, as the paper does it (0.105 is 0.11), and as they are not by binary fractions."""
    return f"{value + 1e-9:.{0 if abs(value) >= 100 else digits}f}"


def _interval(score: Score) -> str:
    return "" if score.low is None or score.high is None else f"{_short(score.low)} to {_short(score.high)}"


def _speed(row: Row) -> str:
    return _NOTHING if row.images_per_second is None else f"{row.images_per_second:,.0f}"
