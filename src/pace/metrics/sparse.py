"""Sparsity: how few concepts the explanation of one image needs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pace.metrics.declare import Measure, metric
from pace.metrics.inputs import l1_normalised, theta_of

_NEAR_ZERO = 0.1  # the paper's ε, in units of 1/K


@metric(title="Sparsity", better="higher", range=(0, 1))
def sparsity(theta: Any) -> Measure:
    """Share of concepts that play next to no part in an image (below a tenth of an even share).

    The share of |θ_mk| < ε = 0.1/K on L1-normalised θ, as in the paper. Concepts that no image uses count in every image, so a
    collapse to one concept gets 1 − 1/K: read it beside `effective_concepts`.
    """
    shares = np.abs(l1_normalised(theta_of(theta)))
    return Measure.mean((shares < _NEAR_ZERO / shares.shape[1]).mean(1))


@metric(title="Hoyer sparsity", better="higher", range=(0, 1))
def hoyer_sparsity(theta: Any) -> Measure:
    """0 when all concepts share an image evenly, 1 when one concept has it all; needs no threshold.

    (√K − ‖θ‖₁/‖θ‖₂) / (√K − 1), mean over images. It has no threshold, and both ends are the same for every K.
    """
    shares = l1_normalised(theta_of(theta))
    root = math.sqrt(shares.shape[1])
    if root == 1:
        return Measure.mean(np.zeros(len(shares)))  # a single concept is evenly spread
    return Measure.mean(((root - 1 / np.linalg.norm(shares, axis=1)) / (root - 1)).clip(0, 1))
