"""Explainers that explain nothing (and one that does), on images whose patches have known colours."""

from typing import NamedTuple

import numpy as np

from pace import Explanation

IMAGES, PATCHES, COLOURS, CONCEPTS, CLASSES = 160, 16, 6, 12, 3
TRAIN, TEST = slice(0, 120), slice(120, 160)


class World(NamedTuple):
    """Images of six colours, two to a class; the prediction is the class whose colours cover more patches."""

    colours: np.ndarray  # (M, 16)
    seen: np.ndarray  # (M, 16), what is left of the colours after a perturbation
    yhat: np.ndarray  # (M,)
    yhat_perturbed: np.ndarray


class Case(NamedTuple):
    theta: np.ndarray
    theta_perturbed: np.ndarray
    phi: np.ndarray
    attention: np.ndarray


def world(seed: int = 0) -> World:
    rng = np.random.default_rng(seed)
    label = rng.integers(CLASSES, size=IMAGES)
    mixtures = rng.dirichlet(np.full(COLOURS, 0.3), IMAGES)
    mixtures[np.arange(IMAGES), 2 * label] += 0.6
    mixtures[np.arange(IMAGES), 2 * label + 1] += 0.4
    mixtures /= mixtures.sum(1, keepdims=True)
    colours = np.stack([rng.choice(COLOURS, PATCHES, p=mixture) for mixture in mixtures])
    seen = np.where(rng.random(colours.shape) < 0.08, rng.integers(COLOURS, size=colours.shape), colours)
    return World(colours, seen, *(predicted(c) for c in (colours, seen)))


def predicted(colours: np.ndarray) -> np.ndarray:
    return np.stack([(colours // 2 == label).sum(1) for label in range(CLASSES)], 1).argmax(1)


def one_hot(concepts: np.ndarray) -> np.ndarray:
    return np.eye(CONCEPTS)[concepts]


def sound(w: World) -> Case:
    """The colours are the concepts."""

    def theta(colours: np.ndarray) -> np.ndarray:
        counts = one_hot(colours).sum(1) + 0.01
        return counts / counts.sum(1, keepdims=True)

    return case(theta(w.colours), theta(w.seen), one_hot(w.colours))


def constant(w: World) -> Case:
    theta = np.full((IMAGES, CONCEPTS), 1 / CONCEPTS)
    return case(theta, theta, np.full((IMAGES, PATCHES, CONCEPTS), 1 / CONCEPTS))


def random(w: World) -> Case:
    rng = np.random.default_rng(1)
    theta, theta_perturbed = (rng.dirichlet(np.full(CONCEPTS, 0.3), IMAGES) for _ in range(2))
    return case(theta, theta_perturbed, rng.dirichlet(np.full(CONCEPTS, 0.3), (IMAGES, PATCHES)))


def one_concept_per_class(w: World) -> Case:
    phi = np.repeat(one_hot(w.yhat)[:, None], PATCHES, 1)
    return case(one_hot(w.yhat), one_hot(w.yhat_perturbed), phi)


def one_concept_for_all_patches(w: World) -> Case:
    """Every image has one concept of its own choice, the same all over it."""
    colour = one_hot(np.array([np.bincount(row).argmax() for row in w.colours]))
    perturbed = one_hot(np.array([np.bincount(row).argmax() for row in w.seen]))
    return case(colour, perturbed, np.repeat(colour[:, None], PATCHES, 1))


def cls_alone(w: World) -> Case:
    """Sound patches, but CLS has nearly all the weight and knows the class."""
    attention = np.full((IMAGES, PATCHES + 1), 0.1 / PATCHES)
    attention[:, 0] = 0.9
    ours = sound(w)
    theta, perturbed = (
        0.9 * one_hot(yhat) + 0.1 * below
        for yhat, below in ((w.yhat, ours.theta), (w.yhat_perturbed, ours.theta_perturbed))
    )
    return Case(theta, perturbed, np.concatenate([one_hot(w.yhat)[:, None], ours.phi[:, 1:]], 1), attention)


def case(theta: np.ndarray, perturbed: np.ndarray, phi: np.ndarray) -> Case:
    """With a CLS token that has its even share of the weight and the same concepts as the image."""
    phi = np.concatenate([theta[:, None], phi], 1)
    return Case(theta, perturbed, phi, np.full((IMAGES, PATCHES + 1), 1 / (PATCHES + 1)))


def explanation(theta: np.ndarray, phi: np.ndarray | None = None) -> Explanation:
    return Explanation(theta, theta, phi, grid=(4, 4), prefix_tokens=1)
