"""One method on one dataset: fitted, timed, and scored."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from pace.baselines import Explainer, PaceExplainer, TrueColors
from pace.benchmark.methods import COLORS, Method
from pace.benchmark.results import Row
from pace.benchmark.views import Views
from pace.explanation import Explanation
from pace.metrics import (
    Scores,
    bootstrap,
    deletion,
    effective_concepts,
    faithfulness,
    hoyer_sparsity,
    insertion,
    patch_relevance,
    score_explanations,
    sparsity,
    stability,
    stability_when_prediction_holds,
)
from pace.metrics.declare import Array
from pace.progress import progress

_FORWARD = 256  # images with hidden patches that go through the model at once


@dataclass(frozen=True)
class Scoring:
    """How methods are scored.

    bootstrap : draws for the intervals
    regression_runs : of a method with chance in it, the runs that faithfulness is averaged over; the other scores are
        averaged over all of them
    repeat_seconds : no further run is begun after this long; None sets no limit
    patch_images : test images that scores of the patch level are made of; None is all of them
    hidden_images : test images that deletion and insertion are measured on; 0 leaves them out
    """

    bootstrap: int = 200
    regression_runs: int = 3
    repeat_seconds: float | None = None
    hidden_images: int = 128
    patch_images: int | None = None


def judge(method: Method, views: Views, scoring: Scoring, seed: int) -> Row:
    """Run r explains with seed + r; run 0 has every score, and the others those that they can change cheaply."""
    device = views.backbone.device
    clock = _Clock(device)
    (train, train_pair), (test, test_pair) = views.train, views.test
    made = TrueColors(views.known_colours, **method.options) if method.name == COLORS else method.make()
    with clock.of("fit"):
        made.fit(views.backbone, train, perturbed=train_pair, seed=seed, device=device)
    with clock.of("explain"):
        learned = made.explain(train, seed=seed, patches=False)
    speed = len(train) / clock.last
    with clock.of("explain"):
        found = made.explain(test, seed=seed)
    with clock.of("explain"):
        moved = made.explain(test_pair, seed=seed, patches=False)
    speed = max(speed, len(test) / clock.last)  # the first call may have had to warm up
    with clock.of("score"):
        weights = _token_weights(made, found, test.attention)
        some = views.drawn(scoring.patch_images)
        scores = score_explanations(
            replace(learned, theta=_on(device, learned.theta)),
            replace(found, phi=None if found.phi is None else found.phi[some]),
            moved,
            yhat_train=views.predicted(train),
            yhat_test=views.predicted(test),
            yhat_perturbed=views.predicted(test_pair),
            given_prediction=_given_prediction(made, views),
            attention=None if weights is None else weights[some],
            concepts=made.concepts_,
            colours=None if views.colours is None else views.colours[some],
            parts=None if views.parts is None else views.parts[some],
            bootstrap=scoring.bootstrap,
            seed=seed,
        )
        scores = _with_hidden(scores, found, views, scoring, seed)
    runs = _Runs(scores)
    notes = _repeat(made, method, (found, moved), runs, views, scoring, seed, clock)
    return Row(
        views.dataset.name, method, runs.mean(), runs.spread(), runs.count, speed, clock.seconds, notes=tuple(notes)
    )


def _repeat(
    made: Explainer,
    method: Method,
    first: tuple[Explanation, Explanation],
    runs: _Runs,
    views: Views,
    scoring: Scoring,
    seed: int,
    clock: _Clock,
) -> list[str]:
    """The runs after the first, of a method with chance in it; returns what is to be said about them."""
    (train, _), (test, test_pair) = views.train, views.test
    yhat_train, yhat, yhat_moved = (views.predicted(some) for some in (train, test, test_pair))
    began = time.monotonic()
    with progress(f"{views.dataset.name}: {method.title}", made.repeats, done=1) as advance:
        for run in range(1, made.repeats):
            if scoring.repeat_seconds is not None and time.monotonic() - began > scoring.repeat_seconds:
                return [f"{run} of {made.repeats} runs in the {scoring.repeat_seconds:g} seconds they were given"]
            with clock.of("explain"):
                theta, moved = (made.explain(some, seed=seed + run, patches=False).theta for some in (test, test_pair))
            if np.array_equal(theta, first[0].theta) and np.array_equal(moved, first[1].theta):
                return ["Another seed gave the same explanations to the last bit, so one run stands for all"]
            runs.add(_cheap_scores(theta, moved, yhat, yhat_moved))
            if run < scoring.regression_runs and runs.has("faithfulness"):
                with clock.of("explain"):
                    learned = made.explain(train, seed=seed + run, patches=False).theta
                with clock.of("score"):
                    there = _on(views.backbone.device, learned)
                    runs.add({"faithfulness": faithfulness(there, yhat_train, theta, yhat, seed=seed)})
            advance()
    return []


def _on(device: torch.device, theta: Array) -> Any:
    """Regressions run where the explanations of the training images are."""
    return torch.as_tensor(theta, device=device)


def _given_prediction(made: Explainer, views: Views) -> tuple[Any, Array] | None:
    """θ of both splits with ŷ at hand, for PACE. Attributions explain the predicted class, so they always have it."""
    if not isinstance(made, PaceExplainer) or not made.model_.label_head_.shape[1]:
        return None
    train, test = (
        made.model_.explain(some[0], use_predictions=True, patches=False).theta for some in (views.train, views.test)
    )
    return _on(views.backbone.device, train), test


def _token_weights(made: Explainer, found: Explanation, attention: Any) -> Array | None:
    """The weight (M, J) of every token in θ: its attention for PACE; elsewhere θ is a mean, and its own size counts."""
    if found.phi is None:
        return None
    if isinstance(made, PaceExplainer):
        return np.asarray(attention.cpu() if isinstance(attention, torch.Tensor) else attention)
    weights: Array = np.stack([np.abs(tokens).sum(1) for tokens in found.phi])
    return np.where(weights.sum(1, keepdims=True) > 0, weights, 1.0)


def _with_hidden(scores: Scores, found: Explanation, views: Views, scoring: Scoring, seed: int) -> Scores:
    if found.phi is None or not scoring.hidden_images:
        return scores
    rows = views.drawn(scoring.hidden_images)
    relevance = patch_relevance(found.phi[rows], found.theta[rows], found.prefix_tokens)
    options = {"resamples": scoring.bootstrap, "seed": seed, "batch_size": _FORWARD}
    more = [bootstrap(metric, views.hide, relevance, **options) for metric in (deletion, insertion)]
    return Scores([*scores.values(), *more], scores.warnings)


def _cheap_scores(theta: Array, moved: Array, yhat: Array, yhat_moved: Array) -> dict[str, float]:
    """Those that take milliseconds: there may be a hundred runs."""
    return {
        "stability": stability(theta, moved),
        "stability_when_prediction_holds": stability_when_prediction_holds(theta, moved, yhat, yhat_moved),
        "sparsity": sparsity(theta),
        "hoyer_sparsity": hoyer_sparsity(theta),
        "effective_concepts": effective_concepts(theta),
    }


class _Runs:
    """Scores of several runs: their means, with the interval of the first around them, and their spread."""

    def __init__(self, first: Scores) -> None:
        self._first = first
        self._values = {name: [score.value] for name, score in first.items()}
        self.count = 1

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if self.has(name):
                self._values[name].append(value)
        self.count = max(map(len, self._values.values()))

    def has(self, name: str) -> bool:
        return name in self._values

    def mean(self) -> Scores:
        scores = []
        for name, score in self._first.items():
            mean = float(np.mean(self._values[name]))
            shift = mean - score.value
            low, high = (
                None if end is None else float(np.clip(end + shift, *score.range)) for end in (score.low, score.high)
            )
            scores.append(replace(score, value=mean, low=low, high=high))
        return Scores(scores, self._first.warnings)

    def spread(self) -> dict[str, float]:
        return {name: float(np.std(found, ddof=1)) for name, found in self._values.items() if len(found) > 1}


class _Clock:
    """Seconds by stage, with the GPU's work in them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}
        self.last = 0.0

    @contextmanager
    def of(self, stage: str) -> Iterator[None]:
        self._wait()
        began = time.perf_counter()
        yield
        self._wait()
        self.last = max(time.perf_counter() - began, 1e-9)
        self.seconds[stage] = self.seconds.get(stage, 0.0) + self.last

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
