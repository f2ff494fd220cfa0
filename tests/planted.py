"""Observations drawn from the model itself, so that the answer is known."""

from typing import NamedTuple

import numpy as np

from pace import Observations


class Planted(NamedTuple):
    observations: Observations
    perturbed: Observations
    means: np.ndarray  # (K, d)
    concepts: np.ndarray  # (M, J)
    theta: np.ndarray  # (M, K)


def planted(
    seed: int = 0, k: int = 8, d: int = 32, images: int = 120, grid: tuple[int, int] = (6, 6), spread: float = 0.5,
    classes: int = 3, alpha: float = 0.3,
) -> Planted:  # fmt: skip
    rng = np.random.default_rng(seed)
    tokens = grid[0] * grid[1] + 1
    means = rng.normal(size=(k, d)) * (16 / d) ** 0.5
    theta = rng.dirichlet(np.full(k, alpha), images)
    concepts = np.stack([rng.choice(k, tokens, p=row) for row in theta])
    attention = rng.dirichlet(np.full(tokens, 2.0), images)
    scores = np.exp(6 * theta @ rng.normal(size=(k, classes)))
    predictions = scores / scores.sum(1, keepdims=True)

    def view() -> Observations:
        embeddings = means[concepts] + spread * rng.normal(size=(images, tokens, d)) * (16 / d) ** 0.5
        return Observations(embeddings, attention, predictions, grid=grid, prefix_tokens=1)

    return Planted(view(), view(), means, concepts, theta)
