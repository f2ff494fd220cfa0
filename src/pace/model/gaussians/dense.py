"""Covariances with all their entries: one for every concept, or one for all."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pace.model.gaussians import plain
from pace.model.gaussians.family import Gaussians, Prior, Sums, by_concept, slices, weighted_sums
from pace.model.gaussians.triangular import covariance_of, precision_cholesky

# The screen of `near_distances`: from how many dimensions it pays, up to which share of near entries, and how far off a rough
# log-density may be (nats).
_SCREEN_DIM, _SCREEN_SHARE, _SCREEN_ERROR = 256, 1 / 8, 2.0

_FUSED_DIM = 128  # from so many dimensions the kernels in fused.py fill their tiles

# Covariances factorised together: one fills a CPU; a GPU would mostly wait between small steps.
_FACTORED = {"cpu": 1, "cuda": 100}


class FullGaussians(Gaussians):
    """A covariance of its own for every concept; θ is then unchanged by any rotation of the embeddings."""

    name = "full"

    def __init__(self, means: Tensor, precision_cholesky: Tensor):
        self.means = means
        self.precision_cholesky = precision_cholesky  # P_k (K, d, d)
        self.log_det = -2 * precision_cholesky.diagonal(dim1=1, dim2=2).double().log().sum(1).to(means.dtype)

    @classmethod
    def seed(cls, means: Tensor, covariance: Tensor, rank: int) -> FullGaussians:
        factor = precision_cholesky(covariance).to(means.dtype)
        return cls(means, factor.expand(len(means), -1, -1).contiguous())

    @cached_property
    def _distances(self) -> Any:
        """`Distances` of fused.py where the kernels can run and pay, else of plain.py; both have the same methods."""
        if _has_kernels(self.means):
            from pace.model.gaussians import fused

            return fused.Distances(self.means, self.precision_cholesky)
        return plain.Distances(self.means, self.precision_cholesky)

    def mahalanobis(self, x: Tensor) -> Tensor:
        distances = self._distances
        parts = [distances.precise(distances.read(x[rows])) for rows in slices(len(x), distances.rows_at_once)]
        return torch.cat(parts) if parts else x.new_empty(0, len(self.means))

    def near_distances(self, x: Tensor, within: float) -> Tensor:
        """All distances in 16 bits first, where that is quick, then in full precision those that may matter."""
        distances = self._distances
        worthwhile = len(x) >= distances.screened_from and x.shape[1] >= _SCREEN_DIM
        if not (worthwhile and distances.quick_when_rough):
            return self.mahalanobis(x)
        probe = self._near(self.mahalanobis(x[:: -(-len(x) // 256)]), within)
        if int(probe.count_nonzero()) > _SCREEN_SHARE * probe.numel():
            return self.mahalanobis(x)
        return torch.cat([self._screened(x[rows], within) for rows in slices(len(x), distances.rows_at_once)])

    def _near(self, distances: Tensor, within: float) -> Tensor:
        surprise = distances + self.log_det  # -2 log N, up to a constant
        return surprise <= surprise.amin(1, keepdim=True) + 2 * within

    def _screened(self, x: Tensor, within: float) -> Tensor:
        patches = self._distances.read(x)
        out: Tensor = self._distances.rough(patches)
        rows, concepts, counts = by_concept(self._near(out, within + 2 * _SCREEN_ERROR))
        exact = self._distances.precise_at(patches, rows, counts)
        off = (out[rows, concepts] - exact).abs_() > 2 * _SCREEN_ERROR
        out[rows, concepts] = exact
        wrong = torch.unique(rows[off])  # 16 bits were too few: mostly patches far from all concepts
        if len(wrong) > 0:
            out[wrong] = self.mahalanobis(x[wrong])
        return out

    def empty_sums(self) -> Sums:
        k, d = self.means.shape
        return self._zeros(second=(k, d, d))

    def _accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None:
        # Each concept's patches are centred on its present mean, since float32 products around a distant origin would lose
        # the covariance. The sums themselves are around the common origin and therefore add up.
        means, weight = self.means.double(), r.sum(0, dtype=torch.float64)
        first = self._distances.scatter(x, r, sums["second"])
        sums["weight"].add_(weight)
        sums["first"].add_(first + weight[:, None] * means)
        # Σ r x xᵀ = Σ r (x-μ)(x-μ)ᵀ + f μᵀ + μ fᵀ + n μ μᵀ, with f = Σ r (x-μ)
        half = first + weight[:, None] / 2 * means
        sums["second"].baddbmm_(torch.stack([half, means], 2), torch.stack([means, half], 1))

    def maximise(self, sums: Sums, prior: Prior) -> FullGaussians:
        means = self._new_means(sums)
        factors = torch.empty_like(self.precision_cholesky)
        total = (sums["weight"] + prior.strength)[:, None, None]
        for some in self._factored():
            weighted = means[some] * sums["weight"][some, None]
            covariance = torch.baddbmm(sums["second"][some], weighted[:, :, None], means[some][:, None], alpha=-1)
            covariance.add_(prior.covariance, alpha=prior.strength).div_(total[some])
            factors[some] = precision_cholesky(covariance).to(factors.dtype)
        return FullGaussians(means.to(self.means.dtype), factors)

    def log_prior(self, prior: Prior) -> float:
        if not prior.strength:
            return 0.0
        root = torch.linalg.cholesky(prior.covariance).mT.to(self.means.dtype)
        spread = self.log_det.sum(dtype=torch.float64)
        for some in self._factored():
            spread = spread + (root @ self.precision_cholesky[some]).square_().sum(dtype=torch.float64)
        return -prior.strength / 2 * float(spread)

    def _factored(self) -> list[slice]:
        return list(slices(len(self.means), _FACTORED.get(self.means.device.type, _FACTORED["cuda"])))

    def covariances(self) -> Tensor:
        return torch.stack([covariance_of(factor) for factor in self.precision_cholesky])

    def tensors(self) -> dict[str, Tensor]:
        return {"means": self.means, "precision_cholesky": self.precision_cholesky}


class TiedGaussians(Gaussians):
    """One covariance shared by all concepts."""

    name = "tied"

    def __init__(self, means: Tensor, precision_cholesky: Tensor):
        self.means = means
        self.precision_cholesky = precision_cholesky  # P (d, d)
        log_det = -2 * precision_cholesky.diagonal().double().log().sum()
        self.log_det = log_det.to(means.dtype).expand(len(means))

    @classmethod
    def seed(cls, means: Tensor, covariance: Tensor, rank: int) -> TiedGaussians:
        return cls(means, precision_cholesky(covariance).to(means.dtype))

    def mahalanobis(self, x: Tensor) -> Tensor:
        centres = self.means @ self.precision_cholesky
        # Whitened distances by one product, seen from a concept in the middle to keep the terms small. Not from the mean of
        # all concepts: empty ones may be far away.
        middle = centres[centres.square().sum(1).argmin()]
        white, centres = x @ self.precision_cholesky - middle, centres - middle
        squares = white.square().sum(1, keepdim=True) + centres.square().sum(1)
        return torch.addmm(squares, white, centres.T, alpha=-2).clamp_min_(0)

    def contrasts(self, x: Tensor, within: float) -> Tensor:
        """|P x - P μ_k|² - |P x|² is linear in x, so no patch has to be whitened."""
        coefficients, constant = self._linear
        return torch.addmm(constant, x, coefficients, alpha=-2)

    @cached_property
    def _linear(self) -> tuple[Tensor, Tensor]:
        """Σ⁻¹ (μ_k - μ) (d, K) and the constants that go with it, both seen from a concept μ in the middle."""
        factor = self.precision_cholesky.double()
        centres = self.means.double() @ factor
        middle = centres[centres.square().sum(1).argmin()]
        constant = centres.square().sum(1) - middle.square().sum()
        return (factor @ (centres - middle).T).to(self.means.dtype), constant.to(self.means.dtype)

    def empty_sums(self) -> Sums:
        d = self.means.shape[1]
        return self._zeros(second=(d, d))

    def _accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None:
        sums["weight"].add_(r.sum(0))
        sums["first"].add_(weighted_sums(r, x.shape[1])(x))
        rooted = x * r.sum(1, keepdim=True).sqrt()
        sums["second"].add_(rooted.T @ rooted)

    def maximise(self, sums: Sums, prior: Prior) -> TiedGaussians:
        means, weight = self._new_means(sums), sums["weight"]
        used = torch.where(weight[:, None] > 0, means, torch.zeros_like(means))
        scatter = sums["second"] - (used * weight[:, None]).T @ used
        strength = len(means) * prior.strength
        covariance = (scatter + strength * prior.covariance) / (weight.sum() + strength)
        return TiedGaussians(means.to(self.means.dtype), precision_cholesky(covariance).to(self.means.dtype))

    def log_prior(self, prior: Prior) -> float:
        factor = self.precision_cholesky.double()
        spread = torch.einsum("de,df,fe->", factor, prior.covariance, factor)
        return -prior.strength / 2 * float(self.log_det.double().sum() + len(self.means) * spread)

    def covariances(self) -> Tensor:
        return covariance_of(self.precision_cholesky)

    def tensors(self) -> dict[str, Tensor]:
        return {"means": self.means, "precision_cholesky": self.precision_cholesky}


def _has_kernels(x: Tensor) -> bool:
    """Whether the kernels in fused.py can run on this input and pay."""
    if x.device.type != "cuda" or x.dtype != torch.float32 or x.shape[1] < _FUSED_DIM:
        return False
    if torch.cuda.get_device_capability(x.device) < (8, 0):
        return False
    try:
        from pace.model.gaussians import fused
    except ImportError:  # torch comes without Triton on some platforms
        return False
    return fused.usable(x.device)
