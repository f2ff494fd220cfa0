"""How many independent patches an image has, and how concept shares vary from image to image: what intervals are made of.

Attention counts some patches more than others, and neighbours repeat each other. r_j are the concepts of patch j as far as the
patch itself tells, if all images had the same shares m. A(h) is Σ_k r_jk r_ik, averaged over the patches i and j of all images
that lie h rows and columns apart, with their attention for weights. A_∞ is its mean over all that are at least some distance
apart, where that is lowest, up to half of the grid: how far strangers agree.

- With ρ(h) = (A(h) − A_∞) / (A(0) − A_∞), a mean of patches with weights a that sum to 1 varies as one of
  n = 1 / Σ_ij a_i a_j ρ(i − j) independent patches. Where neighbours do not agree that is Kish's 1 / Σ a²; it is never more.
- Strangers of an image agree more than those of two images, since their image has shares θ of its own. If these are Dir(s m),
  then A_∞ − Σ m² = Σ_l (Σ_k m_k C_kl² − m_l²) / (s + 1), where C_kl = E[r_k r_l] / m_k is how concepts are confused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import digamma
from torch import Tensor

Array = npt.NDArray[Any]

_STRENGTHS = 1e-2, 1e4  # of the prior: images that have nothing in common, and images that are all alike
_SMALLEST = 1e-3  # of a concept in the prior
_STEPS = 10  # towards shares that all images have in common


def learn_intervals(
    phi: Array, gamma: Array, attention: Array, grid: tuple[int, int] | None, prefix: int
) -> tuple[Array | None, Array]:
    """ρ (rows, columns), if there is a grid, and the prior s m (K,), from φ and γ of some images."""
    weights = (attention / attention.sum(1, keepdims=True))[:, prefix:]
    told, shares = _told_by_patches(phi[:, prefix:], gamma, weights)
    shape = grid or (1, phi.shape[1] - prefix)
    agreed, pairs = np.zeros(shape), np.zeros(shape)
    confused = np.zeros((phi.shape[2], phi.shape[2]))
    for tokens, weight in zip(told, weights, strict=True):
        own = tokens * weight[:, None]
        agreed += _pairs(own.T.reshape(1, -1, *shape))[0]
        pairs += _pairs(weight.reshape(1, 1, *shape))[0]
        confused += tokens.T @ own / weights.sum()
    apart = np.maximum(*np.mgrid[: shape[0], : shape[1]])
    beyond = [apart >= reach for reach in range(1, max(2, min(shape) // 2 + 1)) if pairs[apart >= reach].sum() > 0]
    strangers = min((agreed[far].sum() / pairs[far].sum() for far in beyond), default=1.0)
    between = (confused**2 / shares[:, None]).sum() - (shares**2).sum()
    strength = between / max(strangers - (shares**2).sum(), 1e-12) - 1
    prior = (shares * np.clip(strength, *_STRENGTHS)).clip(_SMALLEST)
    if grid is None:
        return None, prior
    agreement = np.divide(agreed, pairs, out=np.full(shape, strangers), where=pairs > 0)
    spread = agreement[0, 0] - strangers
    return np.ones(shape) if spread < 1e-6 else (agreement - strangers) / spread, prior


def effective_weights(attention: Array, neighbours: Array | None, grid: tuple[int, int] | None, prefix: int) -> Array:
    """Weights (M, J) in proportion to the attention; those of an image sum to its effective number of patches."""
    shares = attention / attention.sum(1, keepdims=True)
    repeats = kish = (shares**2).sum(1)
    if neighbours is not None and grid is not None:
        known = np.zeros(grid)  # patches further apart than any that were seen do not repeat each other
        rows, columns = np.minimum(grid, neighbours.shape)
        known[:rows, :columns] = neighbours[:rows, :columns]
        pairs = _pairs(shares[:, prefix:].reshape(-1, 1, *grid))
        repeats = (pairs * known).sum((1, 2)) + (shares[:, :prefix] ** 2).sum(1)
    return np.asarray(shares / np.maximum(repeats, kish)[:, None])


def _told_by_patches(phi: Array, gamma: Array, weights: Array) -> tuple[Array, Array]:
    """r (M, J, K), without the image's own shares, and the shares m (K,) that all images have in common."""
    # φ_jk ∝ p_jk exp E log θ_k, and E log θ_k is Ψ(γ_k) but for a constant. φ is never below e^-86, however small it should be.
    field = digamma(gamma)
    likelihood = phi * np.exp(np.minimum(field.max(1, keepdims=True) - field, 40))[:, None]
    likelihood /= likelihood.max(2, keepdims=True).clip(1e-300)
    shares = np.full(phi.shape[2], 1 / phi.shape[2])
    for _ in range(_STEPS):
        norm = (likelihood @ shares).clip(1e-300)
        shares = shares * np.einsum("mj,mjk->k", weights / norm, likelihood) / weights.sum()
    shares = shares.clip(1e-12)
    told = likelihood * shares
    return told / told.sum(2, keepdims=True).clip(1e-300), shares


def _pairs(maps: Array) -> Array:
    """Σ_j x_j x_{j+h} over the maps (n, maps, rows, columns) too, for all shifts by so many rows and columns, either way."""
    rows, columns = maps.shape[2:]
    size = 2 * rows, 2 * columns
    spectrum: Tensor = torch.fft.rfft2(torch.from_numpy(np.ascontiguousarray(maps, np.float64)), size)
    found = torch.fft.irfft2(torch.view_as_real(spectrum).square().sum((1, 4)), size).numpy()
    found[:, 1:rows] += found[:, :rows:-1]
    found[:, :, 1:columns] += found[:, :, :columns:-1]
    return np.asarray(found[:, :rows, :columns])
