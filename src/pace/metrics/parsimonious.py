"""Parsimony: how many concepts a method has, and how many of them it uses over all images."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pace.metrics.declare import Array, Measure, metric
from pace.metrics.inputs import as_array, entropy, l1_normalised, theta_of


def concepts_in_use(patches_held: Any) -> Array:
    """Whether each concept (K,) is in use: it holds at least one patch's worth of weight over all images together."""
    used: Array = as_array(patches_held) >= 1
    return used


@metric(title="Concepts", better="lower", range=(1, math.inf))
def n_concepts(theta: Any) -> Measure:
    """Parsimony as the paper counts it: the number of concepts the method has, used or not.

    K.
    """
    return Measure.fixed(theta_of(theta).shape[1])


@metric(title="Effective concepts", better=None, range=(1, math.inf))
def effective_concepts(theta: Any) -> Measure:
    """How many concepts all images share in effect; 1 or 2 of many means the explanation has collapsed.

    exp of the entropy of the mean |θ| over images, each L1-normalised: K when all are used alike, 1 for a single one.
    Fewer is more parsimonious, until images can no longer be told apart.
    """
    shares = np.abs(l1_normalised(theta_of(theta)))

    def values(weights: Array) -> Array:
        found: Array = np.exp(entropy(weights @ shares / weights.sum(1, keepdims=True)))
        return found

    return Measure(len(shares), values, most=shares.shape[1])
