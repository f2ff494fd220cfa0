"""The concepts: K Gaussians over patch embeddings, in four covariance families.

Notation (docs/model.md): n patches x (n, d), centred on the data mean; r (n, K) = weight of patch i under concept k.

    means μ_k (K, d) · Σ_k⁻¹ = P_k P_kᵀ, P_k upper triangular · prior: κ pseudo-patches with covariance Σ0

A family knows four things: squared Mahalanobis distances, log |Σ_k|, which weighted sums of the patches it needs, and the
(μ, Σ) that maximise Σ_i r_ik log N(x_i | μ_k, Σ_k) - κ/2 (log |Σ_k| + tr Σ0 Σ_k⁻¹) given these sums. The prior keeps Σ_k
positive definite from any number of patches. Sums are float64 whatever the working precision, and add up.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

Sums = dict[str, Tensor]

# Rows and columns worked on together: small enough to stay in a CPU's cache, large enough to fill a GPU.
_ROWS = {"cpu": 4096, "cuda": 1 << 16}
_COLUMNS = {"cpu": 64, "cuda": 256}
_SPARSE, _WIDE = 8, 512  # with one entry in so many, and so many columns, a product is quicker without the others


@dataclass(frozen=True)
class Prior:
    """κ pseudo-patches with covariance Σ0 for every concept, around whatever mean it has."""

    covariance: Tensor  # Σ0 (d, d), float64
    strength: float  # κ


class Gaussians(ABC):
    """K Gaussians with means (K, d); every family below is one way to hold their covariances."""

    name: str
    means: Tensor
    log_det: Tensor  # log |Σ_k| (K,)

    @classmethod
    @abstractmethod
    def seed(cls, means: Tensor, covariance: Tensor, rank: int) -> Gaussians:
        """All concepts start from one covariance (d, d)."""

    def features(self, embeddings: Tensor, offset: Tensor, room: Tensor | None = None) -> Tensor:
        """What `mahalanobis` and `accumulate` read: the patches x = e - offset, and their squares where these are needed.

        `room` is what an earlier call returned, if that is no longer needed: fresh memory costs more than the arithmetic.
        """
        return torch.sub(embeddings, offset, out=_room(room, embeddings, embeddings.shape[1]))

    @abstractmethod
    def mahalanobis(self, x: Tensor) -> Tensor:
        """(x_i - μ_k)ᵀ Σ_k⁻¹ (x_i - μ_k) as (n, K), from features."""

    @abstractmethod
    def empty_sums(self) -> Sums:
        """Zeros for `accumulate`; always with `weight` Σ_i r_ik (K,) and `first` Σ_i r_ik x_i (K, d)."""

    def accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None:
        """Add these patches, given as features, to the sums; r is used up.

        Most responsibilities are zero to machine precision. Those patches are left out, of all sums alike.
        """
        self._accumulate(x, torch.nn.functional.threshold(r, 8 * torch.finfo(r.dtype).eps, 0.0, inplace=True), sums)

    @abstractmethod
    def _accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None: ...

    @abstractmethod
    def maximise(self, sums: Sums, prior: Prior) -> Gaussians:
        """eq. update_mu and update_sigma, with the prior. A concept without patches keeps its mean."""

    @abstractmethod
    def log_prior(self, prior: Prior) -> float:
        """-κ/2 Σ_k (log |Σ_k| + tr Σ0 Σ_k⁻¹), what the prior adds to the bound."""

    @abstractmethod
    def covariances(self) -> Tensor:
        """Σ, float64: (K, d, d); (d, d) when tied; the variances (K, d) when diagonal."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Everything `from_tensors` needs."""

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Gaussians: ...

    def tokens_at_once(self) -> int:
        """How many patches to work on together: enough to fill a GPU; on a CPU enough to make K d² sums worth their while."""
        return 1 << (15 if self.means.device.type == "cpu" else 18)

    def _new_means(self, sums: Sums) -> Tensor:
        """eq. update_mu: μ_k = Σ_i r_ik x_i / Σ_i r_ik, float64."""
        weight = sums["weight"][:, None]
        return torch.where(weight > 0, sums["first"] / weight.clamp_min(1e-300), self.means.double())

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.means.device)


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
        step = _ROWS.get(x.device.type, 1 << 16)
        out = x.new_empty(len(x), len(self.means))
        for start in range(0, len(x), step):
            rows = slice(start, start + step)
            for k, factor in enumerate(self.precision_cholesky):
                out[rows, k] = _triangular_norms(x[rows], factor, self._shift[k])
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
        sums["first"].add_(_weighted_sums(r, x))
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


class _DiagonalFeatures(Gaussians):
    """Families that read every dimension's square: features are x and x² side by side, so that each product is one."""

    def tokens_at_once(self) -> int:
        # The work on a patch is light here, so on a CPU what is worked on should stay in the cache.
        return (
            max(256, (1 << 20) // self.means.shape[1]) if self.means.device.type == "cpu" else super().tokens_at_once()
        )

    def features(self, embeddings: Tensor, offset: Tensor, room: Tensor | None = None) -> Tensor:
        d = embeddings.shape[1]
        both = _room(room, embeddings, 2 * d)
        torch.sub(embeddings, offset, out=both[:, :d])
        torch.mul(both[:, :d], both[:, :d], out=both[:, d:])
        return both


class DiagGaussians(_DiagonalFeatures):
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
        constant, coefficients = self._quadratic
        return torch.addmm(constant, x, coefficients).clamp_min_(0)

    def empty_sums(self) -> Sums:
        k, d = self.means.shape
        return {"weight": self._zeros(k), "first": self._zeros(k, d), "second": self._zeros(k, d)}

    def _accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None:
        _add_diagonal_sums(x, r, sums)

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

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> DiagGaussians:
        return cls(tensors["means"], tensors["variances"])


class LowRankGaussians(_DiagonalFeatures):
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
        k = len(means)
        return cls(
            means,
            variances.to(means.dtype).expand(k, -1).contiguous(),
            factors.to(means.dtype).expand(k, -1, -1).contiguous(),
        )

    def _projected(self, x: Tensor) -> Tensor:
        """Aᵀ (x - μ_k) for every concept: (n, K, rank)."""
        k, rank, d = self._whitened.shape
        shift = (self._whitened @ self.means[:, :, None]).reshape(-1)
        return torch.addmm(shift, x, self._whitened.reshape(k * rank, d).T, beta=-1).reshape(len(x), k, rank)

    def mahalanobis(self, x: Tensor) -> Tensor:
        constant, coefficients = self._quadratic
        distance = torch.addmm(constant, x, coefficients)
        return distance.sub_(self._projected(x[:, : self.means.shape[1]]).square().sum(2)).clamp_min_(0)

    def empty_sums(self) -> Sums:
        k, d, rank = self.factors.shape
        return {
            "weight": self._zeros(k),
            "first": self._zeros(k, d),
            "second": self._zeros(k, d),
            "factor": self._zeros(k, rank),  # Σ r E[f]
            "cross": self._zeros(k, d, rank),  # Σ r x E[f]ᵀ
            "spread": self._zeros(k, rank, rank),  # Σ r E[f fᵀ]
        }

    def _accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None:
        _add_diagonal_sums(x, r, sums)
        x = x[:, : self.means.shape[1]]
        gain = self.factor_covariance @ (self.factors.double() / self.variances.double()[:, :, None]).mT  # B_k
        gain = gain.to(x.dtype)
        for k, weights in enumerate(r.T.contiguous()):
            rows = weights.nonzero().squeeze(1)
            if len(rows) == 0:
                continue
            patches, weight = x[rows], weights[rows, None]
            factor = (patches - self.means[k]) @ gain[k].T
            weighted = factor * weight
            sums["factor"][k] += weighted.sum(0, dtype=torch.float64)
            sums["cross"][k] += (patches.T @ weighted).double()
            sums["spread"][k] += weight.sum(dtype=torch.float64) * self.factor_covariance[k]
            sums["spread"][k] += (factor.T @ weighted).double()

    def maximise(self, sums: Sums, prior: Prior) -> LowRankGaussians:
        means, weight = self._new_means(sums), sums["weight"][:, None]
        rank = self.factors.shape[2]
        # Regress x on (f, 1): its coefficients are the new U_k; its intercept gives way to the weighted mean, which is
        # the better μ_k for any U_k and v_k.
        moments = torch.cat(
            [
                torch.cat([sums["spread"], sums["factor"][:, :, None]], 2),
                torch.cat([sums["factor"], weight], 1)[:, None],
            ],
            1,
        )
        cross = torch.cat([sums["cross"], sums["first"][:, :, None]], 2)
        used = weight > 0
        identity = torch.eye(rank + 1, dtype=torch.float64, device=means.device)
        coefficients = torch.linalg.solve(torch.where(used[:, :, None], moments, identity), cross.mT).mT
        residual = (sums["second"] - (coefficients * cross).sum(2)).clamp_min(0)
        target = prior.strength * prior.covariance.diagonal()
        variances = (torch.where(used, residual, 0.0) + target) / (weight + prior.strength)
        variances = torch.where(used | (prior.strength > 0), variances, self.variances.double())
        # A concept without patches keeps its directions: from none, factor analysis would never find any.
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

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> LowRankGaussians:
        return cls(tensors["means"], tensors["variances"], tensors["factors"])


FAMILIES: dict[str, type[Gaussians]] = {
    family.name: family for family in (FullGaussians, DiagGaussians, TiedGaussians, LowRankGaussians)
}


_NOT_POSITIVE = (
    "a concept's covariance is not positive definite; use a larger covariance_prior, or rescale the embeddings if their "
    "squares leave the range of dtype"
)


def _positive(variances: Tensor) -> Tensor:
    smallest, largest = variances.aminmax()
    if not (smallest >= torch.finfo(variances.dtype).tiny and largest < torch.inf):
        raise ValueError(_NOT_POSITIVE)
    return variances


def _precision_cholesky(covariance: Tensor) -> Tensor:
    """P upper triangular with P Pᵀ = Σ⁻¹, float64."""
    covariance = (covariance + covariance.mT) / 2
    lower, failed = torch.linalg.cholesky_ex(covariance)
    if failed or not bool(torch.isfinite(lower[-1]).all()):
        raise ValueError(_NOT_POSITIVE)
    identity = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    inverse: Tensor = torch.linalg.solve_triangular(lower, identity, upper=False)
    return inverse.mT.contiguous()


def _covariance(precision_cholesky: Tensor) -> Tensor:
    """Σ = (P Pᵀ)⁻¹ = P⁻ᵀ P⁻¹."""
    factor = precision_cholesky.double()
    identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    inverse: Tensor = torch.linalg.solve_triangular(factor, identity, upper=True)
    return inverse.mT @ inverse


def _triangular_norms(x: Tensor, factor: Tensor, shift: Tensor) -> Tensor:
    """‖x P - s‖² by row. P is upper triangular: a column block needs only the rows above its end, about half the product."""
    width = _COLUMNS.get(x.device.type, 256)
    total = x.new_zeros(len(x))
    for start in range(0, len(factor), width):
        end = min(start + width, len(factor))
        block = torch.addmm(shift[start:end], x[:, :end], factor[:end, start:end], beta=-1)
        total += block.square_().sum(1)
    return total


def _diagonal_quadratic(means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_d (x_d - μ_kd)² / v_kd = constant_k + (x, x²) · coefficients."""
    precision = 1 / variances.double()
    scaled = means.double() * precision
    constant = (scaled * means.double()).sum(1)
    return constant.to(means.dtype), torch.cat([-2 * scaled, precision], 1).T.contiguous().to(means.dtype)


def _add_diagonal_sums(x: Tensor, r: Tensor, sums: Sums) -> None:
    d = sums["first"].shape[1]
    both = _weighted_sums(r, x)
    sums["weight"].add_(r.sum(0))
    sums["first"].add_(both[:, :d])
    sums["second"].add_(both[:, d:])


def _weighted_sums(r: Tensor, x: Tensor) -> Tensor:
    """rᵀ x. On a CPU, where r is mostly zero, only from the entries that are not."""
    if r.device.type == "cpu" and x.shape[1] >= _WIDE:
        some = r[::16]
        if int(some.count_nonzero()) * _SPARSE < some.numel():
            n, k = r.shape
            flat = r.T.flatten()
            places = flat.nonzero().squeeze(1)
            starts = torch.searchsorted(places, n * torch.arange(k + 1))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch calls its CSR layout a beta feature
                return torch.sparse_csr_tensor(starts, places % n, flat[places], (k, n)) @ x
    return r.T @ x


def _room(room: Tensor | None, like: Tensor, columns: int) -> Tensor:
    if room is None or len(room) < len(like):
        return like.new_empty(len(like), columns)
    return room[: len(like)]
