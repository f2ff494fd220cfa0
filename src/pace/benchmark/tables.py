"""Results as tables: the paper's Tables 1 and 2, and the scores that show where these mislead."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from pace.benchmark.methods import Method
from pace.benchmark.results import Results, Row
from pace.metrics.declare import METRICS
from pace.metrics.scores import Better

Mark = Literal["best", "second"]

DESIDERATA = ("faithfulness", "stability", "sparsity")  # those with a number per dataset
_DATASETS = {"color": "Color", "flower": "Flower", "cars": "Cars", "cub": "CUB"}  # the paper's
_LEVELS = {3: "Full", 2: "Partial"}
_NOTHING, _WARNED = "–", " ⚠"

# The scores that show where those of Table 1 mislead, by table, in reading order.
_EXPOSING = {
    "the image level": (
        "logit_fidelity", "fidelity_over_random", "faithfulness_given_prediction", "nonlinear_faithfulness", "class_echo",
        "stability_ratio", "stability_when_prediction_holds", "reidentification", "between_images", "hoyer_sparsity",
        "effective_concepts", "leading_share",
    ),
    "the patch level": (
        "within_image_information", "information_over_attention", "warp_agreement", "warp_gain",
        "warp_gain_over_attention", "leading_area", "leading_attention", "concepts_per_image", "cls_weight",
        "seeds_alike", "reconstruction", "live_concepts", "colour_recovery", "colour_accuracy", "part_recovery",
        "kind_accuracy", "part_consistency", "part_consistency_by_position", "part_ari",
    ),
    "hiding concepts": (
        "concept_effect", "effect_by_lot", "gain_over_lot", "effect_by_attention", "gain_over_attention",
        "main_concept_loss", "importance_agreement", "deletion", "insertion",
    ),
}  # fmt: skip


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


@cache
def published() -> dict[str, Any]:
    """The numbers printed in the paper, and their source."""
    return dict(json.loads(files("pace.benchmark").joinpath("published.json").read_text(encoding="utf-8")))


def printed(method: str, metric: str, dataset: str) -> float | None:
    """The number in Table 1 for a method under the paper's name for it; None where there is none."""
    found = published()["table_1"].get(method, {}).get(metric)
    return found.get(dataset) if isinstance(found, dict) else found if isinstance(found, int) else None


def printed_average(method: str, metric: str, datasets: Sequence[str]) -> float | None:
    """The number in Table 2 if these are the paper's four datasets, otherwise the mean of those in Table 1."""
    if set(datasets) == _DATASETS.keys():
        found: float | None = published()["table_2"].get(method, {}).get(metric)
        return found
    return _mean([printed(method, metric, dataset) for dataset in datasets])


def marks(values: Sequence[float | None], better: Better | None) -> list[Mark | None]:
    """Which values are best and second best to two digits. Ties share a place, as in the paper: two best leave no second."""
    rounded = [None if value is None else float(_short(value)) for value in values]
    ranked = sorted(_known(rounded), reverse=better == "higher") if better else []
    places: dict[float | None, Mark] = {}
    places.update(dict.fromkeys(ranked[1:2], "second"))
    places.update(dict.fromkeys(ranked[:1], "best"))  # also where the second is equal
    return [places.get(value) for value in rounded]


def table_1(results: Results) -> Table:
    """The five desiderata, with the paper's numbers in brackets."""
    methods = results.methods
    warned = {row.method.label for row in results.rows if row.warnings}
    columns = {"Method": [Cell(method.title + (_WARNED if method.label in warned else "")) for method in methods]}
    for metric in DESIDERATA:
        for dataset in results.datasets:
            rows = [results.row(dataset, method.label) for method in methods]
            paper = [printed(method.printed_as, metric, dataset) for method in methods]
            cells = _column(methods, _values(rows, metric), metric, paper)
            columns[f"{_titled(metric)} {_dataset(dataset)}"] = [
                replace(cell, text="failed") if row and row.failed else cell
                for cell, row in zip(cells, rows, strict=True)
            ]
    columns["Multi-level"] = [_levels(results, method) for method in methods]
    concepts = [next(iter(_known(_values(results.of_method(method), "n_concepts"))), None) for method in methods]
    paper = [printed(method.printed_as, "n_concepts", "") for method in methods]
    columns[_titled("n_concepts")] = _column(methods, concepts, "n_concepts", paper, digits=0)
    notes = [
        f"In brackets the paper's numbers, with {published()['backbone']}: {published()['source']}.",
        "Best in bold, second best underlined, among the methods that compete; references do not.",
    ]
    if warned:
        notes.append(
            f"{_WARNED.strip()} the scores mislead on at least one dataset; the lines below the tables say how."
        )
    return _table("Table 1", columns, notes)


def table_2(results: Results) -> Table:
    """Averages over the datasets, for methods with a score on each."""
    methods, datasets = results.methods, results.datasets
    columns = {"Method": [Cell(method.title) for method in methods]}
    for metric in DESIDERATA:
        averages = [_mean(_values(results.of_method(method), metric)) for method in methods]
        paper = [printed_average(method.printed_as, metric, datasets) for method in methods]
        columns[_titled(metric)] = _column(methods, averages, metric, paper)
    over = ", ".join(map(_dataset, datasets))
    return _table("Table 2", columns, [f"Averages over {over}; in brackets the paper's over the same."])


def exposing_tables(results: Results, dataset: str) -> list[Table]:
    """For one dataset, the scores that show where the others mislead, with intervals."""
    tables = []
    for title, metrics in _EXPOSING.items():
        rows = [row for row in results.of_dataset(dataset) if not {*metrics}.isdisjoint(row.scores or ())]
        columns = {"Method": [Cell(row.method.title + (_WARNED if row.warnings else "")) for row in rows]}
        for metric in metrics:
            values = _values(rows, metric)
            if _known(values):
                cells = _column([row.method for row in rows], values, metric)
                columns[_titled(metric)] = [
                    replace(cell, interval=_interval(row, metric)) for cell, row in zip(cells, rows, strict=True)
                ]
        if rows:
            tables.append(_table(f"{_dataset(dataset)}: {title}", columns))
    return tables


def exposed(results: Results, dataset: str) -> list[str]:
    """A line for every row that failed, whose scores mislead, or that has a note."""
    lines = []
    for row in results.of_dataset(dataset):
        said = [f"failed: {row.failed}"] if row.failed else list(row.warnings)
        if row.note:
            said.append(f"{row.note}.")
        if row.spread:
            spread = [
                f"{METRICS[name].title.lower()} {row.spread[name]:.3f}" for name in DESIDERATA if name in row.spread
            ]
            said.append(f"Means of {row.runs} runs; their standard deviations are {', '.join(spread)}.")
        lines += [f"{row.method.title}: {' '.join(said)}"] if said else []
    return lines


def time_table(results: Results) -> Table:
    """Seconds of every row and image-level explanations per second, from when it was computed."""
    rows = [row for row in results.rows if row.scores is not None]
    columns = {"Dataset": [Cell(_dataset(row.dataset)) for row in rows]}
    columns["Method"] = [Cell(row.method.title) for row in rows]
    for stage in ("fit", "explain", "score"):
        columns[f"{stage.title()}, seconds"] = [Cell(f"{row.seconds[stage]:.1f}") for row in rows]
    columns["Images per second"] = [Cell(f"{row.images_per_second:,.0f}") for row in rows]
    return _table("Time", columns)


def _table(title: str, columns: dict[str, list[Cell]], notes: Iterable[str] = ()) -> Table:
    return Table(title, list(columns), [list(row) for row in zip(*columns.values(), strict=True)], list(notes))


def _column(
    methods: Sequence[Method],
    values: Sequence[float | None],
    metric: str,
    paper: Sequence[float | None] | None = None,
    digits: int = 2,
) -> list[Cell]:
    """Values with the best of those that compete marked, and the paper's numbers."""
    competing = [None if method.is_reference else value for method, value in zip(methods, values, strict=True)]
    places = marks(competing, METRICS[metric].better)
    return [
        Cell(_NOTHING if value is None else _short(value, digits), mark, "" if known is None else _short(known, digits))
        for value, mark, known in zip(values, places, paper or [None] * len(values), strict=True)
    ]


def _values(rows: Iterable[Row | None], metric: str) -> list[float | None]:
    return [None if row is None else row.value(metric) for row in rows]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float | None]) -> float | None:
    """None unless all are known."""
    known = _known(values)
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _levels(results: Results, method: Method) -> Cell:
    """The fewest levels it showed on any dataset."""
    known = _known(_values(results.of_method(method), "levels"))
    paper = published()["table_1"].get(method.printed_as, {}).get("levels", "")
    return Cell(_LEVELS.get(int(min(known)), "No") if known else _NOTHING, paper=paper)


def _titled(metric: str) -> str:
    arrow = {"higher": " ↑", "lower": " ↓", None: ""}[METRICS[metric].better]
    return METRICS[metric].title + arrow


def _dataset(name: str) -> str:
    return _DATASETS.get(name, name)


def _short(value: float, digits: int = 2) -> str:
    """Halves are rounded up, as in the paper (0.105 is 0.11), in spite of binary fractions."""
    return f"{value + 1e-9:.{0 if abs(value) >= 100 else digits}f}"


def _interval(row: Row, metric: str) -> str:
    if row.scores is None or metric not in row.scores:
        return ""
    low, high = row.scores[metric].low, row.scores[metric].high
    return "" if low is None or high is None else f"{_short(low)} to {_short(high)}"
