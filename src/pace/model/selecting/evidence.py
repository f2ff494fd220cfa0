"""What the patches of some concepts say together, with means and covariances integrated out: what sums add to the bound.

n_k, f_k, S: weight, first and second moments of the patches that each concept holds, centred on the data mean · N = Σ_k n_k

    own covariances:  μ_k | Σ_k ~ N(0, Σ_k / κ0),  Σ_k ~ inverse Wishart(ν0 = d + 1 + s, Ψ0 = s Σ0)
    one covariance:   the same with one Σ ~ inverse Wishart(ν0 = d + 2, Ψ0 = the data's covariance)

A point estimate of μ_k and Σ_k would always gain from one concept more. Integrated out, a concept has a price, for its mean
d/2 log(1 + n_k / κ0) and a little more. κ0 follows from how far the means lie from the centre (empirical Bayes): it is
1 / (1 + the mean of |μ_k|² / d in units of Σ). s, how alike the covariances are, is the best of a few for the same reason.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from pace.model.gaussians import Gaussians, Sums
from pace.model.selecting.grouping import Grouping

_CHUNK = 1 << 23  # numbers in covariances that are factorised together
_LIKENESS = (1.0, 4.0, 16.0, 64.0, 256.0)  # s: pseudo-patches with the pooled covariance


class Evidence(ABC):
    """log p(patches | who holds them), and how it changes when two concepts become one."""

    by_concept: tuple[str, ...] = ("weight", "first", "second")  # sums that have a row for each

    def __init__(self, spread: Tensor, blur: float, within: Tensor):
        self.spread = spread  # (d, d) covariance of all patches that are looked at
        self.blur = blur * spread  # of every patch
        self.within = within  # Σ0 (d, d), around concepts as far as they are known, blur included

    @abstractmethod
    def blurred(self, sums: Sums) -> Sums:
        """The sums if every patch were a small cloud."""

    def held(self, x: Tensor, by: Grouping, weights: Tensor, gaussians: Gaussians) -> Sums:
        """Blurred sums of patches (n, d) with these weights (n,), each held by one of the `gaussians`."""
        r = weights.new_zeros(len(x), by.number).scatter_(1, by.group[:, None], weights[:, None])
        sums = gaussians.empty_sums()
        gaussians.accumulate(gaussians.features(x, torch.zeros_like(x[0])), r, sums)
        return self.blurred(sums)

    @abstractmethod
    def total(self, sums: Sums) -> Tensor:
        """Of all concepts, from blurred sums."""

    @abstractmethod
    def merge_gains(self, sums: Sums, pairs: Tensor) -> Tensor:
        """What is gained (P,) when the two concepts of each pair (P, 2) are one."""

    @abstractmethod
    def split_gains(self, sums: Sums, concepts: Tensor, parts: Sums) -> Tensor:
        """What is gained (P,) when one of the concepts (P,) is two, whose blurred sums are rows 2p and 2p + 1 of `parts`."""

    def regrouped(self, sums: Sums, group: Tensor, number: int) -> Sums:
        """The sums of `number` concepts, of which `group[k]` takes in concept k."""
        return self._changed(sums, lambda _, rows: rows.new_zeros(number, *rows.shape[1:]).index_add_(0, group, rows))

    def divided(self, sums: Sums, concepts: Tensor, parts: Sums) -> Sums:
        """Concepts give way to the pairs in `parts`, as above: one of each in its place, one at the end."""

        def change(name: str, rows: Tensor) -> Tensor:
            return torch.cat([rows, parts[name][1::2]]).index_copy_(0, concepts, parts[name][::2])

        return self._changed(sums, change)

    def _changed(self, sums: Sums, change: Callable[[str, Tensor], Tensor]) -> Sums:
        return {name: change(name, rows) if name in self.by_concept else rows for name, rows in sums.items()}

    def _precision_of_means(self, squares: Tensor) -> Tensor:
        """κ0 from |μ_k|² / d (K,) in units of Σ."""
        return 1 / (1 + squares.mean())


class SharedCovariance(Evidence):
    """One Σ for all concepts; `second` (d, d)."""

    by_concept = ("weight", "first")
    _known: tuple[Sums, tuple[Tensor, Tensor, Tensor, Tensor]] | None = None  # sums are never changed in place

    def blurred(self, sums: Sums) -> Sums:
        # All patches together are the same whoever holds them: known once, in full precision.
        return {**sums, "second": sums["weight"].sum() * (self.spread + self.blur)}

    def held(self, x: Tensor, by: Grouping, weights: Tensor, gaussians: Gaussians) -> Sums:
        return self.blurred({"weight": by.totals(weights), "first": by.sums(x, weights).double()})

    def total(self, sums: Sums) -> Tensor:
        weight, white, degrees, lower = self._whitened(sums)
        d, n = white.shape[1], weight.sum()
        shape = torch.special.multigammaln(degrees / 2, d) - n * d / 2 * math.log(math.pi)
        squares = white.square().sum(1)
        price = self._price(weight, squares, d, self._precision_of_means(squares / d)).sum()
        total: Tensor = shape - degrees * lower.diagonal().log().sum() - price
        return total

    def merge_gains(self, sums: Sums, pairs: Tensor) -> Tensor:
        weight, white, degrees, _ = self._whitened(sums)
        d, (a, b) = white.shape[1], pairs.T
        squares, products = white.square().sum(1), (white @ white.T)[a, b]
        kappa = self._precision_of_means(squares / d)
        n_a, n_b = weight[a], weight[b]
        n = (n_a + n_b).clamp_min(1e-300)
        apart = (squares[a] + squares[b] - 2 * products).clamp_min(0) * n_a * n_b / n
        centre = (n_a.square() * squares[a] + n_b.square() * squares[b] + 2 * n_a * n_b * products) / n.square()
        price = self._price(weight, squares, d, kappa)
        saved = price[a] + price[b] - self._price(n, centre, d, kappa)
        gains: Tensor = saved - degrees / 2 * torch.log1p(apart / degrees)
        return gains

    def split_gains(self, sums: Sums, concepts: Tensor, parts: Sums) -> Tensor:
        """What a split takes off Ψ is c δδᵀ, for halves that lie δ apart, so Ψ is factorised once for all.

        Where some patches stand for all, halves need not add up to their concept: what is missing, both share. Such halves can
        lie further apart than all patches spread, and gain nothing then.
        """
        weight, white, degrees, lower = self._whitened(sums)
        d, k = white.shape[1], len(weight)
        n, first = parts["weight"].view(-1, 2), parts["first"].view(-1, 2, d)
        held = n.sum(1).clamp_min(1e-300)
        first = first + (n / held[:, None])[:, :, None] * (sums["first"][concepts] - first.sum(1))[:, None]
        means = (first / n.clamp_min(1e-300)[:, :, None]).view(-1, d)
        halves = torch.linalg.solve_triangular(lower, means.T, upper=False).T.view_as(first) * degrees.sqrt()
        one, other = halves.unbind(1)
        apart = one - other
        share = n.prod(1) / held / degrees  # c, in the units of `white`
        left = 1 - share * apart.square().sum(1)
        bend = share / left.clamp_min(1e-300)  # uᵀΨ⁻¹v becomes uᵀv + bend (uᵀδ)(δᵀv)
        along_one, along_other = (one * apart).sum(1), (other * apart).sum(1)
        squares_one = one.square().sum(1) + bend * along_one.square()
        squares_other = other.square().sum(1) + bend * along_other.square()
        products = (one * other).sum(1) + bend * along_one * along_other
        all_squares = white.square().sum(1)[:, None] + bend * (white @ apart.T).square()  # (K, P)
        rest = all_squares.sum(0) - all_squares.gather(0, concepts[None])[0]
        kappa = 1 / (1 + (rest + squares_one + squares_other) / (k + 1) / d)
        between = (squares_one + squares_other - 2 * products).clamp_min(0) * n.prod(1) / held
        centre = (
            n[:, 0].square() * squares_one + n[:, 1].square() * squares_other + 2 * n.prod(1) * products
        ) / held.square()
        saved = (
            self._price(n[:, 0], squares_one, d, kappa)
            + self._price(n[:, 1], squares_other, d, kappa)
            - self._price(held, centre, d, kappa)
        )
        gains: Tensor = degrees / 2 * torch.log1p(between / degrees) - saved
        return torch.where(left > 0, gains, -torch.inf)

    def _whitened(self, sums: Sums) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """n_k, the means in units of Σ, ν, and the Cholesky factor of Ψ, once for the same sums."""
        if self._known is not None and self._known[0] is sums:
            return self._known[1]
        weight = sums["weight"]
        means = sums["first"] / weight.clamp_min(1e-300)[:, None]
        scatter = self.spread + sums["second"] - (means * weight[:, None]).T @ means
        degrees = weight.sum() + means.shape[1] + 2
        lower = torch.linalg.cholesky(scatter)
        white = torch.linalg.solve_triangular(lower, means.T, upper=False).T * degrees.sqrt()
        self._known = sums, (weight, white, degrees, lower)
        return self._known[1]

    @staticmethod
    def _price(weight: Tensor, squares: Tensor, d: int, kappa: Tensor) -> Tensor:
        return (d * torch.log1p(weight / kappa) + kappa * weight / (kappa + weight) * squares) / 2


class OwnCovariances(Evidence):
    """Σ_k for every concept; `second` (K, d, d)."""

    def blurred(self, sums: Sums) -> Sums:
        return {**sums, "second": sums["second"] + sums["weight"][:, None, None] * self.blur}

    def total(self, sums: Sums) -> Tensor:
        return self._each(sums, *self._hyperparameters(sums)).sum()

    def merge_gains(self, sums: Sums, pairs: Tensor) -> Tensor:
        given = self._hyperparameters(sums)
        alone = self._each(sums, *given)
        gains = []
        for some in torch.split(pairs, max(1, _CHUNK // sums["second"][0].numel())):
            a, b = some.T
            together = {name: tensor[a] + tensor[b] for name, tensor in sums.items()}
            gains.append(self._each(together, *given) - alone[a] - alone[b])
        return torch.cat(gains)

    def split_gains(self, sums: Sums, concepts: Tensor, parts: Sums) -> Tensor:
        given = self._hyperparameters(sums)
        return self._each(parts, *given).view(-1, 2).sum(1) - self._each(sums, *given)[concepts]

    def _hyperparameters(self, sums: Sums) -> tuple[Tensor, float]:
        """κ0 and s."""
        means = sums["first"] / sums["weight"].clamp_min(1e-300)[:, None]
        white = torch.linalg.solve_triangular(torch.linalg.cholesky(self.within), means.T, upper=False)
        kappa = self._precision_of_means(white.square().mean(0))
        bounds = torch.stack([self._each(sums, kappa, likeness).sum() for likeness in _LIKENESS])
        return kappa, _LIKENESS[int(bounds.argmax())]

    def _each(self, sums: Sums, kappa: float | Tensor, likeness: float) -> Tensor:
        """The normal-inverse-Wishart marginal of every concept's patches (K,)."""
        n, within = sums["weight"], likeness * self.within
        d = len(within)
        means = sums["first"] / n.clamp_min(1e-300)[:, None]
        # Σ (x - μ)(x - μ)ᵀ + κ0 n / (κ0 + n) μμᵀ: around the prior's centre as far as κ0 says so.
        shrunk = (n - kappa * n / (kappa + n))[:, None] * means
        scatter = within + sums["second"] - shrunk[:, :, None] * means[:, None]
        before = torch.full_like(n, d + 1 + likeness)
        shape = torch.special.multigammaln((before + n) / 2, d) - torch.special.multigammaln(before / 2, d)
        fit = (before * _log_det(within) - (before + n) * _log_det(scatter)) / 2 - n * d / 2 * math.log(math.pi)
        each: Tensor = shape + fit - d / 2 * torch.log1p(n / kappa)
        return each


class OwnVariances(OwnCovariances):
    """Independent dimensions, each with one-dimensional evidence; `second` (K, d)."""

    def blurred(self, sums: Sums) -> Sums:
        return {**sums, "second": sums["second"] + sums["weight"][:, None] * self.blur.diagonal()}

    def _each(self, sums: Sums, kappa: float | Tensor, likeness: float) -> Tensor:
        n, within = sums["weight"][:, None], likeness * self.within.diagonal()
        means = sums["first"] / n.clamp_min(1e-300)
        scatter = within + sums["second"] - (n - kappa * n / (kappa + n)) * means.square()
        before = 2 + likeness
        shape = torch.lgamma((before + n) / 2) - math.lgamma(before / 2)
        fit = (before * within.log() - (before + n) * scatter.log()) / 2 - n / 2 * math.log(math.pi)
        return (shape + fit - torch.log1p(n / kappa) / 2).sum(1)


# A few directions of its own are no conjugate family: low-rank concepts are counted with one covariance for all.
EVIDENCE: dict[str, tuple[type[Evidence], str]] = {
    "tied": (SharedCovariance, "tied"),
    "full": (OwnCovariances, "full"),
    "diag": (OwnVariances, "diag"),
    "low_rank": (SharedCovariance, "tied"),
}


def covariance(x: Tensor, weights: Tensor) -> Tensor:
    """Around the origin, float64, with what rounding cannot tell from none added, so that it can be factorised."""
    wide = x.double() * weights.double().sqrt()[:, None]
    second = wide.T @ wide / weights.sum(dtype=torch.float64)
    scale = second.diagonal().mean()
    least = max(8 * torch.finfo(x.dtype).eps, 1e-10) * torch.where(scale > 0, scale, torch.ones_like(scale))
    return second + least * torch.eye(len(second), dtype=torch.float64, device=x.device)


def whitening(covariance: Tensor) -> Tensor:
    """Patches times this have unit spread."""
    white: Tensor = torch.linalg.inv(torch.linalg.cholesky(covariance)).mT
    return white


def _log_det(matrices: Tensor) -> Tensor:
    half: Tensor = torch.linalg.cholesky(matrices).diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return 2 * half
