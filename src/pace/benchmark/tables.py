"""Results as tables: the paper's Tables 1 and 2, and the scores that show where these mislead."""

from __future__ import annotations

from collections.abc import Sequence
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

# The scores that show where those of Table 1 mislead, in reading order.
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
    """Which values are best and second best to two digits. Ties share a place, as in the paper: two best leave no second."""
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
    """The five desiderata, with the paper's numbers in brackets."""
    methods, datasets = results.methods, results.datasets
    columns: list[list[Cell]] = []
    head = ["Method"]
    for metric in DESIDERATA:
        for dataset in datasets:
            head.append(f"{_titled(metric)} {_dataset(dataset)}")
            rows = [results.row(dataset, method.label) for method in methods]
            paper = [printed(method.printed_as, metric, dataset) for method in methods]
            columns.append(_column(methods, _values(rows, metric), METRICS[metric].better, rows, paper))
    head += ["Multi-level", _titled("n_concepts")]
    columns.append([_levels(results, method) for method in methods])
    concepts = [next(iter(_known(results, method, "n_concepts")), None) for method in methods]
    paper = [printed(method.printed_as, "n_concepts", "") for method in methods]
    columns.append(_column(methods, concepts, "lower", paper=paper, digits=0))
    warned = {row.method.label for row in results.rows if row.warnings}
    names = [Cell(method.title + (_WARNED if method.label in warned else "")) for method in methods]
    notes = [
        f"In brackets the paper's numbers, with {published()['backbone']}: {published()['source']}.",
        "Best in bold, second best underlined, among the methods that compete; references do not.",
    ]
    if warned:
        notes.append(
            f"{_WARNED.strip()} the scores mislead on at least one dataset; the lines below the tables say how."
        )
    return Table("Table 1", head, [list(row) for row in zip(names, *columns, strict=True)], notes)


def table_2(results: Results) -> Table:
    """Averages over the datasets, for methods with a score on each."""
    methods, datasets = results.methods, results.datasets
    columns = []
    for metric in DESIDERATA:
        found = [_known(results, method, metric) for method in methods]
        averages = [sum(values) / len(values) if len(values) == len(datasets) else None for values in found]
        paper = [printed_average(method.printed_as, metric, datasets) for method in methods]
        columns.append(_column(methods, averages, METRICS[metric].better, paper=paper))
    head = ["Method", *map(_titled, DESIDERATA)]
    rows = [[Cell(method.title), *cells] for method, *cells in zip(methods, *columns, strict=True)]
    over = ", ".join(map(_dataset, datasets))
    return Table("Table 2", head, rows, [f"Averages over {over}; in brackets the paper's over the same."])


def exposing_tables(results: Results, dataset: str) -> list[Table]:
    """For one dataset, the scores that show where the others mislead, with intervals, and the speed."""
    rows, titled = results.of_dataset(dataset), _dataset(dataset)
    image = _scores_table(f"{titled}: what exposes the scores", rows, IMAGE_LEVEL)
    image.head.extend(["Images per second", "Fit, seconds"])
    for cells, row in zip(image.rows, rows, strict=True):
        speed = _NOTHING if row.images_per_second is None else f"{row.images_per_second:,.0f}"
        cells += [Cell(speed), Cell(f"{row.seconds['fit']:.1f}" if "fit" in row.seconds else _NOTHING)]
    with_patches = [row for row in rows if any(row.value(metric) is not None for metric in PATCH_LEVEL)]
    patch = _scores_table(f"{titled}: the patch level", with_patches, PATCH_LEVEL)
    return [image, patch] if patch.rows else [image]


def exposed(results: Results, dataset: str) -> list[str]:
    """A line for every row that failed, whose scores mislead, or that has notes."""
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
    """Seconds of every stage; for a method also their parts, from when it was computed."""
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
    """How long every dataset took from beginning to end, in the run that its model is from."""
    known = {dataset: about for dataset, about in results.about.items() if "seconds" in about}
    if not known:
        return []
    each = [
        f"{_dataset(dataset)} {duration(about['seconds'], 1)}" + (" (resumed)" if about["resumed"] else "")
        for dataset, about in known.items()
    ]
    total = sum(about["seconds"] for about in known.values())
    return [f"From beginning to end: {', '.join(each)}; {duration(total, 1)} in all."]


def _scores_table(title: str, rows: Sequence[Row], metrics: Sequence[str]) -> Table:
    there = [metric for metric in metrics if any(row.value(metric) is not None for row in rows)]
    methods = [row.method for row in rows]
    columns = []
    for metric in there:
        cells = _column(methods, _values(rows, metric), METRICS[metric].better, rows)
        scores = [None if row.scores is None else row.scores.get(metric) for row in rows]
        columns.append([replace(cell, interval=_interval(score)) for cell, score in zip(cells, scores, strict=True)])
    names = [Cell(row.method.title + (_WARNED if row.warnings else "")) for row in rows]
    body = [list(cells) for cells in zip(names, *columns, strict=True)]
    return Table(title, ["Method", *map(_titled, there)], body, [])


def _column(
    methods: Sequence[Method],
    values: Sequence[float | None],
    better: Better | None,
    rows: Sequence[Row | None] | None = None,
    paper: Sequence[float | None] | None = None,
    digits: int = 2,
) -> list[Cell]:
    """Values with the best of those that compete marked, and the paper's numbers."""
    competing = [None if method.is_reference else value for method, value in zip(methods, values, strict=True)]
    cells = []
    for number, (value, mark) in enumerate(zip(values, marks(competing, better), strict=True)):
        row = rows[number] if rows else None
        text = _FAILED if row is not None and row.failed else _NOTHING
        in_paper = paper[number] if paper else None
        cells.append(
            Cell(
                text if value is None else _short(value, digits),
                mark,
                "" if in_paper is None else _short(in_paper, digits),
            )
        )
    return cells


def _values(rows: Sequence[Row | None], metric: str) -> list[float | None]:
    return [None if row is None else row.value(metric) for row in rows]


def _known(results: Results, method: Method, metric: str) -> list[float]:
    """Its values on the datasets where it has one."""
    found = _values([results.row(dataset, method.label) for dataset in results.datasets], metric)
    return [value for value in found if value is not None]


def _levels(results: Results, method: Method) -> Cell:
    """The fewest levels it showed on any dataset."""
    known = _known(results, method, "levels")
    paper = published()["table_1"].get(method.printed_as, {}).get("levels", "")
    return Cell(_LEVELS.get(int(min(known)), "No") if known else _NOTHING, paper=paper)


def _titled(metric: str) -> str:
    declared = METRICS[metric]
    arrow = {"higher": " ↑", "lower": " ↓", None: ""}[declared.better]
    return declared.title + arrow


def _dataset(name: str) -> str:
    return TITLES.get(name, name)


def _short(value: float, digits: int = 2) -> str:
    """Halves are rounded up, as in the paper (0.105 is 0.11), in spite of binary fractions."""
    return f"{value + 1e-9:.{0 if abs(value) >= 100 else digits}f}"


def _interval(score: Score | None) -> str:
    if score is None or score.low is None or score.high is None:
        return ""
    return f"{_short(score.low)} to {_short(score.high)}"
