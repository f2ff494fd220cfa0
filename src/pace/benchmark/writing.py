"""Results as JSON, CSV, Markdown, a page for the documentation, and tables for the terminal."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pace.atomic import write_atomically
from pace.benchmark.results import Results
from pace.benchmark.tables import Cell, Table, exposed, exposing_tables, printed, table_1, table_2, time_table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_CSV_HEAD = [
    *("dataset", "method", "name", "backbone", "metric", "value", "low", "high", "spread"),
    *("runs", "better", "paper", "images_per_second", "failed"),
]


def write_results(results: Results, folder: Path) -> None:
    """Write results.json, results.csv and the page results.md, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results.as_dict(), indent=1, default=str, allow_nan=False)
    write_atomically(folder / "results.json", text.encode())
    write_atomically(folder / "results.csv", as_csv(results).encode("utf-8", "replace"))
    write_atomically(folder / "results.md", as_page(results).encode("utf-8", "replace"))


def all_tables(results: Results) -> list[Table]:
    exposing = [table for dataset in results.datasets for table in exposing_tables(results, dataset)]
    return [table_1(results), table_2(results), *exposing, time_table(results)]


def as_csv(results: Results) -> str:
    """A line for every score, and one without a metric for every method that failed."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _CSV_HEAD, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in results.rows:
        backbone = results.about.get(row.dataset, {}).get("backbone", {}).get("name")
        method = {"method": row.method.label, "name": row.method.name, "backbone": backbone}
        if row.scores is None:
            writer.writerow({**vars(row), **method, "spread": None})
            continue
        for metric, score in row.scores.items():
            paper = printed(row.method.printed_as, metric, row.dataset)
            more = {"metric": metric, "spread": row.spread.get(metric), "paper": paper}
            writer.writerow({**vars(row), **vars(score), **method, **more})
    return text.getvalue()


def as_markdown(table: Table) -> str:
    head = [_line(map(_plain, table.head)), _line(["---", *["---:"] * (len(table.head) - 1)])]
    lines = [f"### {_plain(table.title)}", "", *head, *(_line(map(_cell, row)) for row in table.rows)]
    notes = list(table.notes)
    if any(cell.interval for row in table.rows for cell in row):
        notes.append("In brackets: 95 % bootstrap intervals over images.")
    return "\n".join([*lines, "", *(_plain(note) + "  " for note in notes)]).rstrip()


def as_page(results: Results) -> str:
    """A page to read: models, all tables, and where scores mislead."""
    parts = ["# Benchmark results", _models(results), *map(as_markdown, all_tables(results))]
    lines = [f"- {_plain(name)}: {_plain(line)}" for name in results.datasets for line in exposed(results, name)]
    if lines:
        parts.append("Where scores mislead:\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def as_rich(table: Table) -> RichTable:
    """For a terminal; without intervals, for which no screen is wide enough."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(title=table.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, title in enumerate(table.head):
        shown.add_column(Text(title), justify="right" if number else "left")
    styles = {"best": "bold", "second": "underline", None: ""}
    for row in table.rows:
        shown.add_row(*(Text.assemble((cell.text, styles[cell.mark]), _bracketed(cell.paper)) for cell in row))
    return shown


def _models(results: Results) -> str:
    lines = []
    for dataset, about in results.about.items():
        backbone = about["backbone"]
        lines.append(
            f"- {_plain(dataset)}: {_plain(backbone['name'])}, {_plain(backbone['training'])}; "
            f"{about['train_images']:,} training and {about['test_images']:,} test images, "
            f"{about['tokens']} tokens of {backbone['d']} dimensions; {about['test_accuracy']:.1%} test accuracy; "
            f"{about['prediction_survival']:.1%} of predictions survive the perturbation"
        )
    return "The models explained (every option and the machine are in results.json):\n\n" + "\n".join(lines)


def _cell(cell: Cell) -> str:
    wrap = {"best": "**{}**", "second": "<u>{}</u>", None: "{}"}[cell.mark]
    return wrap.format(_plain(cell.text)) + _bracketed(_plain(cell.paper)) + _bracketed(_plain(cell.interval))


def _bracketed(text: str) -> str:
    return f" ({text})" if text else ""


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: object) -> str:
    """Text of files and errors, escaped for Markdown and HTML."""
    escaped = str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for sign in "\\`*_|[]":
        escaped = escaped.replace(sign, f"\\{sign}")
    return " ".join(escaped.split())
