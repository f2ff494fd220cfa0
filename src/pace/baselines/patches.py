"""Concepts learned from patches: every token gets coefficients φ of K concepts, and θ is their mean over an image's tokens.

All observed tokens have equal weight, including CLS where it counts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pace.baselines.explainer import Explainer, PointExplanation, SplitModel, check_counts, point
from pace.explanation import Explanation
from pace.observations import Observations

SAMPLE = 300_000  # patches to learn from: thousands for each of a hundred concepts
# Fewer for factorisations: each dictionary channel is a regression on K coefficients, and every step costs far more.
FACTOR_SAMPLE = 100_000
_TOKENS_AT_ONCE_CPU, _TOKENS_AT_ONCE = 1 << 14, 1 << 18


class PatchConcepts(Explainer):
    """A method that learns from patches alone and never runs the model.

    Parameters
    ----------
    n_concepts
        K.
    sample
        Number of patches to learn from, equally many from every training image.
    batch_size
        Images explained at once.
    """

    def __init__(self, n_concepts: int = 100, sample: int = SAMPLE, batch_size: int | None = None) -> None:
        check_counts(n_concepts=n_concepts, sample=sample, batch_size=batch_size)
        self.n_concepts, self.sample, self.batch_size = n_concepts, sample, batch_size

    def _fit(self, backbone: SplitModel, train: Observations, perturbed: Observations | None, seed: int) -> None:
        self._learn(draw_patches(train, self.sample, self.n_concepts, seed, self.device_), seed)

    def _explain(self, observations: Observations, seed: int, patches: bool) -> Explanation:
        def find(tokens: Tensor, images: slice) -> Tensor:
            return self._coefficients(tokens.flatten(0, 1)).reshape(*tokens.shape[:2], -1)

        return explain_tokens(observations, find, self.n_concepts, self.device_, self.batch_size, patches)

    @abstractmethod
    def _learn(self, patches: Tensor, seed: int) -> None:
        """From patches (n, d)."""

    @abstractmethod
    def _coefficients(self, tokens: Tensor) -> Tensor:
        """φ (n, K) of tokens (n, d)."""


def draw_patches(train: Observations, sample: int, at_least: int, seed: int, device: torch.device) -> Tensor:
    """About `sample` patches (n, d), image by image, equally many from each."""
    each = min(train.n_tokens, -(-sample // len(train)))
    if each * len(train) < at_least:
        raise ValueError(f"n_concepts={at_least} is more than the {each * len(train)} patches there are to learn from")
    order = np.random.default_rng(seed).random((len(train), train.n_tokens), dtype=np.float32)
    chosen = torch.from_numpy(order.argpartition(each - 1, axis=1)[:, :each]).to(device)
    found = []
    for images, batch in train.batches(_images_at_once(train, device), device, torch.float32):
        places = chosen[images, :, None].expand(-1, -1, train.dim)
        found.append(batch.embeddings.gather(1, places).flatten(0, 1))
    return torch.cat(found)


def explain_tokens(
    observations: Observations,
    find: Callable[[Tensor, slice], Tensor],
    n_concepts: int,
    device: torch.device,
    batch_size: int | None,
    patches: bool,
) -> PointExplanation:
    """φ (B, J, K) by `find` from the tokens (B, J, d) of a batch and its place among the images; θ is the mean over tokens."""
    theta = np.empty((len(observations), n_concepts), np.float32)
    phi = np.empty((len(observations), observations.n_tokens, n_concepts), np.float32) if patches else None
    size = batch_size or _images_at_once(observations, device)
    for images, batch in observations.batches(size, device, torch.float32):
        found = find(batch.embeddings, images)
        theta[images] = found.mean(1).cpu().numpy()
        if phi is not None:
            phi[images] = found.cpu().numpy()
    return point(theta, phi, observations)


def _images_at_once(observations: Observations, device: torch.device) -> int:
    tokens = _TOKENS_AT_ONCE_CPU if device.type == "cpu" else _TOKENS_AT_ONCE
    return max(1, tokens // observations.n_tokens)
