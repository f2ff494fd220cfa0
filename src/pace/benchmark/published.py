"""The numbers the paper prints, from published.json beside this file, which names their source."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

DESIDERATA = ("faithfulness", "stability", "sparsity")  # those with a number for every dataset
_DATASETS = {"color", "flower", "cars", "cub"}


@cache
def published() -> dict[str, Any]:
    return dict(json.loads(files("pace.benchmark").joinpath("published.json").read_text(encoding="utf-8")))


def printed(method: str | None, metric: str, dataset: str) -> float | None:
    """What Table 1 says of a method as the paper calls it; None where it says nothing."""
    found = published()["table_1"].get(method, {}).get(metric)
    return found.get(dataset) if isinstance(found, dict) else found if isinstance(found, int) else None


def printed_average(method: str | None, metric: str, datasets: list[str]) -> float | None:
    """Table 2 where these are the paper's four datasets, and otherwise the mean of what Table 1 says of these."""
    if set(datasets) == _DATASETS:
        found: float | None = published()["table_2"].get(method, {}).get(metric)
        return found
    values = [printed(method, metric, dataset) for dataset in datasets]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
