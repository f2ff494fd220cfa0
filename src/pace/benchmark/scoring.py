"""One method on one dataset: fitted, timed and scored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from pace.baselines import Explainer, PaceExplainer, TrueColors
from pace.baselines.gradients import TokenAttribution
from pace.benchmark.data import Inputs
from pace.benchmark.methods import COLORS, Method
from pace.benchmark.results import Row
from pace.explanation import Explanation
from pace.metrics import (
    Scores,
    effective_concepts,
    faithfulness,
    hoyer_sparsity,
    score_explanations,
    sparsity,
    stability,
    stability_when_prediction_holds,
)
from pace.metrics.by_lot import random_mixtures
from pace.metrics.declare import Array
from pace.metrics.inputs import as_array, labels_of
from pace.observations import Observations
from pace.progress import progress


@dataclass(frozen=True)
class Scoring:
    """How methods are scored.

    bootstrap : resamples for the intervals
    regression_runs : runs of a random method that faithfulness is averaged over; other scores are averaged over all runs
    repeat_seconds : no further run starts after this long; None for no limit
    patch_images : test images for patch-level scores
    hidden_images : those of them whose concepts are removed and added; 0 leaves these scores out
    second_fit : fit methods that learn concepts again with seed + 1, another draw of patches and of starting centres
    """

    bootstrap: int = 200
    regression_runs: int = 3
    repeat_seconds: float | None = None
    hidden_images: int = 128
    patch_images: int = 1000
    second_fit: bool = True


def score_method(method: Method, inputs: Inputs, scoring: Scoring, seed: int) -> Row:
    """Run r explains with seed + r; run 0 gets every score, the others only those that are cheap."""
    if method.name != COLORS and method.make().through_model:
        inputs = inputs.of_last_block()
    device, seconds = inputs.backbone.device, dict.fromkeys(("fit", "explain", "score"), 0.0)
    (train, train_pair), (test, test_pair) = inputs.train, inputs.test
    some = inputs.sample(scoring.patch_images)
    shown, shown_pair = test[some], test_pair[some]  # φ of all images would not fit into memory
    explainer = _make(method, inputs, some, shown, shown_pair)
    with _timed(seconds, "fit"):
        explainer.fit(inputs.backbone, train, perturbed=train_pair, seed=seed)
    with _timed(seconds, "explain"):
        of_train, of_test, of_perturbed = (
            explainer.explain(images, seed=seed, patches=False) for images in (train, test, test_pair)
        )
    speed = (len(train) + 2 * len(test)) / seconds["explain"]
    patches, patches_pair = of_test, of_perturbed
    if explainer.patch_level:
        with _timed(seconds, "explain"):
            patches, patches_pair = (explainer.explain(images, seed=seed) for images in (shown, shown_pair))
    with _timed(seconds, "score"):
        theta: Any = torch.as_tensor(of_train.theta, device=device)  # where the regressions run
        more = _hidden(explainer, patches, inputs, scoring, some)
        more |= {name: known[some] for name, known in inputs.truth.items()}
        scores = score_explanations(
            replace(of_train, theta=theta),
            replace(of_test, phi=patches.phi),
            replace(of_perturbed, phi=patches_pair.phi),
            yhat_train=train.predictions,
            yhat_test=test.predictions,
            yhat_perturbed=test_pair.predictions,
            given_prediction=_given_prediction(explainer, inputs),
            random=random_mixtures(train, test, _in_use(patches), seed=seed, device=device),
            attention=_with_cls(shown.attention, patches, shown),
            attention_perturbed=_with_cls(shown_pair.attention, patches, shown),
            token_weights=_token_weights(explainer, patches, shown),
            crops=None if shown_pair.crops is None else as_array(shown_pair.crops[:]),
            concepts=explainer.concepts_,
            offset=explainer.offset_,
            embeddings=_with_cls(shown.embeddings, patches, shown),
            phi_other=_another_start(method, inputs, explainer, shown, seed) if scoring.second_fit else None,
            bootstrap=scoring.bootstrap,
            seed=seed,
            **more,
        )
    values = {name: [score.value] for name, score in scores.items()}
    runs, note = _repeat(explainer, inputs, scoring, seed, seconds, values), None
    if runs < explainer.repeats:
        note = f"{runs} of {explainer.repeats} runs in the {scoring.repeat_seconds:g} seconds they were given"
    spread = {name: float(np.std(found, ddof=1)) for name, found in values.items() if len(found) > 1}
    return Row(inputs.dataset.name, method, _averaged(scores, values), spread, runs, speed, seconds, note)


def _make(method: Method, inputs: Inputs, some: Array, shown: Observations, shown_pair: Observations) -> Explainer:
    if method.name != COLORS:
        return method.make()
    known = inputs.known_colours()
    (_, true), (_, seen) = known[1:]
    return TrueColors([*known, (shown, true[some]), (shown_pair, seen[some])], **method.options)


def _another_start(
    method: Method, inputs: Inputs, explainer: Explainer, shown: Observations, seed: int
) -> Array | None:
    """φ of these images by a second fit; only methods that learn have concepts in embedding space."""
    if explainer.concepts_ is None:
        return None
    train, perturbed = inputs.train
    again = method.make().fit(inputs.backbone, train, perturbed=perturbed, seed=seed + 1)
    return again.explain(shown, seed=seed + 1).phi


def _repeat(
    explainer: Explainer,
    inputs: Inputs,
    scoring: Scoring,
    seed: int,
    seconds: dict[str, float],
    values: dict[str, list[float]],
) -> int:
    """Add the scores of a random method's further runs to its `values`; returns the number of runs."""
    (train, _), (test, test_pair) = inputs.train, inputs.test
    yhat_train, yhat, yhat_perturbed = (labels_of(some.predictions, None) for some in (train, test, test_pair))
    began = time.monotonic()
    with progress(f"{inputs.dataset.name}: runs of {explainer.name}", explainer.repeats, done=1) as advance:
        for run in range(1, explainer.repeats):
            if scoring.repeat_seconds is not None and time.monotonic() - began > scoring.repeat_seconds:
                return run
            with _timed(seconds, "explain"):
                theta = explainer.explain(test, seed=seed + run, patches=False).theta
                moved = explainer.explain(test_pair, seed=seed + run, patches=False).theta
            found = {
                "stability": stability(theta, moved),
                "stability_when_prediction_holds": stability_when_prediction_holds(theta, moved, yhat, yhat_perturbed),
                "sparsity": sparsity(theta),
                "hoyer_sparsity": hoyer_sparsity(theta),
                "effective_concepts": effective_concepts(theta),
            }
            if run < scoring.regression_runs and "faithfulness" in values:
                with _timed(seconds, "explain"):
                    learned = explainer.explain(train, seed=seed + run, patches=False).theta
                with _timed(seconds, "score"):
                    there = torch.as_tensor(learned, device=inputs.backbone.device)
                    found["faithfulness"] = faithfulness(there, yhat_train, theta, yhat, seed=seed)
            for name in found.keys() & values.keys():
                values[name].append(found[name])
            advance()
    return explainer.repeats


def _averaged(scores: Scores, values: dict[str, list[float]]) -> Scores:
    """Means over the runs, with the intervals of the first shifted to them."""
    averaged = []
    for name, score in scores.items():
        mean = float(np.mean(values[name]))
        shift = mean - score.value
        ends = (score.low, score.high)
        low, high = (None if end is None else float(np.clip(end + shift, *score.range)) for end in ends)
        averaged.append(replace(score, value=mean, low=low, high=high))
    return Scores(averaged, scores.warnings, scores.verdict)


def _given_prediction(explainer: Explainer, inputs: Inputs) -> tuple[Any, Array] | None:
    """θ of both splits with ŷ given, for PACE with flat concepts: kinds of parts are told without it.

    Attributions explain the predicted class, so they always have it.
    """
    if not isinstance(explainer, PaceExplainer) or not explainer.model_.label_head_.shape[1]:
        return None
    if explainer.model_.part_of_ is not None:
        return None
    train, test = (
        explainer.model_.explain(some, use_predictions=True, patches=False).theta
        for some, _ in (inputs.train, inputs.test)
    )
    return torch.as_tensor(train, device=inputs.backbone.device), test


def _in_use(found: Explanation) -> int:
    """How many concepts hold at least one patch, if every patch is divided among its concepts; all without a patch level."""
    if found.phi is None:
        return found.n_concepts
    held = np.zeros(found.n_concepts)
    for tokens in found.phi:  # image by image: φ can be large
        sizes = np.abs(tokens[found.prefix_tokens :])
        held += (sizes / sizes.sum(1, keepdims=True).clip(1e-12)).sum(0)
    return max(1, int((held >= 1).sum()))


def _with_cls(array: Any, found: Explanation, observations: Observations) -> Any:
    """An array (M, J, …) of the observations, with zeros for CLS where the explanation alone has it as a token."""
    beside = found.prefix_tokens - observations.prefix_tokens
    if not beside:
        return array
    tokens = torch.as_tensor(as_array(array[:]))
    return torch.cat([torch.zeros_like(tokens[:, :beside]), tokens], 1)


def _token_weights(explainer: Explainer, found: Explanation, observations: Observations) -> Any:
    """The weight (M, J) of every token in θ: its size, times its attention unless it is an attribution."""
    if found.phi is None:
        return None
    weights: Array = np.stack([np.abs(tokens).sum(1) for tokens in found.phi])
    if not isinstance(explainer, TokenAttribution):
        weights = weights * as_array(observations.attention[:])
    return np.where(weights.sum(1, keepdims=True) > 0, weights, 1.0)


def _hidden(explainer: Explainer, found: Explanation, inputs: Inputs, scoring: Scoring, some: Array) -> dict[str, Any]:
    """A few of the images `some`, which `found` explains, whose concepts are removed and added, and how much each matters."""
    if found.phi is None or not scoring.hidden_images:
        return {}
    hiding = inputs.hiding(min(scoring.hidden_images, len(some)))
    places = np.searchsorted(some, hiding.rows)
    return {
        "hiding": replace(hiding, rows=places),
        "importance": explainer.importance(inputs.test[0][hiding.rows], found[places]),
    }


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[stage] += time.perf_counter() - began
