"""The dataset level: the concepts, and the M-step that turns statistics into new ones.

Nothing here lowers L = L_e + L_f + L_s: μ and Σ are closed-form, α is a fixed point, and H and β climb, by Adam, a quadratic
that lies below the bound and touches it where they are now.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pace.model.gaussians import FAMILIES, Gaussians, Prior, Sums
from pace.model.layout import check_layout
from pace.model.nesting import PARTS, Nest
from pace.model.objective import Bound
from pace.model.settings import Settings
from pace.model.statistics import Statistics

_BESIDE_GAUSSIANS = ("offset", "alpha", "label_head", "pair_weights")  # of Concepts
_MEAN, _SQUARE = 0.9, 0.999  # Adam's β₁ and β₂


@dataclass(frozen=True)
class Concepts:
    """Everything that is learned."""

    gaussians: Gaussians  # μ_k - offset, Σ_k; of kinds, in their own features
    offset: Tensor  # (d,) subtracted from every embedding, so that float32 keeps its digits
    alpha: Tensor  # (K,) float64; (P,) of parts
    label_head: Tensor  # H (K, N) float64
    pair_weights: Tensor  # β (K,) float64
    nest: Nest | None = None  # where concepts are kinds of parts

    def __len__(self) -> int:
        return len(self.pair_weights)

    @property
    def means(self) -> Tensor:
        """μ_k - offset (K, d), as embeddings."""
        return self.gaussians.means if self.nest is None else self.nest.means

    def no_statistics(self) -> Statistics:
        sums = self.gaussians.empty_sums() if self.nest is None else self.nest.empty_sums(self.gaussians)
        return Statistics.zeros(sums, self.label_head.shape[1], len(self.alpha))

    @property
    def fixed_sums(self) -> tuple[str, ...]:
        """Sums that are the same in every epoch over the same images."""
        return self.gaussians.fixed if self.nest is None else tuple(PARTS + name for name in self.nest.parts.fixed)

    def left_out(self, sums: Sums) -> float:
        """What relative distances leave out of the bound, from the sums over all images."""
        return self.gaussians.left_out(sums) if self.nest is None else self.nest.parts.left_out(under(PARTS, sums))

    def tensors(self) -> dict[str, Tensor]:
        """Flat, for files and for communication."""
        gaussians = {f"gaussians.{name}": tensor for name, tensor in self.gaussians.tensors().items()}
        nest = {} if self.nest is None else {f"nest.{name}": tensor for name, tensor in self.nest.tensors().items()}
        return gaussians | nest | {name: getattr(self, name) for name in _BESIDE_GAUSSIANS}

    @classmethod
    def from_tensors(cls, family: str, tensors: dict[str, Tensor]) -> Concepts:
        """Concepts of that covariance family; tensors of other names are ignored, and what cannot be concepts is refused."""
        check_layout(family, tensors)
        gaussians = FAMILIES[family].from_tensors(under("gaussians.", tensors))
        nest = Nest.from_tensors(FAMILIES[family], nested) if (nested := under("nest.", tensors)) else None
        if not all(bool(torch.isfinite(one.log_det).all()) for one in (gaussians, nest and nest.parts) if one):
            raise ValueError("a covariance is not positive definite")
        return cls(gaussians, **{name: tensors[name] for name in _BESIDE_GAUSSIANS}, nest=nest)

    def statistics_from(self, tensors: dict[str, Tensor]) -> Statistics:
        """Statistics that have the shapes of these concepts'."""
        expected = self.no_statistics().tensors()
        if {name: t.shape for name, t in tensors.items()} != {name: t.shape for name, t in expected.items()}:
            raise ValueError("the statistics do not fit the concepts")
        return Statistics.from_tensors(tensors)

    def to(self, device: torch.device, dtype: torch.dtype) -> Concepts:
        before = self.gaussians.tensors()
        gaussians = {name: tensor.to(device, dtype) for name, tensor in before.items()}
        if all(gaussians[name] is tensor for name, tensor in before.items()):
            return self  # with what the Gaussians have worked out for their distances
        return Concepts(
            type(self.gaussians).from_tensors(gaussians),
            self.offset.to(device, dtype),
            self.alpha.to(device),
            self.label_head.to(device),
            self.pair_weights.to(device),
            None if self.nest is None else self.nest.to(device, dtype),
        )


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def update(concepts: Concepts, statistics: Statistics, prior: Prior, settings: Settings) -> Concepts:
    """The M-step."""
    label_head, pair_weights = concepts.label_head, concepts.pair_weights
    if label_head.shape[1] > 1:
        label_head = _ascend(label_head, statistics.head_slope, statistics.head_curvature, (-1.0, 1.0), settings)
    if statistics.views > statistics.images:
        slope, box = statistics.pair_slope[:, None], (0.0, 1.0)
        pair_weights = _ascend(pair_weights[:, None], slope, statistics.pair_curvature, box, settings).squeeze(1)
    alpha = concepts.alpha
    if settings.learn_alpha:
        alpha = fit_dirichlet(alpha, statistics.log_theta / statistics.views, settings.smallest_alpha)
    nest, moments = concepts.nest, statistics.moments
    if nest is not None:
        for_parts, prior = nest.priors(prior)
        nest = nest.maximise(moments, for_parts)
    gaussians = concepts.gaussians.maximise(moments, prior)
    heads = {"label_head": label_head, "pair_weights": pair_weights}
    return replace(concepts, gaussians=gaussians, alpha=alpha, nest=nest, **heads)


def bound_of(statistics: Statistics, concepts: Concepts, prior: Prior, images: float) -> Bound:
    """The bound per image, including its share of the concepts' log prior when there are this many images.

    Where concepts are kinds of parts, L_e is that of the parts.
    """
    embedding, faithful, stable = (statistics.bound / statistics.images).tolist()
    nest = concepts.nest
    log_prior = concepts.gaussians.log_prior(prior) if nest is None else nest.log_prior(nest.priors(prior)[0])
    return Bound(embedding + log_prior / images, faithful, stable)


def head_curvature(phi_bar: Tensor, n_classes: int) -> Tensor:
    """Of the quadratic below ΣL_f, the same for every η_n (K, K).

    ∂²log Σ_n exp s_n ≤ max_n p_n, and inside the box no p_n exceeds e² / (e² + N - 1); nor is it ever above ½.
    """
    return min(0.5, math.e**2 / (math.e**2 + n_classes - 1)) * phi_bar.T @ phi_bar


def pair_curvature(groups: Tensor, sizes: list[int]) -> Tensor:
    """Likewise of ΣL_s, in β, from φ̄ of groups of negatives (G, F, K).

    Scores lie in [0, 1], so no share exceeds e / (e + F - 2).
    """
    curvature = groups.new_zeros(groups.shape[2], groups.shape[2])
    for size, outer in zip(sizes, groups.mT @ groups, strict=True):
        if size > 1:
            curvature += math.e / (math.e + size - 2) * outer.square()
    return curvature


def _ascend(
    start: Tensor, slope_at_zero: Tensor, curvature: Tensor, box: tuple[float, float], settings: Settings
) -> Tensor:
    """Adam, inside a box, on Q(x) = ⟨slope, x⟩ - ½⟨x, curvature x⟩.

    The bound never lies below Q, but for a constant, and touches it at the start, so the best point that Adam passes cannot
    lower the bound.
    """
    gradient = slope_at_zero - curvature @ start
    point, slope = start, gradient
    best, best_value = start, start.new_zeros(())
    # By hand, because importing torch.optim takes seconds.
    mean, square = torch.zeros_like(start), torch.zeros_like(start)
    for step in range(1, settings.head_steps + 1):
        mean = _MEAN * mean + (1 - _MEAN) * slope
        square = _SQUARE * square + (1 - _SQUARE) * slope.square()
        size = (square / (1 - _SQUARE**step)).sqrt() + 1e-8
        point = (point + settings.head_rate / (1 - _MEAN**step) * mean / size).clamp(*box)
        move = point - start
        slope = gradient - curvature @ move
        value = (move * (gradient + slope)).sum() / 2
        best = torch.where(value > best_value, point, best)  # a branch would make the GPU wait
        best_value = torch.maximum(value, best_value)
    return best


def fit_dirichlet(alpha: Tensor, mean_log: Tensor, smallest: float, steps: int = 20) -> Tensor:
    """Minka's fixed point Ψ(α_k) = Ψ(Σα) + mean E[log θ_k]: every step raises Σ_m E log Dirichlet(θ_m | α)."""
    for _ in range(steps):
        target = torch.digamma(alpha.sum()) + mean_log
        # Inverse digamma: Minka's starting point, then Newton.
        alpha = torch.where(target >= -2.22, target.exp() + 0.5, -1 / (target - torch.digamma(torch.ones_like(target))))
        for _ in range(5):
            alpha = alpha - (torch.digamma(alpha) - target) / torch.polygamma(1, alpha)
        alpha = alpha.clamp_min(smallest)
    return alpha
