"""One method on one dataset: fitted, timed and scored."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from pace.baselines import Explainer, PaceExplainer, TrueColors
from pace.benchmark.inputs import Inputs
from pace.benchmark.methods import COLORS, Method
from pace.benchmark.results import Row
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

    bootstrap : resamples for the intervals
    regression_runs : runs of a random method that faithfulness is averaged over; other scores are averaged over all runs
    repeat_seconds : no further run starts after this long; None for no limit
    patch_images : test images for patch-level scores; None for all
    hidden_images : test images for deletion and insertion; 0 leaves these out
    """

    bootstrap: int = 200
    regression_runs: int = 3
    repeat_seconds: float | None = None
    hidden_images: int = 128
    patch_images: int | None = None


def score_method(method: Method, inputs: Inputs, scoring: Scoring, seed: int) -> Row:
    """Run r explains with seed + r; run 0 gets every score, the others only those that are cheap."""
    device = inputs.backbone.device
    clock = _Clock(device)
    (train, train_pair), (test, test_pair) = inputs.train, inputs.test
    explainer = TrueColors(inputs.known_colours, **method.options) if method.name == COLORS else method.make()
    with clock.time("fit"):
        explainer.fit(inputs.backbone, train, perturbed=train_pair, seed=seed)
    with clock.time("explain"):
        of_train = explainer.explain(train, seed=seed, patches=False)
    speed = len(train) / clock.last
    with clock.time("explain"):
        of_test = explainer.explain(test, seed=seed)
    with clock.time("explain"):
        of_perturbed = explainer.explain(test_pair, seed=seed, patches=False)
    speed = max(speed, len(test) / clock.last)  # the first call may include warming up
    with clock.time("score"):
        some = inputs.sample(scoring.patch_images)
        weights = _token_weights(explainer, of_test, test.attention)
        scores = score_explanations(
            replace(of_train, theta=_on(device, of_train.theta)),
            replace(of_test, phi=None if of_test.phi is None else of_test.phi[some]),
            of_perturbed,
            yhat_train=inputs.predicted(train),
            yhat_test=inputs.predicted(test),
            yhat_perturbed=inputs.predicted(test_pair),
            given_prediction=_given_prediction(explainer, inputs),
            attention=None if weights is None else weights[some],
            concepts=explainer.concepts_,
            bootstrap=scoring.bootstrap,
            seed=seed,
            **{name: known[some] for name, known in inputs.truth.items()},
        )
        scores = _with_hidden_patches(scores, of_test, inputs, scoring, seed)
    runs = _Runs(scores)
    note = _repeat(explainer, method, (of_test, of_perturbed), runs, inputs, scoring, seed, clock)
    notes = (note,) if note else ()
    return Row(inputs.dataset.name, method, runs.mean(), runs.spread(), runs.count, speed, clock.seconds, notes)


def _repeat(
    explainer: Explainer,
    method: Method,
    first: tuple[Explanation, Explanation],
    runs: _Runs,
    inputs: Inputs,
    scoring: Scoring,
    seed: int,
    clock: _Clock,
) -> str | None:
    """The runs of a random method after the first; returns a note if there were fewer than its `repeats`."""
    (train, _), (test, test_pair) = inputs.train, inputs.test
    yhat_train, yhat, yhat_perturbed = (inputs.predicted(some) for some in (train, test, test_pair))
    began = time.monotonic()
    with progress(f"{inputs.dataset.name}: {method.title}", explainer.repeats, done=1) as advance:
        for run in range(1, explainer.repeats):
            if scoring.repeat_seconds is not None and time.monotonic() - began > scoring.repeat_seconds:
                return f"{run} of {explainer.repeats} runs in the {scoring.repeat_seconds:g} seconds they were given"
            with clock.time("explain"):
                theta, moved = (
                    explainer.explain(some, seed=seed + run, patches=False).theta for some in (test, test_pair)
                )
            if np.array_equal(theta, first[0].theta) and np.array_equal(moved, first[1].theta):
                return "Another seed gave the same explanations to the last bit, so one run stands for all"
            cheap = {
                "stability": stability(theta, moved),
                "stability_when_prediction_holds": stability_when_prediction_holds(theta, moved, yhat, yhat_perturbed),
                "sparsity": sparsity(theta),
                "hoyer_sparsity": hoyer_sparsity(theta),
                "effective_concepts": effective_concepts(theta),
            }
            runs.add(cheap)
            if run < scoring.regression_runs and runs.has("faithfulness"):
                with clock.time("explain"):
                    learned = explainer.explain(train, seed=seed + run, patches=False).theta
                with clock.time("score"):
                    there = _on(inputs.backbone.device, learned)
                    runs.add({"faithfulness": faithfulness(there, yhat_train, theta, yhat, seed=seed)})
            advance()
    return None


def _given_prediction(explainer: Explainer, inputs: Inputs) -> tuple[Any, Array] | None:
    """θ of both splits with ŷ given, for PACE. Attributions explain the predicted class, so they always have it."""
    if not isinstance(explainer, PaceExplainer) or not explainer.model_.label_head_.shape[1]:
        return None
    train, test = (
        explainer.model_.explain(some, use_predictions=True, patches=False).theta
        for some, _ in (inputs.train, inputs.test)
    )
    return _on(inputs.backbone.device, train), test


def _on(device: torch.device, theta: Array) -> Any:
    """Regressions run on the device of the training images' θ."""
    return torch.as_tensor(theta, device=device)


def _token_weights(explainer: Explainer, found: Explanation, attention: Any) -> Array | None:
    """The weight (M, J) of every token in θ: its attention for PACE; elsewhere θ is a mean, so its own size counts."""
    if found.phi is None:
        return None
    if isinstance(explainer, PaceExplainer):
        return np.asarray(attention.cpu() if isinstance(attention, torch.Tensor) else attention)
    weights: Array = np.stack([np.abs(tokens).sum(1) for tokens in found.phi])
    return np.where(weights.sum(1, keepdims=True) > 0, weights, 1.0)


def _with_hidden_patches(scores: Scores, found: Explanation, inputs: Inputs, scoring: Scoring, seed: int) -> Scores:
    """With deletion and insertion added."""
    if found.phi is None or not scoring.hidden_images:
        return scores
    rows = inputs.sample(scoring.hidden_images)
    relevance = patch_relevance(found.phi[rows], found.theta[rows], found.prefix_tokens)
    options = {"resamples": scoring.bootstrap, "seed": seed, "batch_size": _FORWARD}
    more = [bootstrap(metric, inputs.hide, relevance, **options) for metric in (deletion, insertion)]
    return Scores([*scores.values(), *more], scores.warnings)


class _Runs:
    """Scores of several runs: their means, with the interval of the first shifted to them, and their spread."""

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
    """Seconds by stage, including the GPU's work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}
        self.last = 0.0

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        self._wait()
        began = time.perf_counter()
        yield
        self._wait()
        self.last = max(time.perf_counter() - began, 1e-9)
        self.seconds[stage] = self.seconds.get(stage, 0.0) + self.last

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
