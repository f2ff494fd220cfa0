"""Diagonal covariances, alone or with a few directions added."""

from __future__ import annotations

import torch
from torch import Tensor

from pace.model.gaussians.family import NOT_POSITIVE, Gaussians, Prior, Sums, room_for, slices, weighted_sums

_CACHED = 600_000  # values that are worked on at once on a CPU: squares should still be near when they are multiplied


class _Squares(Gaussians):
    """Families that read every dimension's square.

    On a GPU features are x and x² side by side, so that one product does for both. On a CPU memory is the limit: there
    features are x alone, and squares are made where they are needed, first in the nearest cache, then in place of x.
    """

    _quadratic: tuple[Tensor, Tensor]

    def tokens_at_once(self) -> int:
        # A patch takes little work here, so on a CPU the batch should stay in the cache.
        if self.means.device.type == "cpu":
            return max(4096, (1 << 19) // max(64, self.means.shape[1]))
        return super().tokens_at_once()

    def features(self, embeddings: Tensor, offset: Tensor, room: Tensor | None = None) -> Tensor:
        if embeddings.device.type == "cpu":
            return super().features(embeddings, offset, room)
        d = embeddings.shape[1]
        both = room_for(room, embeddings, 2 * d)
        torch.sub(embeddings, offset, out=both[:, :d])
        torch.mul(both[:, :d], both[:, :d], out=both[:, d:])
        return both

    def _quadratic_forms(self, x: Tensor) -> Tensor:
        """Σ_d (x_d - μ_kd)² / v_kd as (n, K), up to rounding, which can make it negative."""
        constant, coefficients = self._quadratic
        if x.device.type != "cpu":
            return torch.addmm(constant, x, coefficients.T)
        # With patches as columns the products are a tenth quicker, and each concept's r are next to each other for the sums.
        (n, d), k = x.shape, len(constant)
        out = x.new_empty(k, n)
        step = max(1, _CACHED // (2 * d + k))
        room = x.new_empty(min(step, n), 2 * d)
        for rows in slices(n, step):
            both = room[: rows.stop - rows.start]
            both[:, :d] = x[rows]
            torch.mul(x[rows], x[rows], out=both[:, d:])
            torch.addmm(constant[:, None], coefficients, both.T, out=out[:, rows])
        return out.T

    def _add_diagonal_sums(self, x: Tensor, r: Tensor, sums: Sums) -> None:
        d = self.means.shape[1]
        weighted = weighted_sums(r, 2 * d)
        sums["weight"].add_(r.sum(0))
        if x.device.type == "cpu":
            sums["first"].add_(weighted(x))
            sums["second"].add_(weighted(x.square_()))
        else:
            both = weighted(x)
            sums["first"].add_(both[:, :d])
            sums["second"].add_(both[:, d:])


class DiagGaussians(_Squares):
    """Independent dimensions: the cheapest, and often enough."""

    name = "diag"

    def __init__(self, means: Tensor, variances: Tensor):
        self.means = means
        self.variances = variances  # (K, d)
        self.log_det = variances.double().log().sum(1).to(means.dtype)
        self._quadratic = _diagonal_quadratic(means, variances)

    @classmethod
    def seed(cls, means: Tensor, covariance: Tensor, rank: int) -> DiagGaussians:
        return cls(means, covariance.diagonal().to(means.dtype).expand_as(means).contiguous())

    def mahalanobis(self, x: Tensor) -> Tensor:
        return self._quadratic_forms(x).clamp_min_(0)

    def empty_sums(self) -> Sums:
        return self._zeros(second=tuple(self.means.shape))

    def _accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None:
        self._add_diagonal_sums(x, r, sums)

    def maximise(self, sums: Sums, prior: Prior) -> DiagGaussians:
        means, weight = self._new_means(sums), sums["weight"][:, None]
        target = prior.strength * prior.covariance.diagonal()
        scatter = torch.where(weight > 0, sums["second"] - weight * means.square(), 0.0).clamp_min(0)
        variances = (scatter + target) / (weight + prior.strength)
        variances = torch.where(weight + prior.strength > 0, variances, self.variances.double())
        return DiagGaussians(means.to(self.means.dtype), _positive(variances.to(self.means.dtype)))

    def log_prior(self, prior: Prior) -> float:
        variances = self.variances.double()
        return -prior.strength / 2 * float((variances.log() + prior.covariance.diagonal() / variances).sum())

    def covariances(self) -> Tensor:
        return self.variances.double()

    def tensors(self) -> dict[str, Tensor]:
        return {"means": self.means, "variances": self.variances}


class LowRankGaussians(_Squares):
    """Σ_k = diag(v_k) + U_k U_kᵀ with U_k (d, rank): correlated dimensions at the price of rank + 1 diagonal ones.

    A mixture of factor analysers: x = μ_k + U_k f + noise, f ~ N(0, I). Given k, E[f | x] = B_k (x - μ_k) with
    B_k = C_k U_kᵀ diag(v_k)⁻¹ and Cov[f | x] = C_k = (I + U_kᵀ diag(v_k)⁻¹ U_k)⁻¹. `maximise` is the EM step of
    factor analysis on top of the one for the mixture, so the bound rises as well. The prior is on v_k.
    """

    name = "low_rank"

    def __init__(self, means: Tensor, variances: Tensor, factors: Tensor):
        self.means = means
        self.variances = variances  # v_k (K, d)
        self.factors = factors  # U_k (K, d, rank)
        scaled = factors.double() / variances.double()[:, :, None]
        inner = torch.eye(factors.shape[2], dtype=torch.float64, device=means.device) + factors.double().mT @ scaled
        lower = torch.linalg.cholesky(inner)
        log_det = variances.double().log().sum(1) + 2 * lower.diagonal(dim1=1, dim2=2).log().sum(1)
        self.log_det = log_det.to(means.dtype)
        self.factor_covariance = torch.cholesky_inverse(lower)  # C_k (K, rank, rank)
        # Σ⁻¹ = diag(v)⁻¹ - A Aᵀ with A = diag(v)⁻¹ U L⁻ᵀ, L Lᵀ = inner
        whitened = torch.linalg.solve_triangular(lower, scaled.mT, upper=False)
        self._whitened = whitened.to(means.dtype)  # Aᵀ (K, rank, d)
        self._quadratic = _diagonal_quadratic(means, variances)

    @classmethod
    def seed(cls, means: Tensor, covariance: Tensor, rank: int) -> LowRankGaussians:
        rank = min(rank, len(covariance))
        values, vectors = torch.linalg.eigh(covariance)
        factors = vectors[:, -rank:] * (values[-rank:] / 2).sqrt()  # half the variance: the rest stays diagonal
        variances = covariance.diagonal() - factors.square().sum(1)
        parts = (variances.to(means.dtype), factors.to(means.dtype))
        return cls(means, *(part.expand(len(means), *part.shape).contiguous() for part in parts))

    def _projected(self, x: Tensor) -> Tensor:
        """Aᵀ (x - μ_k) for every concept: (n, K, rank)."""
        k, rank, d = self._whitened.shape
        shift = (self._whitened @ self.means[:, :, None]).reshape(-1)
        return torch.addmm(shift, x, self._whitened.reshape(k * rank, d).T, beta=-1).reshape(len(x), k, rank)

    def mahalanobis(self, x: Tensor) -> Tensor:
        distance = self._quadratic_forms(x)
        return distance.sub_(self._projected(x[:, : self.means.shape[1]]).square().sum(2)).clamp_min_(0)

    def empty_sums(self) -> Sums:
        k, d, rank = self.factors.shape
        # Σ r x², Σ r E[f], Σ r x E[f]ᵀ, Σ r E[f fᵀ]
        return self._zeros(second=(k, d), factor=(k, rank), cross=(k, d, rank), spread=(k, rank, rank))

    def _accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None:
        d = self.means.shape[1]
        gain = self.factor_covariance @ (self.factors.double() / self.variances.double()[:, :, None]).mT  # B_k
        gain = gain.to(x.dtype)
        for k, weights in enumerate(r.T.contiguous()):
            rows = weights.nonzero().squeeze(1)
            if len(rows) == 0:
                continue
            patches, weight = x[rows, :d], weights[rows, None]
            factor = (patches - self.means[k]) @ gain[k].T
            weighted = factor * weight
            sums["factor"][k] += weighted.sum(0, dtype=torch.float64)
            sums["cross"][k] += (patches.T @ weighted).double()
            sums["spread"][k] += weight.sum(dtype=torch.float64) * self.factor_covariance[k]
            sums["spread"][k] += (factor.T @ weighted).double()
        self._add_diagonal_sums(x, r, sums)  # overwrites x

    def maximise(self, sums: Sums, prior: Prior) -> LowRankGaussians:
        means, weight = self._new_means(sums), sums["weight"][:, None]
        rank = self.factors.shape[2]
        # Regress x on (f, 1): the coefficients are the new U_k; the weighted mean is a better μ_k than the intercept for any
        # U_k and v_k.
        upper = torch.cat([sums["spread"], sums["factor"][:, :, None]], 2)
        moments = torch.cat([upper, torch.cat([sums["factor"], weight], 1)[:, None]], 1)
        cross = torch.cat([sums["cross"], sums["first"][:, :, None]], 2)
        used = weight > 0
        identity = torch.eye(rank + 1, dtype=torch.float64, device=means.device)
        coefficients = torch.linalg.solve(torch.where(used[:, :, None], moments, identity), cross.mT).mT
        residual = (sums["second"] - (coefficients * cross).sum(2)).clamp_min(0)
        target = prior.strength * prior.covariance.diagonal()
        variances = (torch.where(used, residual, 0.0) + target) / (weight + prior.strength)
        variances = torch.where(used | (prior.strength > 0), variances, self.variances.double())
        # A concept without patches keeps its directions: factor analysis never leaves zero.
        factors = torch.where(used[:, :, None], coefficients[:, :, :rank], self.factors.double())
        dtype = self.means.dtype
        return LowRankGaussians(means.to(dtype), _positive(variances.to(dtype)), factors.to(dtype))

    def log_prior(self, prior: Prior) -> float:
        return DiagGaussians(self.means, self.variances).log_prior(prior)

    def covariances(self) -> Tensor:
        factors = self.factors.double()
        return torch.diag_embed(self.variances.double()) + factors @ factors.mT

    def tensors(self) -> dict[str, Tensor]:
        return {"means": self.means, "variances": self.variances, "factors": self.factors}


def _positive(variances: Tensor) -> Tensor:
    smallest, largest = variances.aminmax()
    if not (smallest >= torch.finfo(variances.dtype).tiny and largest < torch.inf):
        raise ValueError(NOT_POSITIVE)
    return variances


def _diagonal_quadratic(means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_d (x_d - μ_kd)² / v_kd = constant_k + (x, x²) · coefficients_k."""
    precision = 1 / variances.double()
    scaled = means.double() * precision
    constant = (scaled * means.double()).sum(1)
    return constant.to(means.dtype), torch.cat([-2 * scaled, precision], 1).to(means.dtype)
