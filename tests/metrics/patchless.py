"""Pictures with local concepts, and explainers that know nothing of a patch, which must not pass on them."""

from typing import NamedTuple

import numpy as np
import torch

from pace import Explanation, Observations
from pace.baselines.factorization import k_means, nearest

GRID, DIM, CONCEPTS, CLASSES = (8, 8), 16, 10, 6
TRAIN, TEST = slice(0, 200), slice(200, 320)
_IMAGES, _PATCHES = 320, GRID[0] * GRID[1]
_BACKGROUNDS = 4  # concepts 0 to 3; the others are parts of objects
_PARTS = np.array([[4, 5], [6, 7], [8, 9], [4, 7], [6, 9], [8, 5]])  # of each class's object: a part is no class
_ROW, _COLUMN = np.indices(GRID).reshape(2, -1)
_PLACES = np.stack([_COLUMN / GRID[1], _ROW / GRID[0]], 1) + 0.5 / GRID[0]  # centres of the patches, as shares


class Pictures(NamedTuple):
    """Observations of the pictures and of crops of them, some mirrored."""

    seen: Observations
    perturbed: Observations
    yhat: np.ndarray


def pictures(seed: int = 0) -> Pictures:
    """A class's object of two parts lies somewhere on a background of two regions.

    An embedding is its concept's mean, its image's, its place's and noise. Attention prefers the object.
    """
    rng = np.random.default_rng(seed)
    label = rng.integers(CLASSES, size=_IMAGES)
    behind = rng.permuted(np.tile(np.arange(_BACKGROUNDS), (_IMAGES, 1)), axis=1)[:, :2]
    centre, radius = rng.uniform(0.3, 0.7, (_IMAGES, 1, 2)), rng.uniform(0.2, 0.35, (_IMAGES, 1))
    split, horizon = (np.stack([np.cos(a), np.sin(a)], -1) for a in rng.uniform(0, 2 * np.pi, (2, _IMAGES)))

    def concepts_at(points: np.ndarray) -> np.ndarray:
        """Of points (M, n, 2), as shares of width and height."""
        side = (np.einsum("mnd,md->mn", points - centre, split) > 0).astype(int)
        sky = (np.einsum("mnd,md->mn", points - 0.5, horizon) > 0).astype(int)
        inside = np.linalg.norm(points - centre, axis=2) < radius
        return np.where(inside, *(np.take_along_axis(of, n, 1) for of, n in ((_PARTS[label], side), (behind, sky))))

    crops = _crops(rng)
    shown = crops[:, None, :2] + _PLACES * (crops[:, None, 2:] - crops[:, None, :2])
    means, of_place = rng.normal(size=(CONCEPTS, DIM)), 0.3 * rng.normal(size=(_PATCHES, DIM))
    of_image = 0.4 * rng.normal(size=(_IMAGES, 1, DIM))
    predictions = np.where(np.eye(CLASSES)[label] > 0, 0.9, 0.1 / (CLASSES - 1))

    def observed(concepts: np.ndarray, crops: np.ndarray | None = None) -> Observations:
        embeddings = means[concepts] + of_image + of_place + 0.7 * rng.normal(size=(*concepts.shape, DIM))
        attention = np.where(concepts < _BACKGROUNDS, 1.0, 3.0) * rng.gamma(4, size=concepts.shape)
        return Observations(embeddings.astype(np.float32), attention, predictions, GRID, crops=crops)

    true, moved = (concepts_at(points) for points in (np.tile(_PLACES, (_IMAGES, 1, 1)), shown))
    return Pictures(observed(true), observed(moved, crops), label)


def _crops(rng: np.random.Generator) -> np.ndarray:
    """(M, 4) left, top, right, bottom: from a third of the picture to all of it, half of them mirrored."""
    size = np.sqrt(rng.uniform(0.3, 1, (_IMAGES, 1))) * np.ones((1, 2))
    corner = rng.uniform(0, 1, (_IMAGES, 2)) * (1 - size)
    box = np.concatenate([corner, corner + size], 1)
    mirrored = rng.random(_IMAGES) < 0.5
    box[mirrored] = box[mirrored][:, [2, 1, 0, 3]]
    return box


class View(NamedTuple):
    """What an explainer without a patch level may know of one view: the class, the image, attention, places, a lottery."""

    yhat: np.ndarray
    image: np.ndarray  # (M,), the cluster of the image's mean embedding
    rank: np.ndarray  # (M, patches), quarter of the patches by attention
    lot: np.ndarray  # (M, patches), one of four
    honest: np.ndarray  # (M, patches), concepts of k-means
    attention: np.ndarray


def views(world: Pictures) -> tuple[View, View]:
    both = (world.seen, world.perturbed)
    averages = [torch.as_tensor(some.embeddings.mean(1)) for some in both]
    learned = averages[0][TRAIN]
    kinds = k_means(learned, torch.ones(len(learned)), CLASSES, 0)
    lottery = np.random.default_rng(1)
    return tuple(
        View(
            world.yhat,
            nearest(average, kinds).numpy(),
            (-some.attention).argsort(1).argsort(1) // (_PATCHES // 4),
            lottery.integers(4, size=(_IMAGES, _PATCHES)),
            honest,
            some.attention,
        )
        for some, average, honest in zip(both, averages, k_means_concepts(world), strict=True)
    )


def k_means_concepts(world: Pictures) -> tuple[np.ndarray, np.ndarray]:
    """An honest explainer's concepts of both views."""
    tokens = [torch.as_tensor(some.embeddings) for some in (world.seen, world.perturbed)]
    learned = tokens[0][TRAIN].flatten(0, 1)
    centres = k_means(learned, torch.ones(len(learned)), CONCEPTS, 0)
    return tuple(nearest(some.flatten(0, 1), centres).view(some.shape[:2]).numpy() for some in tokens)


_HASH = np.random.default_rng(2).permutation(CLASSES * 4).reshape(CLASSES, 4)  # four concepts for every class
_QUADRANT = 2 * (_ROW // 4) + _COLUMN // 4
_CELL = 4 * (_ROW // 2) + _COLUMN // 2

# The concept (M, patches) of every patch.
PATCHLESS = {
    "class hash x quadrant": lambda view: _HASH[view.yhat[:, None], _QUADRANT],
    "class hash x rank of attention": lambda view: _HASH[view.yhat[:, None], view.rank],
    "image k-means, patches by attention": lambda view: _HASH[view.image[:, None], view.rank],
    "class group x position": lambda view: 16 * (view.yhat[:, None] // 2) + _CELL,
    "image k-means, patches by lot": lambda view: _HASH[view.image[:, None], view.lot],
    "class hash, patches by lot": lambda view: _HASH[view.yhat[:, None], view.lot],
    "position alone": lambda view: np.tile(_CELL, (_IMAGES, 1)),
    "k-means laid out again by attention": lambda view: _laid_out_by_attention(view),
}


def _laid_out_by_attention(view: View) -> np.ndarray:
    found = np.empty_like(view.honest)
    for concepts, attention, dealt in zip(view.honest, view.attention, found, strict=True):
        means = {k: attention[concepts == k].mean() for k in np.unique(concepts)}
        dealt[(-attention).argsort()] = sorted(concepts, key=lambda k: -means[k])
    return found


def explanation(concepts: np.ndarray, n_concepts: int) -> Explanation:
    """θ counts the patches."""
    phi = np.eye(n_concepts, dtype=np.float32)[concepts]
    return Explanation(phi.mean(1), phi.sum(1), phi, GRID)
