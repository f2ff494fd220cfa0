"""The evidence of clusters of patches: their likelihood with means and covariance integrated out.

n_k, f_k: weight and weighted sum of cluster k's patches, centred on the data mean · N = Σ_k n_k

    μ_k | Σ ~ N(0, Σ / κ0),  one Σ ~ inverse Wishart(ν0 = d + 2, Ψ0 = the data's covariance)

Point estimates of μ_k and Σ would always gain from one more cluster. Integrated out, a cluster has a price: for its mean
d/2 log(1 + n_k / κ0), and a little more for its distance from the centre. κ0 = 1 / (1 + mean of |μ_k|² / d in units of Σ)
follows from how far the means lie from the centre (empirical Bayes). Every covariance family is counted with one Σ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pace.model.gaussians import Sums
from pace.model.selecting.grouping import Grouping


@dataclass(frozen=True)
class Clusters:
    """Weight and weighted sum of the patches of each cluster, with the covariance of all patches."""

    weight: Tensor  # n_k (K,), float64
    first: Tensor  # f_k (K, d), float64
    spread: Tensor  # (d, d), float64
    blur: float  # every patch is a small cloud with this share of `spread`

    @classmethod
    def of(cls, x: Tensor, weights: Tensor, by: Grouping, spread: Tensor, blur: float) -> Clusters:
        return cls(by.totals(weights), by.sums(x, weights).double(), spread, blur)

    def __len__(self) -> int:
        return len(self.weight)

    def __getitem__(self, rows: Tensor | slice | Sequence[int]) -> Clusters:
        return replace(self, weight=self.weight[rows], first=self.first[rows])

    def scaled(self, factor: Tensor) -> Clusters:
        return replace(self, weight=factor * self.weight, first=factor * self.first)

    def regrouped(self, group: Tensor, number: int) -> Clusters:
        """`number` clusters, where cluster k becomes part of `group[k]`."""
        weight = self.weight.new_zeros(number).index_add_(0, group, self.weight)
        return replace(
            self, weight=weight, first=self.first.new_zeros(number, self.dim).index_add_(0, group, self.first)
        )

    def divided(self, clusters: Tensor, halves: Clusters) -> Clusters:
        """Each of these clusters is replaced by rows 2p and 2p + 1 of `halves`: one in its place, one at the end."""

        def change(rows: Tensor, both: Tensor) -> Tensor:
            return torch.cat([rows, both[1::2]]).index_copy_(0, clusters, both[::2])

        return replace(self, weight=change(self.weight, halves.weight), first=change(self.first, halves.first))

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
        second = self.weight.sum() * (1 + self.blur) * self.spread
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
        price = self._price(self.weight, squares, _kappa(squares.mean() / self.dim)).sum()
        total: Tensor = shape - degrees * lower.diagonal().log().sum() - price
        return total

    def merge_gains(self, pairs: Tensor) -> Tensor:
        """What the evidence gains (P,) when the two clusters of each pair (P, 2) become one."""
        white, _, _ = self._whitened
        squares, (a, b) = white.square().sum(1), pairs.T
        kappa = _kappa(squares.mean() / self.dim)
        return self._gain(self.weight[a], self.weight[b], squares[a], squares[b], (white @ white.T)[a, b], kappa)

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
        one, other = (_whiten(means.flatten(0, 1), lower) * degrees.sqrt()).view_as(first).unbind(1)
        apart = one - other
        share = n.prod(1) / held / degrees  # c, in the units of `white`
        left = 1 - share * apart.square().sum(1)
        bend = share / left.clamp_min(1e-300)  # uᵀΨ⁻¹v becomes uᵀv + bend (uᵀδ)(δᵀv)
        along_one, along_other = (one * apart).sum(1), (other * apart).sum(1)
        squares_one = one.square().sum(1) + bend * along_one.square()
        squares_other = other.square().sum(1) + bend * along_other.square()
        products = (one * other).sum(1) + bend * along_one * along_other
        all_squares = white.square().sum(1)[:, None] + bend * (white @ apart.T).square()  # (K, P)
        rest = all_squares.sum(0) - all_squares.gather(0, clusters[None])[0]
        kappa = _kappa((rest + squares_one + squares_other) / (len(self) + 1) / self.dim)
        gains = -self._gain(n[:, 0], n[:, 1], squares_one, squares_other, products, kappa)
        return torch.where(left > 0, gains, -torch.inf)

    def _gain(
        self, n_a: Tensor, n_b: Tensor, squares_a: Tensor, squares_b: Tensor, products: Tensor, kappa: Tensor
    ) -> Tensor:
        """Of merging a and b, from their weights and their whitened means' squares and products."""
        _, degrees, _ = self._whitened
        n = (n_a + n_b).clamp_min(1e-300)
        apart = (squares_a + squares_b - 2 * products).clamp_min(0) * n_a * n_b / n
        centre = (n_a.square() * squares_a + n_b.square() * squares_b + 2 * n_a * n_b * products) / n.square()
        price = self._price(n_a, squares_a, kappa) + self._price(n_b, squares_b, kappa)
        return price - self._price(n, centre, kappa) - degrees / 2 * torch.log1p(apart / degrees)

    def _price(self, weight: Tensor, squares: Tensor, kappa: Tensor) -> Tensor:
        return (self.dim * torch.log1p(weight / kappa) + kappa * weight / (kappa + weight) * squares) / 2


def _kappa(mean_square: Tensor) -> Tensor:
    return 1 / (1 + mean_square)


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


def whitening(covariance: Tensor) -> Tensor:
    """Upper triangular W with W Wᵀ = Σ⁻¹: patches times W have unit spread."""
    white: Tensor = torch.linalg.inv(torch.linalg.cholesky(covariance)).mT
    return white
