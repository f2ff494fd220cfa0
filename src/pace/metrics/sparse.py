"""What an explanation looks like: sparsity within an image, parsimony over all images, and the levels it has."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pace.metrics.declare import Array, Measure, metric
from pace.metrics.inputs import as_array, concept_counts, entropy, l1_normalised, patches_of, theta_of

# One concept covers an image from here on. Sound explanations of planted pictures and of Color have 0.4 to 0.65 of either, one
# that paints object and background alike 0.99. A wide background is no fault, so the area may be larger than the attention.
COVERED, COVERED_ATTENTION = 0.9, 0.8  # shares of the patches, and of their attention


@metric(title="Sparsity", better="higher", range=(0, 1))
def sparsity(theta: Any) -> Measure:
    """Share of concepts that play next to no part in an image (below a tenth of an even share).

    The share of |θ_mk| < ε = 0.1/K on L1-normalised θ, as in the paper. Concepts that no image uses count in every image, so a
    collapse to one concept gets 1 − 1/K: read it beside `effective_concepts`.
    """
    shares = np.abs(l1_normalised(theta_of(theta)))
    return Measure.mean((shares < 0.1 / shares.shape[1]).mean(1))


@metric(title="Hoyer sparsity", better="higher", range=(0, 1))
def hoyer_sparsity(theta: Any) -> Measure:
    """0 when all concepts share an image evenly, 1 when one concept has it all; needs no threshold.

    (√K − ‖θ‖₁/‖θ‖₂) / (√K − 1), mean over images. Both ends are the same for every K.
    """
    shares = l1_normalised(theta_of(theta))
    root = math.sqrt(shares.shape[1])
    # A single concept is evenly spread.
    return Measure.mean(((root - 1 / np.linalg.norm(shares, axis=1)) / max(root - 1, 1e-9)).clip(0, 1))


@metric(title="Levels", better="higher", range=(0, 3))
def levels(explanation: Any, concepts: Any = None) -> Measure:
    """How many of dataset, image and patch level the method really has, judging by what it returns.

    Dataset: `concepts` (K, …), such as means in embedding space, describe each concept of θ, and they differ.
    Image: `explanation.theta` differs between images.
    Patch: `explanation.phi` has patches, and one concept does not cover a typical image (`leading_area` up to 0.9).
    """
    theta = theta_of(explanation.theta)
    found = int((np.ptp(theta, axis=0) > 1e-6 * np.abs(theta).max()).any())
    if concepts is not None:
        rows = as_array(concepts).reshape(len(concepts), -1)
        found += len(rows) == theta.shape[1] and bool(np.isfinite(rows).all()) and len(np.unique(rows, axis=0)) > 1
    if getattr(explanation, "phi", None) is not None:
        patches = patches_of(explanation.phi, getattr(explanation, "prefix_tokens", 0))
        found += np.median(_leading_areas(patches)) <= COVERED
    return Measure.fixed(found)


@metric(title="Concepts per image", better=None, range=(1, math.inf))
def concepts_per_image(phi: Any, prefix_tokens: int = 0) -> Measure:
    """Distinct concepts among the patches of an image; at 1 there is no patch level.

    Number of concepts that are the largest φ_mj of some patch j, mean over images. Prefix tokens are not patches.
    """
    return Measure.mean((concept_counts(patches_of(phi, prefix_tokens).argmax(2)) > 0).sum(1))


@metric(title="Leading share", better=None, range=(0, 1))
def leading_share(theta: Any) -> Measure:
    """Share of the largest concept in a typical image (the median).

    The largest |θ_mk| on L1-normalised θ.
    """
    return Measure.median(np.abs(l1_normalised(theta_of(theta))).max(1))


@metric(title="Leading area", better=None, range=(0, 1))
def leading_area(phi: Any, prefix_tokens: int = 0) -> Measure:
    """Share of the patches of a typical image (the median) that have its most frequent concept; at 1 there is no patch level.

    A patch's concept is its largest φ_mj. Prefix tokens are not patches.
    """
    return Measure.median(_leading_areas(patches_of(phi, prefix_tokens)))


@metric(title="Leading attention", better=None, range=(0, 1))
def leading_attention(phi: Any, attention: Any, prefix_tokens: int = 0) -> Measure:
    """Share of the patches' attention that the patches of one concept have in a typical image (the median).

    As `leading_area`, with every patch weighted by its attention.
    """
    patches, weights = patches_of(phi, prefix_tokens), theta_of(attention, "attention")[:, prefix_tokens:]
    if weights.shape != patches.shape[:2]:
        raise ValueError(f"attention: expected patches {patches.shape[:2]} as phi has; found {weights.shape}")
    return Measure.median(_leading_areas(patches, weights))


@metric(title="Weight of CLS", better="lower", range=(0, 1))
def cls_weight(token_weights: Any, prefix_tokens: int = 1) -> Measure:
    """Share of an image's weight on CLS rather than on its patches; near 1 the patches hardly count.

    Weight of the prefix tokens in θ ÷ weight of all tokens, mean over images.
    In PACE a token contributes to θ in proportion to its attention.
    """
    weights = theta_of(token_weights, "token_weights")
    if (weights < 0).any() or (weights.sum(1) <= 0).any():
        raise ValueError("token_weights: expected weights that are not negative, and not all 0 in any image")
    return Measure.mean(weights[:, :prefix_tokens].sum(1) / weights.sum(1))


@metric(title="Live concepts", better=None, range=(1, math.inf))
def live_concepts(phi: Any, prefix_tokens: int = 0) -> Measure:
    """Number of concepts that are the largest φ of at least one patch of these images; the others are never seen."""
    return Measure.fixed(len(np.unique(patches_of(phi, prefix_tokens).argmax(2))))


@metric(title="Concepts", better="lower", range=(1, math.inf))
def n_concepts(theta: Any) -> Measure:
    """Parsimony as the paper counts it: the number K of concepts the method has, used or not."""
    return Measure.fixed(theta_of(theta).shape[1])


@metric(title="Effective concepts", better=None, range=(1, math.inf))
def effective_concepts(theta: Any) -> Measure:
    """How many concepts all images share in effect; 1 or 2 of many means the explanation has collapsed.

    exp of the entropy of the mean |θ| over images, each L1-normalised: K when all are used alike, 1 for a single one.
    Fewer is more parsimonious, until images can no longer be told apart.
    """
    shares = np.abs(l1_normalised(theta_of(theta)))

    return Measure(
        len(shares), lambda weights: np.exp(entropy(weights @ shares / weights.sum(1, keepdims=True))), shares.shape[1]
    )


def _leading_areas(patches: Array, weights: Array | None = None) -> Array:
    """The largest share (M,) that a concept has of the patches of an image, or of their weights (M, patches)."""
    areas = concept_counts(patches.argmax(2), weights=weights)
    found: Array = areas.max(1) / areas.sum(1).clip(1e-12)
    return found
