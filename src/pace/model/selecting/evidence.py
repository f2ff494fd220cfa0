"""The evidence of clusters of patches: their likelihood with means and covariance integrated out.

n_k, f_k: weight and weighted sum of cluster k's patches, centred on the data mean · N = Σ_k n_k

    μ_k | Σ ~ N(0, Σ / κ0),  one Σ ~ inverse Wishart(ν0 = d + 2, Ψ0 = the data's covariance)

Point estimates of μ_k and Σ would always gain from one more cluster. Integrated out, a cluster has a price: for its mean
d/2 log(1 + n_k / κ0), and a little more for its distance from the centre. κ0 = 1 / (1 + mean of |μ_k|² / d in units of Σ)
follows from how far the means lie from the centre (empirical Bayes). Every covariance family is counted with one Σ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pace.model.gaussians import Sums
from pace.model.selecting.grouping import Grouping, summed

BLUR = 0.25  # every patch is a small cloud with this share of the covariance; smaller differences make no concepts


@dataclass(frozen=True)
class Clusters:
    """Weight and weighted sum of the patches of each cluster, with the covariance of all patches."""

    weight: Tensor  # n_k (K,), float64
    first: Tensor  # f_k (K, d), float64
    spread: Tensor  # (d, d), float64

    @classmethod
    def of(cls, x: Tensor, weights: Tensor, by: Grouping, spread: Tensor) -> Clusters:
        return cls(by.totals(weights), by.sums(x, weights).double(), spread)

    def __len__(self) -> int:
        return len(self.weight)

    def __getitem__(self, rows: Tensor | slice) -> Clusters:
        return replace(self, weight=self.weight[rows], first=self.first[rows])

    def scaled(self, factor: Tensor) -> Clusters:
        return replace(self, weight=factor * self.weight, first=factor * self.first)

    def regrouped(self, group: Tensor) -> Clusters:
        """Cluster k becomes part of `group[k]`, one of 0 … max(group)."""
        number = int(group.max()) + 1
        return replace(self, weight=summed(self.weight, group, number), first=summed(self.first, group, number))

    @property
    def dim(self) -> int:
        return self.first.shape[1]

    @cached_property
    def means(self) -> Tensor:
        return self.first / self.weight.clamp_min(1e-300)[:, None]

    @property
    def between(self) -> Tensor:
        """Σ_k n_k μ_k μ_kᵀ (d, d)."""
        return (self.means * self.weight[:, None]).T @ self.means

    @property
    def sums(self) -> Sums:
        """For `TiedGaussians.maximise`. The second moments of all patches do not depend on who holds them."""
        second = self.weight.sum() * (1 + BLUR) * self.spread
        return {"weight": self.weight, "first": self.first, "second": second}

    @cached_property
    def _whitened(self) -> tuple[Tensor, Tensor, Tensor]:
        """The means in units of Σ, ν = N + ν0, and the Cholesky factor of Ψ."""
        degrees = self.weight.sum() + self.dim + 2
        lower = torch.linalg.cholesky(self.spread + self.sums["second"] - self.between)
        return _whiten(self.means, lower) * degrees.sqrt(), degrees, lower

    def evidence(self) -> Tensor:
        """log p(patches | which cluster holds each)."""
        white, degrees, lower = self._whitened
        squares = white.square().sum(1)
        shape = torch.special.multigammaln(degrees / 2, self.dim) - self.weight.sum() * self.dim / 2 * math.log(math.pi)
        price = self._price(self.weight, squares, self._kappa(squares.mean())).sum()
        total: Tensor = shape - degrees * lower.diagonal().log().sum() - price
        return total

    def merge_gains(self, pairs: Tensor) -> Tensor:
        """What the evidence gains (P,) when the two clusters of each pair (P, 2) become one."""
        white, _, _ = self._whitened
        squares, (a, b) = white.square().sum(1), pairs.T
        return self._gain(self.weight[pairs], squares[pairs], (white @ white.T)[a, b], self._kappa(squares.mean()))

    def split_gains(self, clusters: Tensor, halves: Clusters) -> Tensor:
        """What the evidence gains (P,) when one of these clusters (P,) becomes two: rows 2p and 2p + 1 of `halves`.

        A split takes c δδᵀ off Ψ, for halves that lie δ apart, so Ψ is factorised once for all splits. Where `halves` come
        from a sample of a cluster's patches, they share what is missing in proportion to their weight. Such halves can lie
        further apart than all patches spread; they gain nothing then.
        """
        white, degrees, lower = self._whitened
        n, first = halves.weight.view(-1, 2), halves.first.view(-1, 2, self.dim)
        held = n.sum(1).clamp_min(1e-300)
        first = first + (n / held[:, None])[:, :, None] * (self.first[clusters] - first.sum(1))[:, None]
        means = first / n.clamp_min(1e-300)[:, :, None]
        both = (_whiten(means.flatten(0, 1), lower) * degrees.sqrt()).view_as(first)
        apart = both[:, 0] - both[:, 1]
        share = n.prod(1) / held / degrees  # c, in the units of `white`
        left = 1 - share * apart.square().sum(1)
        bend = share / left.clamp_min(1e-300)  # uᵀΨ⁻¹v becomes uᵀv + bend (uᵀδ)(δᵀv)
        along = (both * apart[:, None]).sum(2)
        squares = both.square().sum(2) + bend[:, None] * along.square()
        products = both.prod(1).sum(1) + bend * along.prod(1)
        all_squares = white.square().sum(1)[:, None] + bend * (white @ apart.T).square()  # (K, P)
        rest = all_squares.sum(0) - all_squares.gather(0, clusters[None])[0]
        gains = -self._gain(n, squares, products, self._kappa((rest + squares.sum(1)) / (len(self) + 1)))
        return torch.where(left > 0, gains, -torch.inf)

    def _gain(self, n: Tensor, squares: Tensor, products: Tensor, kappa: Tensor) -> Tensor:
        """Of merging pairs, from the two weights and squares of whitened means (P, 2), and these means' products (P,)."""
        _, degrees, _ = self._whitened
        total = n.sum(1).clamp_min(1e-300)
        apart = (squares.sum(1) - 2 * products).clamp_min(0) * n.prod(1) / total
        centre = ((n.square() * squares).sum(1) + 2 * n.prod(1) * products) / total.square()
        saved = self._price(n, squares, kappa[..., None]).sum(1) - self._price(total, centre, kappa)
        return saved - degrees / 2 * torch.log1p(apart / degrees)

    def _kappa(self, mean_square: Tensor) -> Tensor:
        return 1 / (1 + mean_square / self.dim)

    def _price(self, weight: Tensor, squares: Tensor, kappa: Tensor) -> Tensor:
        return (self.dim * torch.log1p(weight / kappa) + kappa * weight / (kappa + weight) * squares) / 2


def _whiten(rows: Tensor, lower: Tensor) -> Tensor:
    white: Tensor = torch.linalg.solve_triangular(lower, rows.T, upper=False).T
    return white


def covariance(x: Tensor, weights: Tensor) -> Tensor:
    """Around the origin, float64, with a diagonal just above rounding so that it can be factorised."""
    wide = x.double() * weights.double().sqrt()[:, None]
    second = wide.T @ wide / weights.sum(dtype=torch.float64)
    scale = second.diagonal().mean()
    least = max(8 * torch.finfo(x.dtype).eps, 1e-10) * torch.where(scale > 0, scale, torch.ones_like(scale))
    return second + least * torch.eye(len(second), dtype=torch.float64, device=x.device)
