"""The numbers printed in the paper, from published.json, which names their source."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

DESIDERATA = ("faithfulness", "stability", "sparsity")  # those with a number per dataset
_DATASETS = {"color", "flower", "cars", "cub"}


@cache
def published() -> dict[str, Any]:
    return dict(json.loads(files("pace.benchmark").joinpath("published.json").read_text(encoding="utf-8")))


def printed(method: str, metric: str, dataset: str) -> float | None:
    """The number in Table 1 for a method under the paper's name for it; None where there is none."""
    found = published()["table_1"].get(method, {}).get(metric)
    return found.get(dataset) if isinstance(found, dict) else found if isinstance(found, int) else None


def printed_average(method: str, metric: str, datasets: list[str]) -> float | None:
    """The number in Table 2 if these are the paper's four datasets, otherwise the mean of those in Table 1."""
    if set(datasets) == _DATASETS:
        found: float | None = published()["table_2"].get(method, {}).get(metric)
        return found
    values = [printed(method, metric, dataset) for dataset in datasets]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
