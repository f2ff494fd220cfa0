"""How well concepts agree with known names (classes, colours, parts), counted image by image so that images can be drawn."""

from __future__ import annotations

from typing import Any

import numpy as np

from pace.metrics.declare import Array, Measure, metric
from pace.metrics.inputs import entropy, labels_of, theta_of

_SHUFFLES = 10


class Tables:
    """How often every concept met every name, for each of M images. Most pairs never meet, so the counts are sparse."""

    def __init__(self, images: int, image: Array, concept: Array, name: Array) -> None:
        from scipy.sparse import csr_array

        concepts, concept = np.unique(concept, return_inverse=True)
        names, name = np.unique(name, return_inverse=True)
        self.images, self.shape = images, (len(concepts), len(names))
        cell = concept.ravel() * len(names) + name.ravel()
        self._counts = csr_array((np.ones(len(cell)), (image, cell)), shape=(images, len(concepts) * len(names)))

    def joint(self, weights: Array) -> Array:
        """Shares (B, concepts, names) over all images as weighted; NaN where no image with anything to count has weight."""
        counts = (self._counts.T @ weights.T).T
        total = counts.sum(1, keepdims=True)
        shares: Array = np.divide(counts, total, out=np.full_like(counts, np.nan), where=total > 0)
        return shares.reshape(len(weights), *self.shape)

    def mutual_information(self) -> Measure:
        """Normalised by the mean of both entropies; 0 where there is one concept or one name alone."""

        def values(weights: Array) -> Array:
            joint = self.joint(weights)
            concept, name = entropy(joint.sum(2)), entropy(joint.sum(1))
            shared, mean = concept + name - entropy(joint.reshape(len(joint), -1)), (concept + name) / 2
            found: Array = np.divide(shared, mean, out=np.zeros_like(mean), where=~(mean < 1e-12)).clip(0, 1)
            return found

        return Measure(self.images, values)


@metric(
    title="Class echo",
    better=None,
    range=(0, 1),
    meaning="Agreement of an image's leading concept with its predicted class; 0 is chance, at 1 concepts are classes under "
    "another name.",
)
def class_echo(theta: Any, yhat: Any, *, seed: int = 0) -> Measure:
    """Normalised mutual information of argmax_k |θ_mk| with ŷ_m over images, less what it is for shuffled ŷ.

    Few images in many concepts and classes agree by accident; of v, with v₀ the mean of shuffles, (v − v₀) / (1 − v₀) is left.
    """
    rows = theta_of(theta)
    images = len(rows)
    leading, classes, rng = np.abs(rows).argmax(1), labels_of(yhat, images), np.random.default_rng(seed)

    def agreement(names: Array) -> Measure:
        return Tables(images, np.arange(images), leading, names).mutual_information()

    found, chance = agreement(classes), np.mean([agreement(rng.permutation(classes)).value() for _ in range(_SHUFFLES)])
    beyond = max(1 - chance, 1e-9)
    return Measure(images, lambda weights: ((found.values(weights) - chance) / beyond).clip(0, 1))
