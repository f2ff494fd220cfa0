"""The function of the channels that SHAP and LIME explain: an absent channel takes its training mean."""

from __future__ import annotations

import torch
from torch import Tensor

from pace.baselines.head import Part


class MaskedChannels:
    """v(z) = h_ŷ(mean + z ∘ (e − mean)) of B images; z ∈ [0, 1]^d acts on a channel of all tokens at once."""

    def __init__(self, part: Part, mean: Tensor) -> None:
        self._part, self.mean, self.tokens = part, mean, part.tokens

    def values(self, masks: Tensor) -> Tensor:
        """v (B, S) of S masks (S, d), the same for all images."""
        images = len(self.tokens)
        difference = (self.tokens - self.mean)[:, None]
        found = []
        for some in torch.split(masks, max(1, self._part.head.rows() // images)):
            inputs = torch.addcmul(self.mean, some[None, :, None], difference).flatten(0, 1)  # (B S, R, d)
            found.append(self._part.logit(inputs).view(images, len(some)))
        return torch.cat(found, 1)

    def path_gradient(self, positions: Tensor) -> Tensor:
        """∂v/∂z (B, d) at z = t (1, …, 1), with one t in [0, 1] per image."""
        difference = self.tokens - self.mean
        gradient = self._part.gradient(self.mean + positions[:, None, None] * difference)
        return (gradient * difference).sum(1)
