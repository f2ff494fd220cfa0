"""Saliency (Simonyan, Vedaldi & Zisserman 2014): the size of the logit's gradient."""

from __future__ import annotations

from torch import Tensor

from pace.baselines.attribution import TokenAttribution
from pace.baselines.head import Part


class Saliency(TokenAttribution):
    """θ_mc = mean over tokens of |∂h_ŷ/∂e_mjc|. One gradient of h per image."""

    name = "saliency"

    def _attribute(self, part: Part, seed: int) -> Tensor:
        return part.gradient(part.tokens).abs()
