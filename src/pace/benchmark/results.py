"""Results of a run: a row for every method on every dataset, and all settings behind them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pace.benchmark.methods import Method
from pace.files import expect, read_json, reading
from pace.metrics import Scores

_ROW = {"dataset": str, "method": {"label": str, "name": str, "options": dict}, "scores": dict | None,
        "spread": {str: float | int | None}, "runs": int, "images_per_second": float | int | None,
        "seconds": {str: float | int}, "note": str | None, "failed": str | None}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A method on a dataset.

    scores : None if it failed; `failed` says why
    spread : standard deviation over the runs of a random method, by score
    runs : how many there were; `note` says why if there were fewer than planned
    images_per_second : image-level explanations in one run
    seconds : by stage: fit, explain (all runs), score
    """

    dataset: str
    method: Method
    scores: Scores | None = None
    spread: Mapping[str, float] = field(default_factory=dict)
    runs: int = 0
    images_per_second: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    note: str | None = None
    failed: str | None = None

    def value(self, metric: str) -> float | None:
        return self.scores[metric].value if self.scores is not None and metric in self.scores else None

    @property
    def warnings(self) -> list[str]:
        return [] if self.scores is None else self.scores.warnings

    def as_dict(self) -> dict[str, Any]:
        scores = None if self.scores is None else self.scores.as_dict()
        return {**vars(self), "method": dict(vars(self.method)), "scores": scores}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Row:
        expect(values, _ROW, "a row")
        scores = None if values["scores"] is None else Scores.from_dict(values["scores"])
        return cls(**{**values, "method": Method(**values["method"]), "scores": scores})


@dataclass
class Results:
    """`about` describes the model and images of every dataset, `settings` has every option."""

    rows: list[Row] = field(default_factory=list)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def datasets(self) -> list[str]:
        return list(dict.fromkeys(row.dataset for row in self.rows))

    @property
    def methods(self) -> list[Method]:
        """Each once; references come last."""
        found = list({row.method.label: row.method for row in self.rows}.values())
        return sorted(found, key=lambda method: method.is_reference)

    def row(self, dataset: str, label: str) -> Row | None:
        return next((row for row in self.rows if (row.dataset, row.method.label) == (dataset, label)), None)

    def of_dataset(self, dataset: str) -> list[Row]:
        rows = (self.row(dataset, method.label) for method in self.methods)
        return [row for row in rows if row is not None]

    def of_method(self, method: Method) -> list[Row | None]:
        """On every dataset."""
        return [self.row(dataset, method.label) for dataset in self.datasets]

    def as_dict(self) -> dict[str, Any]:
        return {"settings": self.settings, "about": self.about, "rows": [row.as_dict() for row in self.rows]}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Results:
        """From results.json, or the folder it is in."""
        file = Path(path).expanduser()
        file = file / "results.json" if file.is_dir() else file
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such results; expected results.json or the folder it is in")
        remedy = "run its benchmark again"
        values = read_json(file, {"rows": list, "about": {str: dict}, "settings": dict}, remedy)
        with reading(file, remedy):
            return cls([Row.from_dict(row) for row in values["rows"]], values["about"], values["settings"])

    def with_others(self, others: Sequence[Results]) -> Results:
        """With rows of other runs added. Of two rows for the same dataset and method, the first is kept."""
        rows: dict[tuple[str, str], Row] = {}
        about: dict[str, dict[str, Any]] = {}
        for results in (self, *others):
            for row in results.rows:
                rows.setdefault((row.dataset, row.method.label), row)
            about = {**results.about, **about}
        return Results([*rows.values()], about, {**self.settings, "added": [other.settings for other in others]})
