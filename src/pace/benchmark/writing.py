"""Results as JSON, CSV, Markdown, a page for the documentation, and tables for the terminal."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pace.atomic import write_atomically
from pace.benchmark.published import printed
from pace.benchmark.results import Results
from pace.benchmark.tables import Cell, Table, exposed, exposing_tables, stage_table, table_1, table_2

if TYPE_CHECKING:
    from rich.table import Table as RichTable

_CSV_HEAD = [
    *("dataset", "method", "name", "backbone", "metric", "value", "low", "high", "spread"),
    *("runs", "better", "paper", "images_per_second", "failed"),
]


def write_results(results: Results, folder: Path) -> None:
    """Write results.json, results.csv, tables.md and the page results.md, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(
        folder / "results.json", json.dumps(results.as_dict(), indent=1, default=str, allow_nan=False).encode()
    )
    write_atomically(folder / "results.csv", as_csv(results).encode())
    write_atomically(folder / "tables.md", _join(map(as_markdown, all_tables(results))).encode())
    write_atomically(folder / "results.md", as_page(results).encode())


def all_tables(results: Results) -> list[Table]:
    exposing = [table for dataset in results.datasets for table in exposing_tables(results, dataset)]
    return [table_1(results), table_2(results), *exposing, stage_table(results)]


def as_csv(results: Results) -> str:
    """A line for every score, and one without a metric for every method that failed."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _CSV_HEAD, lineterminator="\n")
    writer.writeheader()
    for row in results.rows:
        about = results.about.get(row.dataset, {}).get("backbone", {})
        common = {
            "dataset": row.dataset,
            "method": row.method.label,
            "name": row.method.name,
            "backbone": about.get("name"),
            "runs": row.runs,
            "images_per_second": row.images_per_second,
            "failed": row.failed,
        }
        if row.scores is None:
            writer.writerow(common)
            continue
        for name, score in row.scores.items():
            figures = {"metric": name, "value": score.value, "low": score.low, "high": score.high}
            more = {"spread": row.spread.get(name), "better": score.better}
            paper = printed(row.method.printed_as, name, row.dataset)
            writer.writerow({**common, **figures, **more, "paper": paper})
    return text.getvalue()


def as_markdown(table: Table) -> str:
    lines = [
        f"### {_plain(table.title)}",
        "",
        _line(map(_plain, table.head)),
        _line(["---", *["---:"] * (len(table.head) - 1)]),
    ]
    lines += [_line(map(_cell, row)) for row in table.rows]
    notes = list(table.notes)
    if any(cell.interval for row in table.rows for cell in row):
        notes.append("In brackets: 95 % bootstrap intervals over images.")
    return "\n".join([*lines, "", *(_plain(note) + "  " for note in notes)]).rstrip()


def as_page(results: Results) -> str:
    """A page for the documentation."""
    parts = ["# Benchmark results", _models(results), _settings(results)]
    parts += [as_markdown(table_1(results)), as_markdown(table_2(results))]
    for dataset in results.datasets:
        parts += map(as_markdown, exposing_tables(results, dataset))
        lines = exposed(results, dataset)
        if lines:
            parts.append("Where scores mislead:\n\n" + "\n".join(f"- {_plain(line)}" for line in lines))
    parts.append(as_markdown(stage_table(results)))
    return _join(parts)


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
    return "The models explained:\n\n" + "\n".join(lines)


def _settings(results: Results) -> str:
    settings: dict[str, Any] = results.settings
    machine, scoring = settings.get("machine", {}), settings.get("scoring", {})
    limit = settings.get("limit")
    return (
        f"Machine: {_plain(machine.get('device'))}; torch {machine.get('torch')}, pace {machine.get('pace')}. "
        f"Seed {settings.get('seed')}; {scoring.get('bootstrap')} bootstrap resamples; "
        f"{'all images' if limit is None else f'at most {limit} images per split'}. "
        "Every option is in results.json."
    )


def _cell(cell: Cell) -> str:
    wrap = {"best": "**{}**", "second": "<u>{}</u>", None: "{}"}[cell.mark]
    return wrap.format(_plain(cell.text)) + _bracketed(_plain(cell.paper)) + _bracketed(_plain(cell.interval))


def _bracketed(text: str) -> str:
    return f" ({text})" if text else ""


def _line(cells: Iterator[str] | list[str] | map[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: object) -> str:
    """Text of files and errors, escaped for Markdown and HTML."""
    escaped = str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for sign in "\\`*_|[]":
        escaped = escaped.replace(sign, f"\\{sign}")
    return " ".join(escaped.split())


def _join(parts: Any) -> str:
    return "\n\n".join(parts) + "\n"
