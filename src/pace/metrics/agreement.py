"""How well concepts agree with known names: predicted classes, the colours of Color, the body parts of CUB.

The concept of a patch is its largest φ, that of an image its largest |θ|.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pace.metrics.declare import Array, Measure, metric
from pace.metrics.inputs import as_array, entropy, labels_of, patches_of, theta_of

_SHUFFLES = 10


@metric(title="Class echo", better=None, range=(0, 1))
def class_echo(theta: Any, yhat: Any, *, seed: int = 0) -> Measure:
    """Agreement of an image's leading concept with its predicted class; 0 is chance, at 1 concepts are classes under
    another name.

    Normalised mutual information v of argmax_k |θ_mk| with ŷ_m over images, corrected for chance.
    Few images in many concepts and classes agree by accident: with v₀ the mean over shuffled ŷ it is (v − v₀) / (1 − v₀).
    """
    rows = theta_of(theta)
    images = len(rows)
    leading, classes, rng = np.abs(rows).argmax(1), labels_of(yhat, images), np.random.default_rng(seed)

    def agreement(names: Array) -> Measure:
        return Contingency(images, np.arange(images), leading, names).mutual_information()

    found, chance = agreement(classes), np.mean([agreement(rng.permutation(classes)).value() for _ in range(_SHUFFLES)])
    beyond = max(1 - chance, 1e-9)
    return Measure(images, lambda weights: ((found.values(weights) - chance) / beyond).clip(0, 1))


@metric(title="Colour recovery", better="higher", range=(0, 1))
def colour_recovery(phi: Any, colours: Any, prefix_tokens: int = 0) -> Measure:
    """Agreement (normalised mutual information) of a patch's concept with its true colour.

    NMI (arithmetic mean) over all patches; `colours` (M, rows, columns) or (M, patches) as `Color.patch_colors` gives them.
    Splitting a colour over several concepts costs a little, mixing colours in one concept a lot.
    """
    return _colours(phi, colours, prefix_tokens).mutual_information()


@metric(title="Colour accuracy", better="higher", range=(0, 1))
def colour_accuracy(phi: Any, colours: Any, prefix_tokens: int = 0) -> Measure:
    """Share of patches with the right colour when every colour is given one concept of its own.

    Colours and concepts are matched one to one, as well as possible over all patches. Further concepts count as wrong.
    """
    from scipy.optimize import linear_sum_assignment

    counts = _colours(phi, colours, prefix_tokens)

    def values(weights: Array) -> Array:
        return np.array([table[linear_sum_assignment(table, maximize=True)].sum() for table in counts.joint(weights)])

    return Measure(counts.images, values)


@metric(title="Colour purity", better="higher", range=(0, 1))
def colour_purity(phi: Any, colours: Any, prefix_tokens: int = 0) -> Measure:
    """Share of patches with the right colour when every concept is named after its most frequent colour.

    Many concepts may share a colour, so it rises with K: read it beside `colour_recovery`.
    """
    counts = _colours(phi, colours, prefix_tokens)
    return Measure(counts.images, lambda weights: counts.joint(weights).max(2).sum(1))


@metric(title="Part consistency", better="higher", range=(0, 1))
def part_consistency(phi: Any, parts: Any, prefix_tokens: int = 0) -> Measure:
    """Agreement (normalised mutual information) of concept and body part over the patches that hold a visible part.

    NMI (arithmetic mean); `parts` (M, n_parts) has the patch that holds each part, −1 where it cannot be seen.
    Patches count row by row without prefix tokens; `part_patches` finds them. A patch with two parts counts twice.
    """
    concepts, places = patches_of(phi, prefix_tokens), as_array(parts)
    if places.ndim != 2 or len(places) != len(concepts) or places.dtype.kind not in "iu":
        raise ValueError(
            f"parts: expected patch numbers of shape ({len(concepts)}, parts); found {places.dtype} {places.shape}"
        )
    if places.min(initial=-1) < -1 or places.max(initial=-1) >= concepts.shape[1]:
        raise ValueError(
            f"parts: expected patches -1 to {concepts.shape[1] - 1}; found {places.min()} to {places.max()}"
        )
    if not (places >= 0).any():
        raise ValueError("parts: no part is visible in any image")
    image, part = np.nonzero(places >= 0)
    leading = concepts.argmax(2)[image, places[image, part]]
    return Contingency(len(concepts), image, leading, part).mutual_information()


def part_patches(points: Any, size: tuple[int, int], grid: tuple[int, int]) -> Array:
    """The patch (M, n_parts) that holds each point, −1 for points that are not visible or lie outside the image.

    points (M, n_parts, 3): x, y in pixels of the model's input (see `pace.images.prepare_points`), and whether it is visible.
    size: height and width of the model's input. grid: rows and columns of its patches.
    """
    array = as_array(points).astype(np.float64)
    if array.ndim != 3 or array.shape[2] != 3:
        raise ValueError(f"points: expected shape (images, parts, 3): x, y, visible; found {array.shape}")
    column = np.floor(array[:, :, 0] * grid[1] / size[1])
    row = np.floor(array[:, :, 1] * grid[0] / size[0])
    inside = (array[:, :, 2] > 0) & (row >= 0) & (row < grid[0]) & (column >= 0) & (column < grid[1])
    found: Array = np.where(inside, row * grid[1] + column, -1).astype(np.int64)
    return found


class Contingency:
    """How often every concept meets every name in each of M images; sparse, since most pairs never meet.

    Kept per image, so that images can be resampled.
    """

    def __init__(self, images: int, image: Array, concept: Array, name: Array) -> None:
        from scipy.sparse import csr_array

        concepts, concept = np.unique(concept, return_inverse=True)
        names, name = np.unique(name, return_inverse=True)
        self.images, self.shape = images, (len(concepts), len(names))
        cell = concept.ravel() * len(names) + name.ravel()
        self._counts = csr_array((np.ones(len(cell)), (image, cell)), shape=(images, len(concepts) * len(names)))

    def joint(self, weights: Array) -> Array:
        """Shares (B, concepts, names) over all images as weighted; NaN where the weighted images have nothing to count."""
        counts = (self._counts.T @ weights.T).T
        total = counts.sum(1, keepdims=True)
        shares: Array = np.divide(counts, total, out=np.full_like(counts, np.nan), where=total > 0)
        return shares.reshape(len(weights), *self.shape)

    def mutual_information(self) -> Measure:
        """Normalised by the mean of both entropies; 0 where there is only one concept or one name."""

        def values(weights: Array) -> Array:
            joint = self.joint(weights)
            concept, name = entropy(joint.sum(2)), entropy(joint.sum(1))
            shared, mean = concept + name - entropy(joint.reshape(len(joint), -1)), (concept + name) / 2
            found: Array = np.divide(shared, mean, out=np.zeros_like(mean), where=~(mean < 1e-12)).clip(0, 1)
            return found

        return Measure(self.images, values)


def _colours(phi: Any, colours: Any, prefix_tokens: int) -> Contingency:
    concepts, truth = patches_of(phi, prefix_tokens), as_array(colours)
    images, patches, _ = concepts.shape
    if truth.ndim not in (2, 3) or len(truth) != images or truth[0].size != patches:
        raise ValueError(
            f"colours: expected {images} images of {patches} patches, the tokens of phi after {prefix_tokens} prefix tokens; "
            f"found {truth.shape}"
        )
    image = np.repeat(np.arange(images), patches)
    return Contingency(images, image, concepts.argmax(2).ravel(), truth.ravel())
