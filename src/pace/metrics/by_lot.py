"""Concepts drawn by lot: what an explanation of the same shape is worth that was not learned."""

from __future__ import annotations

import numpy as np
import torch

from pace.metrics.declare import Array
from pace.observations import Device, Observations

_TOKENS_AT_ONCE = 1 << 15


def random_mixtures(
    train: Observations, test: Observations, n_concepts: int, *, seed: int = 0, device: Device = None
) -> tuple[Array, Array]:
    """θ (M, K) of train and test when K tokens drawn from the training images are the concepts.

    Every token has the concept it is nearest to, and counts by its attention. None is a GPU if there is one.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    tokens = len(train) * train.n_tokens
    drawn = np.random.default_rng(seed).choice(tokens, min(n_concepts, tokens), replace=False)
    images, place = np.unique(drawn // train.n_tokens, return_inverse=True)
    held = train.batch(images.tolist(), device, torch.float32).embeddings
    concepts = held[torch.from_numpy(place), torch.from_numpy(drawn % train.n_tokens)]

    def mixtures(observations: Observations) -> Array:
        theta = torch.zeros(len(observations), len(concepts))
        size = max(1, _TOKENS_AT_ONCE // observations.n_tokens)
        for some, batch in observations.batches(size, device, torch.float32):
            nearest = torch.cdist(batch.embeddings.flatten(0, 1), concepts).argmin(1).view_as(batch.attention)
            shares = batch.attention / batch.attention.sum(1, keepdim=True)
            theta[some] = torch.zeros(len(shares), len(concepts), device=device).scatter_add(1, nearest, shares).cpu()
        return theta.numpy()

    return mixtures(train), mixtures(test)
