"""How few concepts an explanation needs: in one image (sparsity) and in all of them (parsimony)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pace.metrics.declare import Array, Measure, metric
from pace.metrics.inputs import entropy, l1_normalised, theta_of

_NEAR_ZERO = 0.1  # the paper's ε, in units of 1/K


@metric(
    title="Sparsity",
    better="higher",
    range=(0, 1),
    meaning="Share of concepts that play next to no part in an image (below a tenth of an even share).",
)
def sparsity(theta: Any) -> Measure:
    """Share of |θ_mk| < ε = 0.1/K on L1-normalised θ, as in the paper.

    Concepts that no image uses count in every image, so a collapse to one concept gets 1 − 1/K: read it beside
    `effective_concepts`.
    """
    shares = np.abs(l1_normalised(theta_of(theta)))
    return Measure.mean((shares < _NEAR_ZERO / shares.shape[1]).mean(1))


@metric(
    title="Hoyer sparsity",
    better="higher",
    range=(0, 1),
    meaning="0 when all concepts share an image evenly, 1 when one concept has it all; needs no threshold.",
)
def hoyer_sparsity(theta: Any) -> Measure:
    """(√K − ‖θ‖₁/‖θ‖₂) / (√K − 1), mean over images: no threshold, and both ends are the same for every K."""
    shares = l1_normalised(theta_of(theta))
    concepts = shares.shape[1]
    if concepts == 1:
        return Measure.mean(np.zeros(len(shares)))  # a single concept is spread as evenly as can be
    root = math.sqrt(concepts)
    return Measure.mean(((root - 1 / np.linalg.norm(shares, axis=1)) / (root - 1)).clip(0, 1))


@metric(
    title="Concepts",
    better="lower",
    range=(1, math.inf),
    meaning="Parsimony as the paper counts it: the number of concepts the method has, used or not.",
)
def n_concepts(theta: Any) -> Measure:
    """K."""
    return Measure.fixed(theta_of(theta).shape[1])


@metric(
    title="Effective concepts",
    better=None,
    range=(1, math.inf),
    meaning="How many concepts are really in use over all images; 1 or 2 of many means the explanation has collapsed.",
)
def effective_concepts(theta: Any) -> Measure:
    """exp of the entropy of the mean |θ| over images, each L1-normalised: K when all are used alike, 1 for a single one.

    Fewer is more parsimonious, until images can no longer be told apart.
    """
    shares = np.abs(l1_normalised(theta_of(theta)))

    def values(weights: Array) -> Array:
        found: Array = np.exp(entropy(weights @ shares / weights.sum(1, keepdims=True)))
        return found

    return Measure(len(shares), values, most=shares.shape[1])
