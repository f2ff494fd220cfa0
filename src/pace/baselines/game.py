"""The game that SHAP and LIME explain: its players are the d channels, and an absent one takes its training mean."""

from __future__ import annotations

import torch
from torch import Tensor

from pace.baselines.head import Head


class ChannelGame:
    """v(z) = h_ŷ(mean + z ∘ (e − mean)) of B images; z ∈ [0, 1]^d acts on a channel of all tokens at once."""

    def __init__(self, head: Head, mean: Tensor, tokens: Tensor, targets: Tensor) -> None:
        self._head, self.mean, self.tokens, self._targets = head, mean, tokens, targets

    def values(self, coalitions: Tensor) -> Tensor:
        """v (B, S) of S coalitions (S, d), the same for all images."""
        images = len(self.tokens)
        difference = (self.tokens - self.mean)[:, None]
        found = []
        for some in torch.split(coalitions, max(1, self._head.rows() // images)):
            inputs = torch.addcmul(self.mean, some[None, :, None], difference).flatten(0, 1)  # (B S, R, d)
            with torch.no_grad():
                logits = self._head.logit(inputs, self._targets.repeat_interleave(len(some)))
            found.append(logits.view(images, len(some)))
        return torch.cat(found, 1)

    def path_gradient(self, positions: Tensor) -> Tensor:
        """∂v/∂z (B, d) at z = t (1, …, 1), for one t in [0, 1] an image."""
        difference = self.tokens - self.mean
        gradient = self._head.gradient(self.mean + positions[:, None, None] * difference, self._targets)
        return (gradient * difference).sum(1)
