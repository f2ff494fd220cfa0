"""How well the concepts of patches (their largest φ) agree with known names, the colours of Color, the parts and kinds of Birds
and the body parts of CUB, with those of another fit, and with the patches themselves.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pace.metrics.declare import Array, Measure, metric
from pace.metrics.inputs import as_array, blocks_of, entropy, patches_of


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


@metric(title="Part recovery", better="higher", range=(0, 1))
def part_recovery(phi: Any, true_parts: Any, part_of: Any = None, prefix_tokens: int = 0) -> Measure:
    """Agreement (normalised mutual information) of a patch's leading part with its true part.

    NMI (arithmetic mean) over the patches that have one; `true_parts` (M, rows, columns) or (M, patches) as `Birds.patch_parts`
    gives them, −1 for patches that do not count.
    `part_of` (K,) says of which part every concept is a kind; without it every concept is a part of its own.
    """
    shares = patches_of(phi, prefix_tokens)
    if part_of is not None:
        shares = shares @ np.eye(as_array(part_of).max() + 1, dtype=shares.dtype)[as_array(part_of)]
    return _named(shares.argmax(2), true_parts, "true_parts").mutual_information()


@metric(title="Kind accuracy", better="higher", range=(0, 1))
def kind_accuracy(phi: Any, true_parts: Any, true_kinds: Any, prefix_tokens: int = 0) -> Measure:
    """Share of patches of the right kind when, within a true part, every concept is named after its most frequent kind.

    Every part of two kinds or more counts alike, since the background holds most patches. Which part a patch is of is given:
    read it beside `part_recovery`. Chance is high and rises with K: 30 names drawn by lot for 120 birds have 0.65.
    """
    leading = patches_of(phi, prefix_tokens).argmax(2)
    part, kind = (
        _names(leading, truth, name) for name, truth in (("true_parts", true_parts), ("true_kinds", true_kinds))
    )
    tables = [
        Contingency(len(leading), np.nonzero(part == own)[0], leading[part == own], kind[part == own])
        for own in np.unique(part[part >= 0])
        if len(np.unique(kind[part == own])) > 1
    ]

    def values(weights: Array) -> Array:
        right = np.array([table.joint(weights).max(2).sum(1) for table in tables]).reshape(-1, len(weights))
        seen = np.isfinite(right)  # a small part may be in none of the images drawn
        found: Array = np.where(seen, right, 0).sum(0) / np.where(seen.any(0), seen.sum(0), np.nan)
        return found

    return Measure(len(leading), values)


@metric(title="Part consistency", better="higher", range=(0, 1))
def part_consistency(phi: Any, parts: Any, prefix_tokens: int = 0) -> Measure:
    """Agreement (normalised mutual information) of concept and body part over the patches that hold a visible part.

    NMI (arithmetic mean); `parts` (M, n_parts) has the patch that holds each part, −1 where it cannot be seen.
    Patches count row by row without prefix tokens. A patch with two parts counts twice.
    """
    return _parts(phi, parts, prefix_tokens).mutual_information()


@metric(title="Part consistency, Rand index", better="higher", range=(-0.5, 1))
def part_ari(phi: Any, parts: Any, prefix_tokens: int = 0) -> Measure:
    """Agreement (adjusted Rand index) of concept and body part over the patches that hold a visible part; 0 is chance.

    Of pairs of such patches, how many more than by chance are alike in both or different in both. Splitting a part over many
    concepts costs far more than in `part_consistency`.
    """
    return _parts(phi, parts, prefix_tokens).rand_index()


@metric(title="Part consistency of position alone", better=None, range=(0, 1))
def part_consistency_by_position(phi: Any, parts: Any, grid: tuple[int, int], prefix_tokens: int = 0) -> Measure:
    """Part consistency when a patch's concept is its place in the picture: concepts that are no better follow no parts.

    The picture is divided into as many cells, or a few less, as there are concepts that lead in any patch.
    """
    leading, image, place, part = _visible(phi, parts, prefix_tokens)
    row, column = np.divmod(place, grid[1])
    cell = cell_of((column + 0.5) / grid[1], (row + 0.5) / grid[0], len(np.unique(leading)))
    return Contingency(len(leading), image, cell, part).mutual_information()


def cell_of(x: Array, y: Array, cells: int) -> Array:
    """The cell that each point from 0 to 1 falls in, of a regular grid of so many cells or a few less; those at the border
    reach out."""
    rows = math.isqrt(cells)
    columns = cells // rows
    row, column = np.floor(y * rows).clip(0, rows - 1), np.floor(x * columns).clip(0, columns - 1)
    found: Array = (row * columns + column).astype(np.int64)
    return found


@metric(title="Seeds alike", better="higher", range=(-1, 1))
def seeds_alike(phi: Any, phi_other: Any, prefix_tokens: int = 0) -> Measure:
    """Share of patches whose concept in one fit is the match of their concept in another fit with another start, corrected
    for chance: 1 for the same concepts, 0 for unrelated ones.

    (v − v₀) / (1 − v₀): concepts are matched one to one so that the share v is largest, v₀ is the share if the concepts of
    the two fits were independent. Nothing is matched again for the interval. 0 where both fits have a single concept.
    """
    from scipy.optimize import linear_sum_assignment

    first, second = patches_of(phi, prefix_tokens).argmax(2), patches_of(phi_other, prefix_tokens).argmax(2)
    if first.shape != second.shape:
        raise ValueError(f"phi_other: expected images and patches {first.shape} as phi has; found {second.shape}")
    shape = first.max() + 1, second.max() + 1
    table = np.bincount((first * shape[1] + second).ravel(), minlength=shape[0] * shape[1]).reshape(shape)
    ours, theirs = linear_sum_assignment(table, maximize=True)
    of_first, of_second = (np.full(size, -1) for size in table.shape)  # the number of every concept's pair
    of_first[ours], of_second[theirs] = np.arange(len(ours)), np.arange(len(ours))
    alike = ((of_first[first] == of_second[second]) & (of_first[first] >= 0)).mean(1)
    shares = [
        np.stack([np.bincount(row + 1, minlength=len(ours) + 1)[1:] for row in pairs]) / first.shape[1]
        for pairs in (of_first[first], of_second[second])
    ]

    def values(weights: Array) -> Array:
        total = weights.sum(1)
        chance = np.prod([weights @ share / total[:, None] for share in shares], axis=0).sum(1)
        found: Array = np.divide(
            weights @ alike / total - chance, 1 - chance, out=np.zeros_like(chance), where=chance < 1
        )
        return found

    return Measure(len(first), values)


@metric(title="Reconstruction", better="higher", range=(-math.inf, 1))
def reconstruction(phi: Any, embeddings: Any, concepts: Any, offset: Any, prefix_tokens: int = 0) -> Measure:
    """Share of the variance of the patches that their concepts rebuild.

    1 − Σ‖e − ê‖² / Σ‖e − ē‖² over patches with ê = offset + Σ_k φ_k · concept k; concepts (K, d), offset 0 or (d,).
    More concepts for every patch rebuild more: compare methods that give it equally many.
    """
    import torch

    weights, rows = patches_of(phi, prefix_tokens), torch.from_numpy(as_array(concepts)).double()
    images, patches, _ = weights.shape
    left, sums, squares = np.empty(images), np.empty((images, rows.shape[1])), np.empty(images)
    for some, embedded in blocks_of(embeddings):
        tokens = embedded[:, prefix_tokens:].double()
        shares = torch.from_numpy(weights[some]).to(tokens)
        rebuilt = torch.from_numpy(as_array(offset)).to(tokens) + shares @ rows.to(tokens.device)
        left[some] = (tokens - rebuilt).square().sum((1, 2)).cpu()
        sums[some], squares[some] = tokens.sum(1).cpu(), tokens.square().sum((1, 2)).cpu()
    mean = sums.sum(0) / (images * patches)
    spread = squares - 2 * sums @ mean + patches * mean @ mean
    return Measure(images, lambda drawn: 1 - (drawn @ left) / (drawn @ spread))


class Contingency:
    """How often every concept meets every name, by image so that images can be resampled; sparse: most pairs never meet."""

    def __init__(self, images: int, image: Array, concept: Array, name: Array) -> None:
        from scipy.sparse import csr_array

        concepts, concept = np.unique(concept, return_inverse=True)
        names, name = np.unique(name, return_inverse=True)
        self.images, self.shape = images, (len(concepts), len(names))
        cell = concept.ravel() * len(names) + name.ravel()
        self._counts = csr_array((np.ones(len(cell)), (image, cell)), shape=(images, len(concepts) * len(names)))

    def joint(self, weights: Array) -> Array:
        """Shares (B, concepts, names) over the weighted images; NaN where these have nothing to count."""
        counts = self._weighted(weights)
        total = counts.sum((1, 2), keepdims=True)
        shares: Array = np.divide(counts, total, out=np.full_like(counts, np.nan), where=total > 0)
        return shares

    def _weighted(self, weights: Array) -> Array:
        counts: Array = (self._counts.T @ weights.T).T
        return counts.reshape(len(weights), *self.shape)

    def rand_index(self) -> Measure:
        """Adjusted for chance (Hubert & Arabie 1985); 0 where there is only one concept and one name."""

        def values(weights: Array) -> Array:
            counts = self._weighted(weights)
            both, concept, name = _pairs(counts), _pairs(counts.sum(2)), _pairs(counts.sum(1))
            every = _pairs(counts.sum((1, 2))[:, None])
            chance = np.divide(concept * name, every, out=np.full_like(every, np.nan), where=every > 0)
            most = (concept + name) / 2 - chance
            found: Array = np.divide(both - chance, most, out=np.zeros_like(most), where=~(np.abs(most) < 1e-12))
            return found

        return Measure(self.images, values)

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
    return _named(patches_of(phi, prefix_tokens).argmax(2), colours, "colours")


def _named(leading: Array, truth: Any, called: str) -> Contingency:
    names = _names(leading, truth, called)
    known = names >= 0
    return Contingency(len(leading), np.nonzero(known)[0], leading[known], names[known])


def _names(leading: Array, truth: Any, called: str) -> Array:
    """The patches' names (M, patches), given so or as (M, rows, columns); `leading` (M, patches) is what leads in them."""
    (images, patches), names = leading.shape, as_array(truth)
    if names.ndim not in (2, 3) or len(names) != images or names[0].size != patches:
        raise ValueError(f"{called}: expected {images} images of {patches} patches as phi has; found {names.shape}")
    return names.reshape(images, patches)


def _parts(phi: Any, parts: Any, prefix_tokens: int) -> Contingency:
    leading, image, place, part = _visible(phi, parts, prefix_tokens)
    return Contingency(len(leading), image, leading[image, place], part)


def _visible(phi: Any, parts: Any, prefix_tokens: int) -> tuple[Array, Array, Array, Array]:
    """The leading concept of every patch (M, patches), and image, patch and name of every visible part."""
    concepts, places = patches_of(phi, prefix_tokens), as_array(parts)
    images, patches, _ = concepts.shape
    if places.ndim != 2 or len(places) != images or places.dtype.kind not in "iu":
        raise ValueError(f"parts: expected patch numbers ({images}, parts); found {places.dtype} {places.shape}")
    if not (places >= 0).any() or places.min() < -1 or places.max() >= patches:
        raise ValueError(f"parts: expected visible patches 0 to {patches - 1}, −1 for none; found {np.unique(places)}")
    image, part = np.nonzero(places >= 0)
    return concepts.argmax(2), image, places[image, part], part


def _pairs(counts: Array) -> Array:
    """How many pairs have both in the same cell, summed over cells."""
    found: Array = (counts * (counts - 1) / 2).reshape(len(counts), -1).sum(1)
    return found
