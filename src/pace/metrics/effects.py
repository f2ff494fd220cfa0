"""Deletion and insertion by concept: does the prediction depend on the concepts that the explanation says matter?

In every image the patches are cut into groups by their concept (the largest φ): the five concepts with most patches, and all
others together. One group after the other is removed, or added, in the order of an importance of the concepts.

n images · K concepts
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pace.metrics.declare import Array, Measure, metric
from pace.metrics.hiding import Hiding, as_attended, elsewhere
from pace.metrics.inputs import patches_of, theta_of

_OWN = 5  # concepts of an image with a group of their own


@metric(title="Deletion", better="lower", range=(0, 1))
def deletion(hiding: Hiding, phi: Any, importance: Any, prefix_tokens: int = 0, *, seed: int = 0) -> Measure:
    """Mean probability of the predicted class while an image's concepts are removed, the most important first.

    Area under p(ŷ_m) against the share of patches removed, by trapezoids. `importance` (n, K) of the concepts for ŷ in the
    images of `hiding`; that of all others together is the sum of theirs. Ties are broken by lot. Large groups tend to go first,
    so that even random patches have an effect: read it beside `effect_by_lot`, which takes as many at every step.
    """
    return Measure.mean(_areas(hiding, _steps(hiding, phi, importance, prefix_tokens, seed))[0])


@metric(title="Insertion", better="higher", range=(0, 1))
def insertion(hiding: Hiding, phi: Any, importance: Any, prefix_tokens: int = 0, *, seed: int = 0) -> Measure:
    """Mean probability of the predicted class while an image's concepts are added, the most important first.

    As `deletion`, starting from an empty image.
    """
    return Measure.mean(_areas(hiding, _steps(hiding, phi, importance, prefix_tokens, seed))[1])


@metric(title="Effect of concepts", better="higher", range=(-1, 1))
def concept_effect(hiding: Hiding, phi: Any, importance: Any, prefix_tokens: int = 0, *, seed: int = 0) -> Measure:
    """How much more the prediction depends on an image's important concepts than on the others; about 0 by lot.

    `insertion` − `deletion`, image by image.
    """
    return Measure.mean(_effect(hiding, _steps(hiding, phi, importance, prefix_tokens, seed)))


@metric(title="Effect by attention", better=None, range=(-1, 1))
def effect_by_attention(hiding: Hiding, phi: Any, importance: Any, prefix_tokens: int = 0, *, seed: int = 0) -> Measure:
    """The effect without concepts: patches go in the order of the transformer's attention, as many at every step."""
    return Measure.mean(_effect(hiding, _by_attention(hiding, _steps(hiding, phi, importance, prefix_tokens, seed))))


@metric(title="Effect by lot", better=None, range=(-1, 1))
def effect_by_lot(hiding: Hiding, phi: Any, importance: Any, prefix_tokens: int = 0, *, seed: int = 0) -> Measure:
    """The effect of random concepts of the same sizes: patches go by lot, as many at every step."""
    return Measure.mean(_effect(hiding, _by_lot(_steps(hiding, phi, importance, prefix_tokens, seed), seed)))


@metric(title="Importance agreement", better="higher", range=(0, 1))
def importance_agreement(
    hiding: Hiding, phi: Any, importance: Any, prefix_tokens: int = 0, *, seed: int = 0
) -> Measure:
    """How often the more important of two concepts of an image is also the one without which ŷ loses more; ½ by lot.

    The groups are those of `deletion`, each removed alone, as `pace.ablate` does; ties count as half.
    """
    steps, found = _steps(hiding, phi, importance, prefix_tokens, seed), np.full(len(hiding.rows), np.nan)
    for image, groups in enumerate(steps):
        kept = groups != np.arange(groups.max() + 1)[:, None]
        left = hiding.shares(np.full(len(kept), image), kept)
        earlier, later = np.triu_indices(len(left), 1)
        if len(earlier):
            found[image] = (np.sign(left[later] - left[earlier]).mean() + 1) / 2
    return Measure.mean(found)


@metric(title="Loss without the main concept", better="higher", range=(-1, 1))
def main_concept_loss(
    hiding: Hiding, phi: Any, importance: Any, grid: tuple[int, int], prefix_tokens: int = 0, *, seed: int = 0
) -> Measure:
    """How much more of p(ŷ) goes without an image's most important concept than without other patches.

    Those that go first in `deletion` are compared, as in `pace.ablate`, with as many elsewhere in the same shape and with
    patches by lot that get as much attention, whichever costs more.
    """
    gone = _steps(hiding, phi, importance, prefix_tokens, seed) == 0
    attention = theta_of(hiding.attention, "attention")

    def loss(gone: Array) -> Array:  # (n, draws, patches) → (n,)
        images, whole = np.repeat(np.arange(len(gone)), gone.shape[1]), np.ones((1, gone.shape[2]), bool)
        left = hiding.shares(images, ~gone.reshape(len(images), -1)).reshape(gone.shape[:2])
        before = hiding.shares(np.arange(len(gone)), whole.repeat(len(gone), 0))
        lost: Array = before - left.mean(1)
        return lost

    own = loss(gone[:, None])
    area = loss(elsewhere(gone, grid, np.random.default_rng([seed, 2])))
    attended = loss(as_attended(gone, attention, np.random.default_rng([seed, 3])))

    def values(weights: Array) -> Array:
        means = weights @ np.stack([own, area, attended], 1) / weights.sum(1, keepdims=True)
        found: Array = means[:, 0] - means[:, 1:].max(1)
        return found

    return Measure(len(own), values)


@metric(title="Gain over attention", better="higher", range=(-2, 2))
def gain_over_attention(hiding: Hiding, phi: Any, importance: Any, prefix_tokens: int = 0, *, seed: int = 0) -> Measure:
    """`concept_effect` − `effect_by_attention`, image by image; below 0, raw attention says more about the prediction."""
    steps = _steps(hiding, phi, importance, prefix_tokens, seed)
    return Measure.mean(_effect(hiding, steps) - _effect(hiding, _by_attention(hiding, steps)))


@metric(title="Gain over lot", better="higher", range=(-2, 2))
def gain_over_lot(hiding: Hiding, phi: Any, importance: Any, prefix_tokens: int = 0, *, seed: int = 0) -> Measure:
    """`concept_effect` − `effect_by_lot`, image by image; about 0, any other patches would do."""
    steps = _steps(hiding, phi, importance, prefix_tokens, seed)
    return Measure.mean(_effect(hiding, steps) - _effect(hiding, _by_lot(steps, seed)))


def _steps(hiding: Hiding, phi: Any, importance: Any, prefix_tokens: int, seed: int) -> Array:
    """(n, patches): the step at which each patch goes; patches of a group go together, the most important first."""
    patches, weights = patches_of(phi[hiding.rows], prefix_tokens), theta_of(importance, "importance")
    if patches.shape[:2] != hiding.attention.shape:
        raise ValueError(f"phi: expected {hiding.attention.shape} images and patches; found {patches.shape[:2]}")
    if weights.shape != (len(patches), patches.shape[2]):
        expected = (len(patches), patches.shape[2])
        raise ValueError(f"importance: expected shape {expected} for the hidden images; found {weights.shape}")
    ties = np.random.default_rng(seed).random((len(patches), _OWN + 1))
    steps = np.empty(patches.shape[:2], np.int64)
    for image, owners in enumerate(patches.argmax(2)):
        concepts, own, counts = np.unique(owners, return_inverse=True, return_counts=True)
        group = np.minimum(np.argsort(-counts, kind="stable").argsort(), _OWN)  # of every concept
        worth = np.bincount(group, weights[image, concepts])
        steps[image] = np.lexsort((ties[image, : len(worth)], -worth)).argsort()[group[own]]
    return steps


def _by_attention(hiding: Hiding, steps: Array) -> Array:
    return _same_sizes(steps, theta_of(hiding.attention, "attention"))


def _by_lot(steps: Array, seed: int) -> Array:
    return _same_sizes(steps, np.random.default_rng([seed, 1]).random(steps.shape))


def _same_sizes(steps: Array, scores: Array) -> Array:
    """Patches in the order of their scores, as many at every step as in `steps`."""
    found = np.empty_like(steps)
    np.put_along_axis(found, np.argsort(-scores, axis=1, kind="stable"), np.sort(steps, axis=1), axis=1)
    return found


def _areas(hiding: Hiding, steps: Array) -> tuple[Array, Array]:
    """Deletion and insertion (n,)."""
    gone = steps[:, None] < np.arange(steps.max() + 2)[:, None]  # (n, points, patches)
    images, shape = np.repeat(np.arange(len(steps)), gone.shape[1]), gone.shape[:2]
    removed, added = (hiding.shares(images, kept.reshape(len(images), -1)).reshape(shape) for kept in (~gone, gone))
    return _area(removed, gone.mean(2)), _area(added, gone.mean(2))


def _effect(hiding: Hiding, steps: Array) -> Array:
    removed, added = _areas(hiding, steps)
    effect: Array = added - removed
    return effect


def _area(values: Array, shares: Array) -> Array:
    """By trapezoids along the last axis."""
    found: Array = ((values[..., 1:] + values[..., :-1]) / 2 * np.diff(shares)).sum(-1)
    return found
