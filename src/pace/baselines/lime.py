"""LIME (Ribeiro, Singh & Guestrin 2016) on channels: a sparse linear model around each image.

As captum's `Lime` with its defaults (coalitions by fair coins, weights by the cosine distance, the lasso), for many images at
once. With the same coalitions the results agree with captum's.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pace.baselines.attribution import ChannelAttribution
from pace.baselines.channels import MaskedChannels
from pace.baselines.explainer import check_counts
from pace.baselines.head import Part
from pace.observations import Observations

_GRAM_VALUES = 1 << 26  # values of the images' Gram matrices in memory at once
_POWER_STEPS, _LASSO_STEPS, _LASSO_TOLERANCE = 50, 2000, 1e-6


class LIME(ChannelAttribution):
    """θ_mc is channel c's coefficient in the lasso around image m, signed.

    Parameters
    ----------
    samples
        Coalitions, one forward of h each; the same for all images of a run.
    alpha
        The lasso's penalty, captum's by default.
    repeats
        Runs that scores are averaged over; 10 in the paper.
    """

    name = "lime"

    def __init__(
        self, samples: int = 1000, alpha: float = 0.01, repeats: int = 10, batch_size: int | None = None
    ) -> None:
        super().__init__(batch_size)
        check_counts(samples=samples, repeats=repeats)
        if not alpha >= 0:
            raise ValueError(f"alpha: expected at least 0; found {alpha!r}")
        self.samples, self.alpha, self.repeats = samples, alpha, repeats

    def _images_at_once(self, dim: int) -> int:
        return max(1, min(self.head_.rows() // 16, _GRAM_VALUES // dim**2))

    def _draw(self, observations: Observations, rng: np.random.Generator) -> Tensor:
        coins = rng.random((self.samples, observations.dim), dtype=np.float32) < 0.5
        return torch.from_numpy(coins.astype(np.float32)).to(self.head_.device)

    def _attribute(self, part: Part, draws: Tensor) -> Tensor:
        channels = MaskedChannels(part, self.mean_)
        return lasso(draws, channels.values(draws), similarity(channels, draws), self.alpha)


def similarity(channels: MaskedChannels, masks: Tensor) -> Tensor:
    """exp(−D² / 2) (B, S), D the cosine distance between an image's tokens and its masked tokens."""
    tokens, mean = channels.tokens, channels.mean
    own, mixed, absent = tokens.square().sum(1), (tokens * mean).sum(1), mean.square().sum(0)
    product = own @ masks.T + mixed @ (1 - masks).T
    squares = own @ masks.T + (1 - masks) @ absent
    lengths = own.sum(1, keepdim=True).sqrt() * squares.sqrt()
    return (-(1 - product / lengths.clamp_min(1e-8)).square() / 2).exp()


def lasso(design: Tensor, outputs: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """Coefficients (B, d) that minimise Σ_s w_bs (y_bs − x_s·β_b − β_b0)² / (2 Σ_s w_bs) + alpha ‖β_b‖₁.

    design (S, d) is shared; outputs and weights are (B, S). Accelerated proximal gradient on all images together; an image
    restarts when its momentum points uphill.
    """
    weights = weights / weights.sum(1, keepdim=True)
    centre = weights @ design
    gram = torch.einsum("bs,sc,se->bce", weights, design, design) - centre[:, :, None] * centre[:, None]
    target = (weights * (outputs - (weights * outputs).sum(1, keepdim=True))) @ design
    direction = torch.ones_like(target)
    for _ in range(_POWER_STEPS):
        direction = torch.bmm(gram, direction[:, :, None]).squeeze(2)
        size = direction.norm(dim=1, keepdim=True).clamp_min(1e-30)
        direction = direction / size
    rate = 1 / (1.1 * size).clamp_min(1e-12)  # the power method underestimates
    found = ahead = torch.zeros_like(target)
    momentum = torch.ones_like(rate)
    for _ in range(_LASSO_STEPS):
        slope = torch.bmm(gram, ahead[:, :, None]).squeeze(2) - target
        fresh = torch.nn.functional.softshrink(ahead / rate - slope, alpha) * rate
        moved = fresh - found
        uphill = ((ahead - fresh) * moved).sum(1, keepdim=True) > 0
        momentum = torch.where(uphill, 1.0, momentum)
        faster = (1 + (1 + 4 * momentum.square()).sqrt()) / 2
        ahead = fresh + (momentum - 1) / faster * moved
        found, momentum = fresh, faster
        if bool((moved.abs().amax(1) <= _LASSO_TOLERANCE * found.abs().amax(1)).all()):
            break
    return found
