"""Methods that give every hidden channel its part in the predicted class's logit: K = d quasi-concepts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from pace.baselines.explainer import SplitModel, check_counts, point
from pace.baselines.head import Head, Part
from pace.explanation import Array, Explanation
from pace.observations import Observations


class Attribution:
    """What they share: they keep h, learn at most averages of the training tokens, and have no dataset level.

    `batch_size` is how many images are worked on at once; None is as many as memory allows.
    """

    name: str
    repeats = 1
    concepts_: Array | None = None
    head_: Head

    def __init__(self, batch_size: int | None = None) -> None:
        check_counts(batch_size=batch_size)
        self.batch_size = batch_size

    def fit(
        self,
        backbone: SplitModel,
        train: Observations,
        *,
        perturbed: Observations | None = None,
        seed: int = 0,
        device: Any = None,
    ) -> Self:
        self.head_ = Head(backbone, train)
        self._learn(train)
        return self

    def _learn(self, train: Observations) -> None:
        """Nothing, unless a method says otherwise."""


class TokenAttribution(Attribution, ABC):
    """Attributions of single tokens' channels. They are the patch level; θ is their mean over tokens.

    CLS is one of these tokens, counted as a patch or not: often it has all of the weight, and that must not go unseen.
    """

    def explain(self, observations: Observations, *, seed: int = 0, patches: bool = True) -> Explanation:
        head, (images, _, dim) = self.head_, observations.shape
        theta = np.empty((images, dim), np.float32)
        phi = np.zeros((images, head.n_tokens, dim), np.float32) if patches else None
        reads = head.reads.cpu().numpy()
        for part in head.parts(observations, self.batch_size or head.rows(gradients=True)):
            found = self._attribute(part, seed)
            # Tokens that h does not read count as zeros.
            theta[part.images] = (found.sum(1) / head.n_tokens).cpu().numpy()
            if phi is not None:
                phi[part.images, reads] = found.cpu().numpy()
        return replace(point(theta, phi, observations), prefix_tokens=head.prefix_tokens)

    @abstractmethod
    def _attribute(self, part: Part, seed: int) -> Tensor:
        """(B, R, d)."""


class ChannelAttribution(Attribution):
    """Attributions of channels of all tokens at once, against their training mean. They have no patch level."""

    mean_: Tensor  # (R, d)

    def _learn(self, train: Observations) -> None:
        self.mean_ = training_mean(self.head_, train)


def training_mean(head: Head, train: Observations) -> Tensor:
    """Mean token (R, d) at every place that h reads."""
    total = torch.zeros(len(head.reads), train.dim, dtype=torch.float64, device=head.device)
    for part in head.parts(train, head.rows()):
        total += part.tokens.sum(0, dtype=torch.float64)
    return (total / len(train)).float()
