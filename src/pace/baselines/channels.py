"""Attributions of the predicted class's logit to channels of all tokens at once: SHAP and LIME. K = d.

An absent channel takes its training mean. Both are captum's estimators with its defaults (`GradientShap`, `KernelShap`,
`Lime`) for many images at once: captum fits one regression per image in a Python loop. With the same draws the results agree.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pace.backbones import Backbone
from pace.baselines.explainer import Explainer, check_counts, point
from pace.baselines.factorization import accelerated
from pace.baselines.head import Head, Part
from pace.explanation import Array, Explanation
from pace.observations import Observations

_GRAM_VALUES = 1 << 26  # values of LIME's Gram matrices in memory at once
_POWER_STEPS, _LASSO_STEPS, _LASSO_TOLERANCE = 50, 2000, 1e-6


class ChannelAttribution(Explainer):
    """A method that sees how the logit changes when channels are absent. There is no patch level."""

    patch_level = False
    through_model = True

    def _fit(self, backbone: Backbone, train: Observations, perturbed: Observations | None, seed: int) -> None:
        self.head_ = Head(backbone, train)
        self.mean_ = self.head_.mean(train)  # (R, d)

    def _explain(self, observations: Observations, seed: int, patches: bool) -> Explanation:
        draws, size = self._draw(len(observations), observations.dim, np.random.default_rng(seed))
        parts = self.head_.parts(observations, size)
        return point(np.concatenate([self._attribute(part, draws).cpu().numpy() for part in parts]), None, observations)

    def _values(self, part: Part, masks: Tensor) -> Tensor:
        """v(z) = h_ŷ(mean + z ∘ (e − mean)) (B, S) of S masks z (S, d), the same for all images and tokens."""
        difference = (part.tokens - self.mean_)[:, None]
        return part.masked(masks, lambda some: torch.addcmul(self.mean_, some[None, :, None], difference))

    @abstractmethod
    def _draw(self, images: int, dim: int, rng: np.random.Generator) -> tuple[Any, int]:
        """The random draws of a run, passed to `_attribute`, and how many images to attribute at once."""

    @abstractmethod
    def _attribute(self, part: Part, draws: Any) -> Tensor:
        """(B, d)."""


class SHAP(ChannelAttribution):
    """θ_mc is the signed Shapley value of channel c for the predicted class's logit (Lundberg & Lee 2017).

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
        self, estimator: Literal["gradient", "kernel"] = "gradient", samples: int | None = None, repeats: int = 100
    ) -> None:
        if estimator not in ("gradient", "kernel"):
            raise ValueError(f"estimator: expected 'gradient' or 'kernel'; found {estimator!r}")
        check_counts(samples=samples, repeats=repeats)
        self.name = "shap" if estimator == "gradient" else "shap-kernel"
        self.estimator, self.samples, self.repeats = estimator, samples, repeats

    def _draw(self, images: int, dim: int, rng: np.random.Generator) -> tuple[Any, int]:
        head = self.head_
        if self.estimator == "gradient":
            positions = rng.random((images, self.samples or 5), dtype=np.float32)
            return torch.from_numpy(positions).to(head.device), head.rows(gradients=True)
        masks = torch.from_numpy(draw_coalitions(dim, self.samples or 2 * dim + 2048, rng)).to(head.device)
        weights = torch.ones(len(masks), dtype=torch.float64, device=head.device)
        weights[:2] = 1e6  # captum's weight for the full and the empty coalition, in place of infinity
        return (masks, least_squares_map(masks.double(), weights)), max(1, head.rows() // len(masks))

    def _attribute(self, part: Part, draws: Any) -> Tensor:
        if self.estimator == "gradient":
            difference, total = part.tokens - self.mean_, torch.zeros_like(part.tokens)
            for positions in draws[part.images].unbind(1):
                total += part.gradient(self.mean_ + positions[:, None, None] * difference)
            found: Tensor = (total * difference).sum(1) / draws.shape[1]
        else:
            masks, solve = draws
            found = self._values(part, masks).double() @ solve.T
        return found


class LIME(ChannelAttribution):
    """θ_mc is channel c's signed coefficient in a sparse linear model around image m (Ribeiro, Singh & Guestrin 2016).

    Coalitions by fair coins, weights by the cosine distance, the lasso.

    Parameters
    ----------
    samples, alpha
        Coalitions, one forward of h each and the same for all images of a run; and the lasso's penalty, captum's by default.
    repeats
        Runs that scores are averaged over; 10 in the paper.
    """

    name = "lime"

    def __init__(self, samples: int = 1000, alpha: float = 0.01, repeats: int = 10) -> None:
        check_counts(samples=samples, repeats=repeats)
        if not alpha >= 0:
            raise ValueError(f"alpha: expected at least 0; found {alpha!r}")
        self.samples, self.alpha, self.repeats = samples, alpha, repeats

    def _draw(self, images: int, dim: int, rng: np.random.Generator) -> tuple[Tensor, int]:
        coins = torch.from_numpy(rng.random((self.samples, dim), dtype=np.float32) < 0.5)
        return coins.to(self.head_.device).float(), max(1, min(self.head_.rows() // 16, _GRAM_VALUES // dim**2))

    def _attribute(self, part: Part, draws: Tensor) -> Tensor:
        return lasso(draws, self._values(part, draws), similarity(part.tokens, self.mean_, draws), self.alpha)


def draw_coalitions(players: int, samples: int, rng: np.random.Generator) -> Array:
    """(samples, players) of 0 and 1: all players, none, then random ones of size k with probability ∝ 1 / (k (players − k)).

    All coalitions of one size are equally likely, so that the draw contains the Shapley kernel's weights.
    """
    sizes = np.arange(1, players)
    chance = 1 / (sizes * (players - sizes))
    drawn = rng.choice(sizes, samples - 2, p=chance / chance.sum())
    ranks = rng.random((samples - 2, players), dtype=np.float32).argsort(1).argsort(1)
    ends = np.repeat([[True], [False]], players, axis=1)
    return np.concatenate([ends, ranks < drawn[:, None]]).astype(np.float32)


def least_squares_map(design: Tensor, weights: Tensor) -> Tensor:
    """(d, S): from outputs (S,) to the minimum-norm coefficients of a weighted regression with intercept on design (S, d)."""
    centred = design - (weights @ design / weights.sum())
    scaled = centred * weights[:, None]
    # The outputs need no centring: the weighted rows of `centred` sum to zero.
    inverse: Tensor = torch.linalg.pinv(centred.T @ scaled, rtol=1e-12, hermitian=True)
    return inverse @ scaled.T


def similarity(tokens: Tensor, mean: Tensor, masks: Tensor) -> Tensor:
    """exp(−D² / 2) (B, S), D the cosine distance between an image's tokens and its masked tokens."""
    own, mixed, absent = tokens.square().sum(1), (tokens * mean).sum(1), mean.square().sum(0)
    product = own @ masks.T + mixed @ (1 - masks).T
    squares = own @ masks.T + (1 - masks) @ absent
    lengths = own.sum(1, keepdim=True).sqrt() * squares.sqrt()
    return (-(1 - product / lengths.clamp_min(1e-8)).square() / 2).exp()


def lasso(design: Tensor, outputs: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """Coefficients (B, d) that minimise Σ_s w_bs (y_bs − x_s·β_b − β_b0)² / (2 Σ_s w_bs) + alpha ‖β_b‖₁.

    design (S, d) is shared; outputs and weights are (B, S).
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

    def step(ahead: Tensor) -> Tensor:
        slope = torch.bmm(gram, ahead[:, :, None]).squeeze(2) - target
        found: Tensor = torch.nn.functional.softshrink(ahead / rate - slope, alpha) * rate
        return found

    return accelerated(step, torch.zeros_like(target), _LASSO_STEPS, _LASSO_TOLERANCE)
