"""Diagonal covariances, alone or with a few directions added."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pace.model.gaussians.family import NOT_POSITIVE, Gaussians, Prior, Sums, slices, weighted_sums

_CACHED = 600_000  # values that are worked on at once on a CPU: squares should still be near when they are multiplied


class DiagGaussians(Gaussians):
    """Independent dimensions: the cheapest, and often enough."""

    name = "diag"
    parts: tuple[str, ...] = ("means", "variances")

    def __init__(self, means: Tensor, variances: Tensor):
        self.means = means
        self.variances = variances  # (K, d)
        self.log_det = variances.double().log().sum(1).to(means.dtype)
        # Σ_d (x_d - μ_kd)² / v_kd = constant_k + x · linear_k + x² · precision_k
        precision = 1 / variances.double()
        scaled = means.double() * precision
        constant = (scaled * means.double()).sum(1)
        self._quadratic = [part.to(means.dtype) for part in (constant, -2 * scaled, precision)]

    @classmethod
    def seed(cls, means: Tensor, covariance: Tensor, rank: int) -> DiagGaussians:
        return cls(means, covariance.diagonal().to(means.dtype).expand_as(means).contiguous())

    def tokens_at_once(self) -> int:
        # A patch takes little work here, so on a CPU the batch should stay in the cache.
        if self.means.device.type == "cpu":
            return max(4096, (1 << 19) // max(64, self.means.shape[1]))
        return super().tokens_at_once()

    def mahalanobis(self, x: Tensor, within: float = math.inf, relative: bool = False) -> Tensor:
        return self._quadratic_forms(x).clamp_min_(0)

    def _quadratic_forms(self, x: Tensor) -> Tensor:
        """Σ_d (x_d - μ_kd)² / v_kd as (n, K), up to rounding, which can make it negative."""
        constant, linear, precision = self._quadratic
        if x.device.type != "cpu":
            return torch.addmm(constant, x, linear.T).addmm_(x.square(), precision.T)
        # With patches as columns the products are a tenth quicker, and each concept's r are next to each other for the sums.
        out = x.new_empty(len(constant), len(x))
        for rows in slices(len(x), max(1, _CACHED // (2 * x.shape[1] + len(constant)))):
            torch.addmm(constant[:, None], linear, x[rows].T, out=out[:, rows])
            out[:, rows].addmm_(precision, x[rows].T.square())
        return out.T

    def _accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None:
        weighted = weighted_sums(r, 2 * x.shape[1])
        sums["weight"].add_(r.sum(0))
        sums["first"].add_(weighted(x))
        sums["second"].add_(weighted(x.square_()))

    def maximise(self, sums: Sums, prior: Prior) -> DiagGaussians:
        means, weight = self._new_means(sums), sums["weight"][:, None]
        scatter = torch.where(weight > 0, sums["second"] - weight * means.square(), 0.0).clamp_min(0)
        return DiagGaussians(means.to(self.means.dtype), self._new_variances(scatter, weight, prior))

    def _new_variances(self, scatter: Tensor, weight: Tensor, prior: Prior) -> Tensor:
        variances = (scatter + prior.strength * prior.covariance.diagonal()) / (weight + prior.strength)
        variances = torch.where(weight + prior.strength > 0, variances, self.variances.double()).to(self.means.dtype)
        smallest, largest = variances.aminmax()
        if not (smallest >= torch.finfo(variances.dtype).tiny and largest < torch.inf):
            raise ValueError(NOT_POSITIVE)
        return variances

    def log_prior(self, prior: Prior) -> float:
        variances = self.variances.double()
        return -prior.strength / 2 * float((variances.log() + prior.covariance.diagonal() / variances).sum())

    def covariances(self) -> Tensor:
        return self.variances.double()


class LowRankGaussians(DiagGaussians):
    """Σ_k = diag(v_k) + U_k U_kᵀ with U_k (d, rank): correlated dimensions at the price of rank + 1 diagonal ones.

    A mixture of factor analysers: x = μ_k + U_k f + noise, f ~ N(0, I). Given k, E[f | x] = B_k (x - μ_k) with
    B_k = C_k U_kᵀ diag(v_k)⁻¹ and Cov[f | x] = C_k = (I + U_kᵀ diag(v_k)⁻¹ U_k)⁻¹. `maximise` is the EM step of
    factor analysis on top of the one for the mixture, so the bound rises as well. The prior is on v_k.
    """

    name = "low_rank"
    parts = ("means", "variances", "factors")

    def __init__(self, means: Tensor, variances: Tensor, factors: Tensor):
        super().__init__(means, variances)
        self.factors = factors  # U_k (K, d, rank)
        scaled = factors.double() / variances.double()[:, :, None]
        inner = torch.eye(factors.shape[2], dtype=torch.float64, device=means.device) + factors.double().mT @ scaled
        lower = torch.linalg.cholesky(inner)
        log_det = variances.double().log().sum(1) + 2 * lower.diagonal(dim1=1, dim2=2).log().sum(1)
        self.log_det = log_det.to(means.dtype)
        self._factor_covariance = torch.cholesky_inverse(lower)  # C_k (K, rank, rank)
        self._gain = (self._factor_covariance @ scaled.mT).to(means.dtype)  # B_k (K, rank, d)
        # Σ⁻¹ = diag(v)⁻¹ - A Aᵀ with A = diag(v)⁻¹ U L⁻ᵀ, L Lᵀ = inner
        whitened = torch.linalg.solve_triangular(lower, scaled.mT, upper=False)
        self._whitened = whitened.to(means.dtype)  # Aᵀ (K, rank, d)

    @classmethod
    def seed(cls, means: Tensor, covariance: Tensor, rank: int) -> LowRankGaussians:
        rank = min(rank, len(covariance))
        values, vectors = torch.linalg.eigh(covariance)
        factors = vectors[:, -rank:] * (values[-rank:] / 2).sqrt()  # half the variance: the rest stays diagonal
        variances = covariance.diagonal() - factors.square().sum(1)
        parts = (variances.to(means.dtype), factors.to(means.dtype))
        return cls(means, *(part.expand(len(means), *part.shape).contiguous() for part in parts))

    def mahalanobis(self, x: Tensor, within: float = math.inf, relative: bool = False) -> Tensor:
        shift = (self._whitened @ self.means[:, :, None]).reshape(-1)
        projected = torch.addmm(shift, x, self._whitened.flatten(0, 1).T, beta=-1)  # Aᵀ (x - μ_k)
        projected = projected.reshape(len(x), *self._whitened.shape[:2])
        return self._quadratic_forms(x).sub_(projected.square().sum(2)).clamp_min_(0)

    def empty_sums(self) -> Sums:
        k, d, rank = self.factors.shape
        shapes = {"factor": (k, rank), "cross": (k, d, rank), "spread": (k, rank, rank)}  # Σ r of f, x fᵀ and f fᵀ
        zeros = {name: self.means.new_zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        return super().empty_sums() | zeros

    def _accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None:
        for k, weights in enumerate(r.T.contiguous()):
            rows = weights.nonzero().squeeze(1)
            if len(rows) == 0:
                continue
            patches, weight = x[rows], weights[rows, None]
            factor = (patches - self.means[k]) @ self._gain[k].T
            weighted = factor * weight
            sums["factor"][k] += weighted.sum(0, dtype=torch.float64)
            sums["cross"][k] += (patches.T @ weighted).double()
            sums["spread"][k] += weight.sum(dtype=torch.float64) * self._factor_covariance[k]
            sums["spread"][k] += (factor.T @ weighted).double()
        super()._accumulate(x, r, sums)  # overwrites x

    def maximise(self, sums: Sums, prior: Prior) -> LowRankGaussians:
        means, weight = self._new_means(sums), sums["weight"][:, None]
        rank, used = self.factors.shape[2], weight > 0
        # Regress x on (f, 1): the coefficients are the new U_k; the weighted mean is a better μ_k than the intercept for any
        # U_k and v_k.
        upper = torch.cat([sums["spread"], sums["factor"][:, :, None]], 2)
        moments = torch.cat([upper, torch.cat([sums["factor"], weight], 1)[:, None]], 1)
        cross = torch.cat([sums["cross"], sums["first"][:, :, None]], 2)
        identity = torch.eye(rank + 1, dtype=torch.float64, device=means.device)
        coefficients = torch.linalg.solve(torch.where(used[:, :, None], moments, identity), cross.mT).mT
        residual = torch.where(used, sums["second"] - (coefficients * cross).sum(2), 0.0).clamp_min(0)
        # A concept without patches keeps its directions: factor analysis never leaves zero.
        factors = torch.where(used[:, :, None], coefficients[:, :, :rank], self.factors.double())
        dtype = self.means.dtype
        return LowRankGaussians(means.to(dtype), self._new_variances(residual, weight, prior), factors.to(dtype))

    def covariances(self) -> Tensor:
        return torch.diag_embed(super().covariances()) + self.factors.double() @ self.factors.double().mT
