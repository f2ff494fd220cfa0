"""SHAP (Lundberg & Lee 2017): Shapley values of the channels, by gradients or by the kernel regression.

Both are captum's estimators (`GradientShap`, `KernelShap`) for many images at once: captum fits one regression per image in a
Python loop. With the same draws the results agree with captum's.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pace.baselines.attribution import ChannelAttribution
from pace.baselines.channels import MaskedChannels
from pace.baselines.explainer import check_counts
from pace.baselines.head import Part
from pace.explanation import Array
from pace.observations import Observations

_CERTAIN = 1e6  # captum's weight for the full and the empty coalition, in place of infinity


class SHAP(ChannelAttribution):
    """θ_mc is the signed Shapley value of channel c for the predicted class's logit.

    Parameters
    ----------
    estimator
        "gradient": the expected gradient on the straight path from the training mean to the image, from `samples` gradients
        of h per image (5 by default, as in captum). "kernel": a weighted regression on `samples` random coalitions, one
        forward of h each (2 d + 2048 by default, as in the shap package). All images share the coalitions of a run, so one
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

    def _images_at_once(self, dim: int) -> int:
        if self.estimator == "gradient":
            return self.head_.rows(gradients=True)
        return max(1, self.head_.rows() // self._coalitions(dim))

    def _draw(self, observations: Observations, rng: np.random.Generator) -> Any:
        device = self.head_.device
        if self.estimator == "gradient":
            positions = rng.random((len(observations), self.samples or 5), dtype=np.float32)
            return torch.from_numpy(positions).to(device)
        coalitions = draw_coalitions(observations.dim, self._coalitions(observations.dim), rng)
        masks = torch.from_numpy(coalitions).to(device)
        weights = torch.ones(len(masks), dtype=torch.float64, device=device)
        weights[:2] = _CERTAIN
        return masks, least_squares_map(masks.double(), weights)

    def _attribute(self, part: Part, draws: Any) -> Tensor:
        channels = MaskedChannels(part, self.mean_)
        if self.estimator == "gradient":
            return torch.stack([channels.path_gradient(column) for column in draws[part.images].unbind(1)]).mean(0)
        masks, solve = draws
        found: Tensor = channels.values(masks).double() @ solve.T
        return found

    def _coalitions(self, dim: int) -> int:
        return self.samples or 2 * dim + 2048


def draw_coalitions(players: int, samples: int, rng: np.random.Generator) -> Array:
    """(samples, players) of 0 and 1: all players, none, then random ones of size k with probability ∝ 1 / (k (players − k)).

    All coalitions of one size are equally likely, so that the draw contains the Shapley kernel's weights.
    """
    if players < 2 or samples < 3:
        raise ValueError(f"kernel SHAP needs two channels and three samples; found {players} and {samples}")
    sizes = np.arange(1, players)
    chance = 1 / (sizes * (players - sizes))
    drawn = rng.choice(sizes, samples - 2, p=chance / chance.sum())
    ranks = rng.random((samples - 2, players), dtype=np.float32).argsort(1).argsort(1)
    ends = np.repeat([[True], [False]], players, axis=1)
    return np.concatenate([ends, ranks < drawn[:, None]]).astype(np.float32)


def least_squares_map(design: Tensor, weights: Tensor) -> Tensor:
    """(d, S): the matrix from outputs (S,) to the coefficients of a weighted regression with intercept on design (S, d).

    The minimum-norm solution, as from lstsq.
    """
    centred = design - (weights @ design / weights.sum())
    scaled = centred * weights[:, None]
    values, vectors = torch.linalg.eigh(centred.T @ scaled)
    inverse = torch.where(values > 1e-12 * values[-1], 1 / values, 0.0)
    # The outputs need no centring: the weighted rows of `centred` sum to zero.
    solve: Tensor = (vectors * inverse) @ vectors.T @ scaled.T
    return solve
