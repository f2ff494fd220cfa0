"""LIME (Ribeiro, Singh & Guestrin 2016) on the channel game: a sparse linear model around each image.

As captum's `Lime` with its defaults (coalitions by fair coins, weights by the cosine distance, the lasso), written for many
images at once. Given the same coalitions it agrees with captum's.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pace.baselines.attribution import ChannelAttribution
from pace.baselines.explainer import check_counts, point
from pace.baselines.game import ChannelGame
from pace.baselines.regression import lasso
from pace.explanation import Explanation
from pace.observations import Observations

_GRAM_VALUES = 1 << 26  # values of the images' Gram matrices in memory at once


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

    def explain(self, observations: Observations, *, seed: int = 0, patches: bool = True) -> Explanation:
        coins = np.random.default_rng(seed).random((self.samples, observations.dim), dtype=np.float32) < 0.5
        coalitions = torch.from_numpy(coins.astype(np.float32)).to(self.head_.device)
        theta = np.empty((len(observations), observations.dim), np.float32)
        size = self.batch_size or max(1, min(self.head_.rows() // 16, _GRAM_VALUES // observations.dim**2))
        for part in self.head_.parts(observations, size):
            game = ChannelGame(part, self.mean_)
            theta[part.images] = (
                lasso(coalitions, game.values(coalitions), similarity(game, coalitions), self.alpha).cpu().numpy()
            )
        return point(theta, None, observations)


def similarity(game: ChannelGame, coalitions: Tensor) -> Tensor:
    """exp(−D² / 2) (B, S), D the cosine distance between an image's tokens and what a coalition leaves of them."""
    tokens, mean = game.tokens, game.mean
    own, mixed, absent = tokens.square().sum(1), (tokens * mean).sum(1), mean.square().sum(0)
    product = own @ coalitions.T + mixed @ (1 - coalitions).T
    squares = own @ coalitions.T + (1 - coalitions) @ absent
    lengths = own.sum(1, keepdim=True).sqrt() * squares.sqrt()
    return (-(1 - product / lengths.clamp_min(1e-8)).square() / 2).exp()
