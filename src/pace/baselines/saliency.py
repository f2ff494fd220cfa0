"""Saliency (Simonyan, Vedaldi & Zisserman 2014): the size of the logit's gradient."""

from __future__ import annotations

from torch import Tensor

from pace.baselines.attribution import TokenAttribution


class Saliency(TokenAttribution):
    """θ_mc = mean over tokens of |∂h_ŷ/∂e_mjc|. One gradient of h an image."""

    name = "saliency"

    def _attribute(self, tokens: Tensor, targets: Tensor, seed: int) -> Tensor:
        return self.head_.gradient(tokens, targets).abs()
