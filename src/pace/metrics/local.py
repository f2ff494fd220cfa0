"""The patch level: does a patch's concept (its largest φ) say more about the patch than its image, place and attention do?

Within-image information asks the embeddings, the warp scores ask a second view of the picture. Both need no truth and no
model, so that every method with a patch level has them. The scores "over attention" compare each with its floor: the same
concepts laid out again so that they know a patch's attention and nothing else. Laid out by lot or by place they get 0 or less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from pace.metrics.declare import Array, Measure, metric
from pace.metrics.inputs import blocks_of, concept_counts, patches_of, theta_of
from pace.places import matching_patches

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_PRIOR = 1.0  # patches without any effect that every concept starts with, so that rare concepts predict little


@metric(title="Within-image information", better="higher", range=(-math.inf, 1))
def within_image_information(
    phi: Any, embeddings: Any, grid: tuple[int, int], prefix_tokens: int = 0, *, seed: int = 0
) -> Measure:
    """Share of what sets a patch apart from its image and its place that its concept explains, in images not learned from.

    Every embedding less its image's mean and its grid place's mean is regressed on the concepts (less their own means over
    image and place) in one half of the images; the residual sum of squares is taken in the other half, and the other way round.
    1 for embeddings that are a concept's mean plus an image's and a place's; 0 where patches of an image do not differ in their
    concepts; a little below 0 where these are drawn by lot. A concept that the other half does not have predicts 0. NaN for
    fewer than two images. Embeddings are read twice, some images at a time.
    """
    return _information([_concepts(phi, grid, prefix_tokens)], embeddings, prefix_tokens, seed)[0]


@metric(title="Information over attention", better="higher", range=(-math.inf, math.inf))
def information_over_attention(
    phi: Any, embeddings: Any, attention: Any, grid: tuple[int, int], prefix_tokens: int = 0, *, seed: int = 0
) -> Measure:
    """How much more information there is than with the concepts laid out again by attention; at 0 patches are known by their
    attention alone.

    `within_image_information` less that of the other layout: in every image the concepts keep their numbers of patches, and
    those whose patches have more attention on average get the patches with the most.
    """
    concepts = _concepts(phi, grid, prefix_tokens)
    floor = _by_attention(concepts, attention, prefix_tokens, "attention")
    return _less(*_information([concepts, floor], embeddings, prefix_tokens, seed))


@metric(title="Warp agreement", better="higher", range=(-1, 1))
def warp_agreement(phi: Any, phi_perturbed: Any, crops: Any, grid: tuple[int, int], prefix_tokens: int = 0) -> Measure:
    """Agreement of the concepts of two patches that show the same place in picture and perturbed view; 0 is chance.

    Cohen's κ, pooled over images: Σ (agreement − chance) / Σ (1 − chance), where chance follows from the shares that the
    concepts have among the compared patches of the two views. NaN where all images have one concept only.
    """
    moved, _, there = _views(phi, phi_perturbed, crops, grid, prefix_tokens)
    concepts = 1 + max(moved.max(), there.max())
    chance = (concept_counts(moved, concepts) * concept_counts(there, concepts)).sum(1) / moved.shape[1] ** 2
    return _ratio((moved == there).mean(1) - chance, 1 - chance)


@metric(title="Warp gain", better="higher", range=(-1, 1))
def warp_gain(phi: Any, phi_perturbed: Any, crops: Any, grid: tuple[int, int], prefix_tokens: int = 0) -> Measure:
    """How much more often patches that show the same place in picture and perturbed view agree than patches at the same
    place of the grid.

    The difference of the two shares of patches, mean over images. Concepts that depend on the grid place get less than 0,
    concepts drawn by lot or the same all over an image 0.
    """
    return _gain(*_views(phi, phi_perturbed, crops, grid, prefix_tokens))


@metric(title="Warp gain over attention", better="higher", range=(-2, 2))
def warp_gain_over_attention(
    phi: Any,
    phi_perturbed: Any,
    attention: Any,
    attention_perturbed: Any,
    crops: Any,
    grid: tuple[int, int],
    prefix_tokens: int = 0,
) -> Measure:
    """How much larger the warp gain is than with the concepts laid out again by attention; at 0 patches are known by their
    attention alone.

    `warp_gain` less that of the layout of `information_over_attention`, each view by its own attention.
    """
    moved, here, there = _views(phi, phi_perturbed, crops, grid, prefix_tokens)
    floor = _by_attention(here, attention, prefix_tokens, "attention")
    floor_moved = _by_attention(moved, attention_perturbed, prefix_tokens, "attention_perturbed")
    floor_there = np.take_along_axis(floor, matching_patches(crops, grid), 1)
    return _less(_gain(moved, here, there), _gain(floor_moved, floor, floor_there))


def _concepts(phi: Any, grid: tuple[int, int], prefix_tokens: int) -> Array:
    """The concept (M, patches) of every patch."""
    found: Array = patches_of(phi, prefix_tokens).argmax(2)
    if grid[0] * grid[1] != found.shape[1]:
        raise ValueError(f"grid: expected {found.shape[1]} patches as phi has; found {grid[0]} x {grid[1]}")
    return found


def _views(
    phi: Any, phi_perturbed: Any, crops: Any, grid: tuple[int, int], prefix_tokens: int
) -> tuple[Array, Array, Array]:
    """Concepts (M, patches) of the view, of the picture, and of the picture's patches that show what the view's do."""
    here, moved = (_concepts(some, grid, prefix_tokens) for some in (phi, phi_perturbed))
    matches = matching_patches(crops, grid)
    if not len(here) == len(moved) == len(matches):
        raise ValueError(f"crops, phi_perturbed: expected {len(here)} images; found {len(matches)} and {len(moved)}")
    return moved, here, np.take_along_axis(here, matches, 1)


def _gain(moved: Array, here: Array, there: Array) -> Measure:
    return Measure.mean((moved == there).mean(1) - (moved == here).mean(1))


def _by_attention(concepts: Array, attention: Any, prefix_tokens: int, name: str) -> Array:
    """The concepts (M, patches) of every image dealt out again, in order of their patches' mean attention."""
    weights = theta_of(attention, name)[:, prefix_tokens:]
    if weights.shape != concepts.shape:
        raise ValueError(f"{name}: expected patches {concepts.shape} as phi has; found {weights.shape}")
    total = concept_counts(concepts, weights=weights)
    means = total / concept_counts(concepts).clip(1)
    dealt = np.lexsort((concepts, -np.take_along_axis(means, concepts, 1)))  # concepts of equal attention stay apart
    found = np.empty_like(concepts)
    order = np.argsort(-weights, axis=1, kind="stable")
    np.put_along_axis(found, order, np.take_along_axis(concepts, dealt, 1), 1)
    return found


def _less(measure: Measure, floor: Measure) -> Measure:
    """The difference over the same images, which is far surer than either."""
    return Measure(measure.images, lambda weights: measure.values(weights) - floor.values(weights))


def _ratio(above: Array, below: Array) -> Measure:
    """Σ above / Σ below over images; NaN where there is nothing below."""

    def values(weights: Array) -> Array:
        total = weights @ below
        found: Array = np.divide(weights @ above, total, out=np.full(len(weights), np.nan), where=total > 0)
        return found

    return Measure(len(above), values)


def _information(layouts: list[Array], embeddings: Any, prefix_tokens: int, seed: int) -> list[Measure]:
    """For each way to lay out concepts (M, patches); worked out where the embeddings are, which are read twice."""
    import torch

    images, patches = layouts[0].shape
    if (found := tuple(embeddings.shape[:2])) != (images, patches + prefix_tokens):
        raise ValueError(f"embeddings: expected {images} images of {patches + prefix_tokens} tokens; found {found}")
    if images < 2:
        return [Measure.fixed(math.nan)] * len(layouts)
    layouts = [np.unique(some, return_inverse=True)[1].reshape(some.shape) for some in layouts]  # those in use
    half = np.zeros(images, np.int64)
    half[np.random.default_rng(seed).permutation(images)[: images // 2]] = 1
    learned = _learn(layouts, embeddings, prefix_tokens, half)
    whole, explained = np.empty(images), np.empty((len(layouts), images))
    for rows, embedded in _within_images(embeddings, prefix_tokens):
        for side, (places, of_layouts) in enumerate(learned):
            held_out = rows[half[rows] != side]
            rest = embedded[torch.from_numpy(half[rows] != side).to(embedded.device)] - places
            whole[held_out] = rest.square().sum((1, 2)).cpu()
            for number, (effects, expected) in enumerate(of_layouts):
                predicted = effects[torch.from_numpy(layouts[number][held_out]).to(effects.device)] - expected
                predicted -= predicted.mean(1, keepdim=True)
                missed = (rest - predicted).square().sum((1, 2)).cpu()
                explained[number, held_out] = whole[held_out] - missed.numpy()
    return [_ratio(some, whole) for some in explained]


def _learn(
    layouts: list[Array], embeddings: Any, prefix_tokens: int, half: Array
) -> list[tuple[Tensor, list[tuple[Tensor, Tensor]]]]:
    """For both halves: means of the places (patches, d), and by layout effects of the concepts (K, d) and the means of these
    at the places."""
    import torch

    patches, dim, used = layouts[0].shape[1], embeddings.shape[2], [some.max() + 1 for some in layouts]
    at_places, of_concepts = np.zeros((2, patches, dim)), [np.zeros((2, count, dim)) for count in used]
    for rows, embedded in _within_images(embeddings, prefix_tokens):
        for side in range(2):
            own = rows[half[rows] == side]
            some = embedded[torch.from_numpy(half[rows] == side).to(embedded.device)]
            at_places[side] += some.sum(0).cpu().numpy()
            for sums, layout, count in zip(of_concepts, layouts, used, strict=True):
                owner = torch.from_numpy(layout[own]).to(some.device)
                sums[side] += _sums_of(owner.flatten(), some.flatten(0, 1), count).cpu().numpy()
    found = []
    for side in range(2):
        places = at_places[side] / (half == side).sum()
        effects = [
            _effects(layout[half == side], sums[side], places, embedded.device)
            for layout, sums in zip(layouts, of_concepts, strict=True)
        ]
        found.append((torch.from_numpy(places).to(embedded), effects))
    return found


def _sums_of(owner: Tensor, x: Tensor, owners: int) -> Tensor:
    """(owners, d): the sum of the rows of x (n, d) that each owns, in the same order every time, on a GPU too."""
    from torch.nn.functional import embedding_bag

    sizes = owner.bincount(minlength=owners)
    return embedding_bag(owner.argsort(stable=True), x, sizes.cumsum(0) - sizes, mode="sum")


def _effects(concepts: Array, sums: Array, places: Array, device: torch.device) -> tuple[Tensor, Tensor]:
    """Effects of the concepts (K, d), and the mean of these at the places (patches, d), by the images of one half.

    sums (K, d) are of the concepts' patches, places (patches, d) the means at the places.
    """
    import torch

    (images, patches), used = concepts.shape, len(sums)
    by_image, by_place = concept_counts(concepts, used), concept_counts(concepts.T, used)
    sizes = by_place.sum(0)
    # Normal equations of a regression in which images and places have means of their own.
    shared = by_image.T @ by_image / patches + by_place.T @ by_place / images
    shared -= np.outer(sizes, sizes) / (images * patches)
    effects = np.linalg.solve(np.diag(sizes + _PRIOR) - shared, sums - by_place.T @ places)
    found = torch.from_numpy(effects), torch.from_numpy(by_place @ effects / images)
    return found[0].to(device, torch.float32), found[1].to(device, torch.float32)


def _within_images(embeddings: Any, prefix_tokens: int) -> Iterator[tuple[Array, Tensor]]:
    """Numbers of some images and the embeddings of their patches, less the image's mean; all images, some at a time."""
    for rows, embedded in blocks_of(embeddings):
        patches = embedded[:, prefix_tokens:].float()
        yield rows, patches - patches.mean(1, keepdim=True)
