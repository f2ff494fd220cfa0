"""Covariances with all their entries: one for every concept, or one for all."""

from __future__ import annotations

import torch
from torch import Tensor

from pace.model.gaussians.family import NOT_POSITIVE, Gaussians, Prior, Sums, slices, weighted_sums

# Rows and columns worked on together: small enough to stay in a CPU's cache, large enough to fill a GPU.
_ROWS = {"cpu": 4096, "cuda": 1 << 16}
_COLUMNS = {"cpu": 64, "cuda": 256}
_NARROW, _TOGETHER = 128, 320  # dimensions below which concepts are taken side by side, and columns that then makes


class FullGaussians(Gaussians):
    """A covariance of its own for every concept; θ is then unchanged by any rotation of the embeddings."""

    name = "full"

    def __init__(self, means: Tensor, precision_cholesky: Tensor):
        self.means = means
        self.precision_cholesky = precision_cholesky  # P_k (K, d, d)
        self.log_det = -2 * precision_cholesky.diagonal(dim1=1, dim2=2).double().log().sum(1).to(means.dtype)
        self._shift = torch.bmm(means[:, None], precision_cholesky).squeeze(1)  # μ_kᵀ P_k

    @classmethod
    def seed(cls, means: Tensor, covariance: Tensor, rank: int) -> FullGaussians:
        factor = _precision_cholesky(covariance).to(means.dtype)
        return cls(means, factor.expand(len(means), -1, -1).contiguous())

    def mahalanobis(self, x: Tensor) -> Tensor:
        k, d = self.means.shape
        out = x.new_empty(len(x), k)
        if d <= _NARROW:  # one concept's product is too narrow to be quick; several are taken side by side
            factors, shift = self.precision_cholesky.transpose(0, 1).reshape(d, k * d), self._shift.flatten()
            group = max(1, _TOGETHER // d)
            for rows in slices(len(x), _ROWS.get(x.device.type, 1 << 16)):
                for some in slices(k, group):
                    columns = slice(some.start * d, some.stop * d)
                    block = torch.addmm(shift[columns], x[rows], factors[:, columns], beta=-1)
                    out[rows, some] = block.square_().view(len(block), -1, d).sum(2)
            return out
        for rows in slices(len(x), _ROWS.get(x.device.type, 1 << 16)):
            for number, factor in enumerate(self.precision_cholesky):
                out[rows, number] = _triangular_norms(x[rows], factor, self._shift[number])
        return out

    def empty_sums(self) -> Sums:
        k, d = self.means.shape
        return {"weight": self._zeros(k), "first": self._zeros(k, d), "second": self._zeros(k, d, d)}

    def _accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None:
        # Each concept's patches are centred on its present mean, since float32 products around a distant origin
        # would lose the covariance; the sums themselves are around the common origin and therefore add up.
        for k, weights in enumerate(r.T.contiguous()):
            rows = weights.nonzero().squeeze(1)
            if len(rows) == 0:
                continue
            root = weights[rows].sqrt()
            centred = x[rows].sub_(self.means[k]).mul_(root[:, None])
            mean, first = self.means[k].double(), (root @ centred).double()
            weight = root.double().square().sum()
            sums["weight"][k] += weight
            sums["first"][k] += first + weight * mean
            # Σ r x xᵀ = Σ r (x-μ)(x-μ)ᵀ + f μᵀ + μ fᵀ + n μ μᵀ, with f = Σ r (x-μ)
            half = first + weight / 2 * mean
            sums["second"][k].add_(centred.T @ centred).addr_(half, mean).addr_(mean, half)

    def maximise(self, sums: Sums, prior: Prior) -> FullGaussians:
        means = self._new_means(sums)
        factors = torch.empty_like(self.precision_cholesky)
        for k, weight in enumerate(sums["weight"]):
            if weight + prior.strength <= 0:
                factors[k] = self.precision_cholesky[k]
                continue
            scatter = sums["second"][k] - weight * torch.outer(means[k], means[k]) if weight > 0 else 0.0
            covariance = (scatter + prior.strength * prior.covariance) / (weight + prior.strength)
            factors[k] = _precision_cholesky(covariance).to(factors.dtype)
        return FullGaussians(means.to(self.means.dtype), factors)

    def log_prior(self, prior: Prior) -> float:
        if not prior.strength:
            return 0.0
        root = torch.linalg.cholesky(prior.covariance).mT.to(self.means.dtype)
        spread = sum(float((root @ factor).square().sum()) for factor in self.precision_cholesky)
        return -prior.strength / 2 * (float(self.log_det.double().sum()) + spread)

    def covariances(self) -> Tensor:
        return torch.stack([_covariance(factor) for factor in self.precision_cholesky])

    def tensors(self) -> dict[str, Tensor]:
        return {"means": self.means, "precision_cholesky": self.precision_cholesky}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> FullGaussians:
        return cls(tensors["means"], tensors["precision_cholesky"])


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
        return cls(means, _precision_cholesky(covariance).to(means.dtype))

    def mahalanobis(self, x: Tensor) -> Tensor:
        centres = self.means @ self.precision_cholesky
        # Whitened distances by one product; taken from the concepts' own centre to keep the terms small.
        middle = centres.mean(0)
        white, centres = x @ self.precision_cholesky - middle, centres - middle
        squares = white.square().sum(1, keepdim=True) + centres.square().sum(1)
        return torch.addmm(squares, white, centres.T, alpha=-2).clamp_min_(0)

    def empty_sums(self) -> Sums:
        k, d = self.means.shape
        return {"weight": self._zeros(k), "first": self._zeros(k, d), "second": self._zeros(d, d)}

    def _accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None:
        sums["weight"].add_(r.sum(0))
        sums["first"].add_(weighted_sums(r, x))
        rooted = x * r.sum(1, keepdim=True).sqrt()
        sums["second"].add_(rooted.T @ rooted)

    def maximise(self, sums: Sums, prior: Prior) -> TiedGaussians:
        means, weight = self._new_means(sums), sums["weight"]
        used = torch.where(weight[:, None] > 0, means, torch.zeros_like(means))
        scatter = sums["second"] - (used * weight[:, None]).T @ used
        strength = len(means) * prior.strength
        covariance = (scatter + strength * prior.covariance) / (weight.sum() + strength)
        return TiedGaussians(means.to(self.means.dtype), _precision_cholesky(covariance).to(self.means.dtype))

    def log_prior(self, prior: Prior) -> float:
        factor = self.precision_cholesky.double()
        spread = torch.einsum("de,df,fe->", factor, prior.covariance, factor)
        return -prior.strength / 2 * float(self.log_det.double().sum() + len(self.means) * spread)

    def covariances(self) -> Tensor:
        return _covariance(self.precision_cholesky)

    def tensors(self) -> dict[str, Tensor]:
        return {"means": self.means, "precision_cholesky": self.precision_cholesky}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> TiedGaussians:
        return cls(tensors["means"], tensors["precision_cholesky"])


def _precision_cholesky(covariance: Tensor) -> Tensor:
    """P upper triangular with P Pᵀ = Σ⁻¹, float64."""
    covariance = (covariance + covariance.mT) / 2
    lower, failed = torch.linalg.cholesky_ex(covariance)
    if failed or not bool(torch.isfinite(lower[-1]).all()):
        raise ValueError(NOT_POSITIVE)
    return _inverse_of_lower(lower).mT.contiguous()


def _inverse_of_lower(lower: Tensor) -> Tensor:
    """L⁻¹ by halves, which spares the products with the zeros above the diagonal."""
    n = len(lower)
    if n <= 128:
        inverse: Tensor = torch.linalg.solve_triangular(
            lower, torch.eye(n, dtype=lower.dtype, device=lower.device), upper=False
        )
        return inverse
    half = n // 2
    first, second = _inverse_of_lower(lower[:half, :half]), _inverse_of_lower(lower[half:, half:])
    whole = torch.zeros_like(lower)
    whole[:half, :half], whole[half:, half:] = first, second
    whole[half:, :half] = -second @ (lower[half:, :half] @ first)
    return whole


def _covariance(precision_cholesky: Tensor) -> Tensor:
    """Σ = (P Pᵀ)⁻¹ = P⁻ᵀ P⁻¹."""
    inverse = _inverse_of_lower(precision_cholesky.double().mT)
    return inverse @ inverse.mT


def _triangular_norms(x: Tensor, factor: Tensor, shift: Tensor) -> Tensor:
    """‖x P - s‖² by row. P is upper triangular: a column block needs only the rows above its end, about half the product."""
    total = x.new_zeros(len(x))
    for columns in slices(len(factor), _COLUMNS.get(x.device.type, 256)):
        above = slice(0, columns.stop)
        block = torch.addmm(shift[columns], x[:, above], factor[above, columns], beta=-1)
        total += block.square_().sum(1)
    return total
