"""What every covariance family can do, and what they share: sums over few rows, and triangular factors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, threshold

Sums = dict[str, Tensor]

NOT_POSITIVE = (
    "a concept's covariance is not positive definite; rescale the embeddings if their squares leave the range of dtype, "
    "or use dtype='float64'"
)

_SPARSE, _WIDE = 8, 64  # a product is quicker over nonzero entries only, if one in 8 is and there are 64 columns
_RIDGES = (1e-7, 1e-6, 1e-5, 1e-4)  # shares of the mean variance


@dataclass(frozen=True)
class Prior:
    """κ pseudo-patches with covariance Σ0 for every concept, around whatever mean it has."""

    covariance: Tensor  # Σ0 (d, d), float64
    strength: float  # κ


class Gaussians(ABC):
    """K Gaussians with means (K, d); every family is one way to hold their covariances."""

    name: str
    fixed: tuple[str, ...] = ()  # sums that are the same whichever concepts hold the patches
    parts: tuple[str, ...]  # attributes that are the constructor's arguments: means, covariances, …
    means: Tensor
    log_det: Tensor  # log |Σ_k| (K,)

    @classmethod
    @abstractmethod
    def seed(cls, means: Tensor, covariance: Tensor, rank: int) -> Gaussians:
        """All concepts start from one covariance (d, d)."""

    def features(self, embeddings: Tensor, offset: Tensor, room: Tensor | None = None) -> Tensor:
        """The patches x = e - offset, which `mahalanobis` and `accumulate` read.

        `room` is the result of an earlier call that is no longer needed: fresh memory costs more than the arithmetic.
        """
        out = None if room is None or len(room) < len(embeddings) else room[: len(embeddings)]
        return torch.sub(embeddings, offset, out=out)

    @abstractmethod
    def mahalanobis(self, x: Tensor, within: float = math.inf, relative: bool = False) -> Tensor:
        """(x_i - μ_k)ᵀ Σ_k⁻¹ (x_i - μ_k) as (n, K).

        Where that saves work, it may be rough for concepts under which log N is more than `within` below the patch's best;
        and if it is to be `relative`, a constant for each patch may be left out.
        """

    def empty_sums(self) -> Sums:
        """Zeros for `accumulate`, float64: Σ_i r_ik, Σ_i r_ik x_i, and second moments in the form of the covariances."""
        k, d = self.means.shape
        shapes = {"weight": (k,), "first": (k, d), "second": getattr(self, self.parts[1]).shape}
        return {name: self.means.new_zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}

    def accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None:
        """Add these patches to the sums; overwrites both x and r.

        Most responsibilities are zero to machine precision. These are left out of all sums alike. `fixed` sums that are
        known already may be missing, and are then not made.
        """
        self._accumulate(x, threshold(r, 8 * torch.finfo(r.dtype).eps, 0.0, inplace=True), sums)

    @abstractmethod
    def _accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None: ...

    def left_out(self, sums: Sums) -> float:
        """What `relative` distances leave out of Σ_ik r_ik log N(x_i | μ_k, Σ_k)."""
        return 0.0

    @abstractmethod
    def maximise(self, sums: Sums, prior: Prior) -> Gaussians:
        """eq. update_mu and update_sigma, with the prior. A concept without patches keeps its mean."""

    @abstractmethod
    def log_prior(self, prior: Prior) -> float:
        """-κ/2 Σ_k (log |Σ_k| + tr Σ0 Σ_k⁻¹), what the prior adds to the bound."""

    @abstractmethod
    def covariances(self) -> Tensor:
        """Σ, float64: (K, d, d); (d, d) when tied; the variances (K, d) when diagonal."""

    def tensors(self) -> dict[str, Tensor]:
        """Everything `from_tensors` needs."""
        return {name: getattr(self, name) for name in self.parts}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Gaussians:
        return cls(**tensors)

    def tokens_at_once(self) -> int:
        """How many patches to work on together: enough to fill a GPU; on a CPU enough to amortise K d² sums."""
        return 1 << (15 if self.means.device.type == "cpu" else 18)

    def _new_means(self, sums: Sums) -> Tensor:
        """eq. update_mu: μ_k = Σ_i r_ik x_i / Σ_i r_ik, float64."""
        weight = sums["weight"][:, None]
        return torch.where(weight > 0, sums["first"] / weight.clamp_min(1e-300), self.means.double())


def slices(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def by_concept(chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns of the true entries of (n, K), column by column, and how many each column has."""
    places = chosen.T.flatten().nonzero().squeeze(1)
    return places % len(chosen), places // len(chosen), chosen.sum(0)


def weighted_sums(r: Tensor, columns: int) -> Callable[[Tensor], Tensor]:
    """x -> rᵀ x, for x with so many columns. On a CPU, where r is mostly zero, only from the other entries."""
    if r.device.type == "cpu" and columns >= _WIDE:
        n, k = r.shape
        flat = r.T.flatten()
        places = torch.from_numpy(np.flatnonzero(flat.numpy() > 0))  # several times as fast as torch's own
        if len(places) * _SPARSE < len(flat):
            rows, weights = places % n, flat[places]
            starts = torch.searchsorted(places, n * torch.arange(k))
            # One bag of weighted rows for every concept: several times as fast as torch's sparse product.
            return lambda x: embedding_bag(rows, x, starts, mode="sum", per_sample_weights=weights)
    return lambda x: r.T @ x


def precision_cholesky(covariance: Tensor) -> Tensor:
    """P, upper triangular with P Pᵀ = Σ⁻¹, of one covariance or several, float64; reads the lower half of Σ.

    Sums of float32 products can leave a direction that is much narrower than the others with a negative variance. The
    smallest ridge that makes such a Σ positive definite is added.
    """
    lower, failed = torch.linalg.cholesky_ex(covariance)
    ridge = torch.zeros_like(failed, dtype=covariance.dtype)
    for share in _RIDGES if bool(failed.any()) else ():
        variances = covariance.diagonal(dim1=-2, dim2=-1)
        ridge = torch.where(failed > 0, share * variances.mean(-1), ridge)
        lower, failed = torch.linalg.cholesky_ex(covariance + torch.diag_embed(ridge[..., None].expand_as(variances)))
    if bool(failed.any()) or not bool(torch.isfinite(lower[..., -1, :]).all()):
        raise ValueError(NOT_POSITIVE)
    return inverse_of_lower(lower).mT.contiguous()


def inverse_of_lower(lower: Tensor) -> Tensor:
    """L⁻¹ by halves, which skips the zeros above the diagonal."""
    n = lower.shape[-1]
    half = n // 2
    if n <= 128:
        identity = torch.eye(n, dtype=lower.dtype, device=lower.device)
        inverse: Tensor = torch.linalg.solve_triangular(lower, identity, upper=False)
        return inverse
    first, second = inverse_of_lower(lower[..., :half, :half]), inverse_of_lower(lower[..., half:, half:])
    whole = torch.zeros_like(lower)
    whole[..., :half, :half], whole[..., half:, half:] = first, second
    whole[..., half:, :half] = -second @ (lower[..., half:, :half] @ first)
    return whole


def covariance_of(precision_cholesky: Tensor) -> Tensor:
    """Σ = (P Pᵀ)⁻¹ = P⁻ᵀ P⁻¹."""
    inverse = inverse_of_lower(precision_cholesky.double().mT)
    return inverse @ inverse.mT


def common_factor(factors: Tensor) -> tuple[Tensor, Tensor]:
    """P̄, the mean of all P_k, and its inverse, float64.

    x P_k = (x P̄)(P̄⁻¹ P_k): x P̄ has much the same spread in every direction, and the mean of the right factors, which are
    triangular as well, is the identity. Few digits are then enough, even if x has wide and narrow directions.
    """
    common = factors.mean(0, dtype=torch.float64)
    return common, inverse_of_lower(common.mT).mT
