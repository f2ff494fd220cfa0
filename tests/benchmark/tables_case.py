"""Results written by hand."""

from __future__ import annotations

from typing import Any

from pace.benchmark import Method, Results, Row
from pace.metrics import Score, Scores
from pace.metrics.declare import METRICS


def row(dataset: str, name: str, warnings: tuple[str, ...] = (), **values: float) -> Row:
    scores = []
    for metric, value in values.items():
        declared: Any = METRICS[metric]
        low, high = value - 0.01, value + 0.01
        scores.append(
            Score(metric, declared.title, value, low, high, declared.better, declared.range, declared.meaning)
        )
    seconds = {"fit": 1.5, "explain": 0.2, "score": 0.1}
    return Row(dataset, Method(name, name), Scores(scores, warnings), {}, 1, 1234.5, seconds)


def results(*rows: Row) -> Results:
    backbone = {"name": "tiny", "training": "as it comes", "layer": 1, "d": 8, "image_size": [32, 32]}
    about = {
        "backbone": backbone,
        "train_images": 8,
        "test_images": 6,
        "tokens": 5,
        "test_accuracy": 0.5,
        "prediction_survival": 1.0,
    }
    return Results(list(rows), {dataset: about for dataset in dict.fromkeys(row.dataset for row in rows)})
