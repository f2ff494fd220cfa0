"""Multi-level: does the patch level say anything? Do the patches of an image differ, and do they count beside CLS?"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from pace.metrics.declare import Array, Measure, metric
from pace.metrics.inputs import as_array, entropy, patches_of, theta_of


@metric(title="Concepts per image", better=None, range=(1, math.inf))
def concepts_per_image(phi: Any, prefix_tokens: int = 0) -> Measure:
    """Distinct concepts among the patches of an image; at 1 there is no patch level.

    Number of concepts that are the largest φ_mj of some patch j, mean over images. Prefix tokens are not patches.
    """
    return Measure.mean(_distinct(patches_of(phi, prefix_tokens)))


@metric(title="Patch variety", better="higher", range=(1, math.inf))
def patch_variety(phi: Any, prefix_tokens: int = 0) -> Measure:
    """Effective number of different concepts among the patches of an image; 1 when all patches have the same.

    exp of H(φ̄_m) − mean_j H(φ_mj), the information a patch's place gives about its concept; mean over images.
    Neither one concept for all patches nor all concepts for every patch counts as variety. |φ| is normalised per patch.
    """
    patches = patches_of(phi, prefix_tokens)
    found = np.empty(len(patches))
    for image, tokens in enumerate(patches):  # image by image: φ can be large
        shares = np.abs(tokens.astype(np.float64))
        total = shares.sum(1, keepdims=True)
        shares = np.divide(shares, total, out=np.full_like(shares, 1 / shares.shape[1]), where=total > 0)
        found[image] = np.exp(max(entropy(shares.mean(0)) - entropy(shares).mean(), 0.0))
    return Measure.mean(found)


@metric(title="Weight of CLS", better="lower", range=(0, 1))
def cls_weight(attention: Any, prefix_tokens: int = 1) -> Measure:
    """Share of an image's weight on CLS rather than on its patches; near 1 the patches hardly count.

    Attention on the prefix tokens ÷ attention on all tokens, mean over images.
    In PACE a token contributes to θ in proportion to its attention. For other methods pass each token's weight in θ.
    """
    weights = theta_of(attention, "attention")
    if not 0 <= prefix_tokens <= weights.shape[1]:
        raise ValueError(f"prefix_tokens: expected 0 to {weights.shape[1]}; found {prefix_tokens}")
    total = weights.sum(1)
    if (weights < 0).any() or (total <= 0).any():
        raise ValueError("attention: expected weights that are not negative, and not all 0 in any image")
    return Measure.mean(weights[:, :prefix_tokens].sum(1) / total)


class Levels(NamedTuple):
    """Which of the three levels an explanation has."""

    dataset: bool
    image: bool
    patch: bool

    def __str__(self) -> str:
        return {3: "full", 2: "partial"}.get(sum(self), "no")


def find_levels(explanation: Any, concepts: Any = None) -> Levels:
    """Which levels a method really has, judging by what it returns.

    dataset: `concepts` (K, …), such as means in embedding space, describe each concept of θ, and they differ.
    image: `explanation.theta` differs between images.
    patch: `explanation.phi` gives the patches of at least half of the images more than one concept.
    """
    theta = theta_of(explanation.theta)
    described = False
    if concepts is not None:
        rows = as_array(concepts).reshape(len(concepts), -1)
        described = len(rows) == theta.shape[1] and bool(np.isfinite(rows).all()) and len(np.unique(rows, axis=0)) > 1
    differ = bool((np.ptp(theta, axis=0) > 1e-6 * np.abs(theta).max()).any())
    phi = getattr(explanation, "phi", None)
    patched = phi is not None and bool(
        (_distinct(patches_of(phi, getattr(explanation, "prefix_tokens", 0))) > 1).mean() >= 0.5
    )
    return Levels(described, differ, patched)


@metric(title="Levels", better="higher", range=(0, 3))
def levels(explanation: Any, concepts: Any = None) -> Measure:
    """How many of dataset, image and patch level the method really has, judging by what it returns.

    How many levels `find_levels` finds.
    """
    return Measure.fixed(sum(find_levels(explanation, concepts)))


def _distinct(patches: Array) -> Array:
    """Distinct leading concepts in every image (M,)."""
    leading = np.sort(patches.argmax(2), axis=1)
    found: Array = 1.0 + (np.diff(leading, axis=1) != 0).sum(1)
    return found
