"""Attributions: every hidden channel's part in the logit of the predicted class, so K = d.

They learn at most averages of the training tokens and have no dataset level.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pace.baselines.explainer import Explainer, SplitModel, check_counts, point
from pace.baselines.head import Head, Part
from pace.explanation import Explanation
from pace.observations import Observations


class Attribution(Explainer):
    """The base of both kinds. `batch_size` is the number of images at once; None is as many as fit into memory."""

    head_: Head

    def __init__(self, batch_size: int | None = None) -> None:
        check_counts(batch_size=batch_size)
        self.batch_size = batch_size

    def _fit(self, backbone: SplitModel, train: Observations, perturbed: Observations | None, seed: int) -> None:
        self.head_ = Head(backbone, train)


class TokenAttribution(Attribution):
    """Attributions to the channels of single tokens, which are the patch level; θ is their mean over tokens.

    CLS is one of the tokens whether it counts as a patch or not: it often has all the weight, and that must be visible.
    """

    def _explain(self, observations: Observations, seed: int, patches: bool) -> Explanation:
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
        return point(theta, phi, observations, head.prefix_tokens)

    @abstractmethod
    def _attribute(self, part: Part, seed: int) -> Tensor:
        """(B, R, d)."""


class ChannelAttribution(Attribution):
    """Attributions to channels of all tokens at once, relative to their training mean. There is no patch level."""

    mean_: Tensor  # (R, d)

    def _fit(self, backbone: SplitModel, train: Observations, perturbed: Observations | None, seed: int) -> None:
        super()._fit(backbone, train, perturbed, seed)
        self.mean_ = training_mean(self.head_, train)

    def _explain(self, observations: Observations, seed: int, patches: bool) -> Explanation:
        draws = self._draw(observations, np.random.default_rng(seed))
        theta = np.empty((len(observations), observations.dim), np.float32)
        for part in self.head_.parts(observations, self.batch_size or self._images_at_once(observations.dim)):
            theta[part.images] = self._attribute(part, draws).cpu().numpy()
        return point(theta, None, observations)

    @abstractmethod
    def _images_at_once(self, dim: int) -> int: ...

    @abstractmethod
    def _draw(self, observations: Observations, rng: np.random.Generator) -> Any:
        """The random draws of a run, passed to `_attribute`."""

    @abstractmethod
    def _attribute(self, part: Part, draws: Any) -> Tensor:
        """(B, d)."""


def training_mean(head: Head, train: Observations) -> Tensor:
    """Mean token (R, d) at every place that h reads."""
    total = torch.zeros(len(head.reads), train.dim, dtype=torch.float64, device=head.device)
    for part in head.parts(train, head.rows()):
        total += part.tokens.sum(0, dtype=torch.float64)
    return (total / len(train)).float()
