"""Triangular factors: P upper triangular with P Pᵀ = Σ⁻¹."""

from __future__ import annotations

import torch
from torch import Tensor

from pace.model.gaussians.family import NOT_POSITIVE

_RIDGES = (1e-7, 1e-6, 1e-5, 1e-4)  # shares of the mean variance


def precision_cholesky(covariance: Tensor) -> Tensor:
    """P of one covariance or several, float64; reads the lower half of Σ.

    Sums of float32 products can leave a direction that is much narrower than the others with a negative variance. The
    smallest ridge that makes such a Σ positive definite is added.
    """
    lower, failed = torch.linalg.cholesky_ex(covariance)
    ridge = torch.zeros_like(failed, dtype=covariance.dtype)
    for share in _RIDGES if bool(failed.any()) else ():
        ridge = torch.where(failed > 0, share * covariance.diagonal(dim1=-2, dim2=-1).mean(-1), ridge)
        lower, failed = torch.linalg.cholesky_ex(
            covariance + torch.diag_embed(ridge[..., None].expand(covariance.shape[:-1]))
        )
    if bool(failed.any()) or not bool(torch.isfinite(lower[..., -1, :]).all()):
        raise ValueError(NOT_POSITIVE)
    return inverse_of_lower(lower).mT.contiguous()


def inverse_of_lower(lower: Tensor) -> Tensor:
    """L⁻¹ by halves, which skips the zeros above the diagonal."""
    n = lower.shape[-1]
    if n <= 128:
        identity = torch.eye(n, dtype=lower.dtype, device=lower.device)
        inverse: Tensor = torch.linalg.solve_triangular(lower, identity, upper=False)
        return inverse
    half = n // 2
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
