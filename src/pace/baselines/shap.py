"""SHAP (Lundberg & Lee 2017): Shapley values of the channel game, by gradients or by the kernel regression.

Both are captum's estimators (`GradientShap`, `KernelShap`), written for many images at once: captum fits one regression an
image in a Python loop. Given the same draws they agree with captum's.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from pace.baselines.attribution import ChannelAttribution
from pace.baselines.explainer import check_counts, point
from pace.baselines.game import ChannelGame
from pace.baselines.regression import least_squares_map
from pace.explanation import Array, Explanation
from pace.observations import Observations

_CERTAIN = 1e6  # captum's weight for the full and the empty coalition, in place of infinity


class SHAP(ChannelAttribution):
    """θ_mc is the signed Shapley value of channel c for the predicted class's logit.

    Parameters
    ----------
    estimator
        "gradient": the expected gradient on the straight way from the training mean to the image; `samples` gradients of h
        an image (5 by default, as captum's). "kernel": a weighted regression on `samples` random coalitions, one forward
        of h each (2 d + 2048 by default, as the shap package's). All images share the coalitions of a run, so one
        regression serves them all.
    repeats
        Runs that scores are averaged over; 100 in the paper.
    """

    def __init__(
        self,
        estimator: Literal["gradient", "kernel"] = "gradient",
        samples: int | None = None,
        repeats: int = 100,
        batch_size: int | None = None,
    ) -> None:
        super().__init__(batch_size)
        if estimator not in ("gradient", "kernel"):
            raise ValueError(f"estimator: expected 'gradient' or 'kernel'; found {estimator!r}")
        check_counts(samples=samples, repeats=repeats)
        self.name = "shap" if estimator == "gradient" else "shap-kernel"
        self.estimator, self.samples, self.repeats = estimator, samples, repeats

    def explain(self, observations: Observations, *, seed: int = 0, patches: bool = True) -> Explanation:
        rng = np.random.default_rng(seed)
        found = self._gradient if self.estimator == "gradient" else self._kernel
        return point(found(observations, rng), None, observations)

    def _gradient(self, observations: Observations, rng: np.random.Generator) -> Array:
        positions = rng.random((len(observations), self.samples or 5), dtype=np.float32)
        theta = np.empty((len(observations), observations.dim), np.float32)
        for part in self.head_.parts(observations, self.batch_size or self.head_.rows(gradients=True)):
            game = ChannelGame(part, self.mean_)
            columns = torch.from_numpy(positions[part.images]).to(part.tokens.device).unbind(1)
            theta[part.images] = torch.stack([game.path_gradient(column) for column in columns]).mean(0).cpu().numpy()
        return theta

    def _kernel(self, observations: Observations, rng: np.random.Generator) -> Array:
        samples = self.samples or 2 * observations.dim + 2048
        coalitions = torch.from_numpy(draw_coalitions(observations.dim, samples, rng)).to(self.head_.device)
        weights = torch.ones(samples, dtype=torch.float64, device=self.head_.device)
        weights[:2] = _CERTAIN
        solve = least_squares_map(coalitions.double(), weights)
        theta = np.empty((len(observations), observations.dim), np.float32)
        for part in self.head_.parts(observations, self.batch_size or max(1, self.head_.rows() // samples)):
            values = ChannelGame(part, self.mean_).values(coalitions)
            theta[part.images] = (values.double() @ solve.T).cpu().numpy()
        return theta


def draw_coalitions(players: int, samples: int, rng: np.random.Generator) -> Array:
    """(samples, players) of 0 and 1: all players, none, then random ones of size k with probability ∝ 1 / (k (players − k)).

    Of one size all coalitions are equally likely, so that the Shapley kernel's weights are in the draw.
    """
    if players < 2 or samples < 3:
        raise ValueError(f"kernel SHAP needs two channels and three samples; found {players} and {samples}")
    sizes = np.arange(1, players)
    chance = 1 / (sizes * (players - sizes))
    drawn = rng.choice(sizes, samples - 2, p=chance / chance.sum())
    ranks = rng.random((samples - 2, players), dtype=np.float32).argsort(1).argsort(1)
    ends = np.repeat([[True], [False]], players, axis=1)
    return np.concatenate([ends, ranks < drawn[:, None]]).astype(np.float32)
