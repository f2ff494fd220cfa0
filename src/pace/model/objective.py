"""The bound's terms beside the Gaussians: the Dirichlet part of L_e, the faithfulness term L_f, the stability term L_s.

φ̄ (B, K) mean concepts of B images, φ̄' (B, K) of their perturbed views · H (K, N) label head, columns η_n · β (K,) pair weights
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Bound(NamedTuple):
    """L = L_e + L_f + L_s, averaged over images."""

    embedding: float
    faithfulness: float
    stability: float

    @property
    def total(self) -> float:
        return self.embedding + self.faithfulness + self.stability


def expected_log_theta(gamma: Tensor) -> Tensor:
    """E_q[log θ_mk] = Ψ(γ_mk) - Ψ(Σ_k γ_mk)."""
    return torch.digamma(gamma) - torch.digamma(gamma.sum(-1, keepdim=True))


def dirichlet_kl(gamma: Tensor, alpha: Tensor) -> Tensor:
    """KL(Dirichlet(γ_m) ‖ Dirichlet(α)) by image."""
    normaliser = torch.lgamma(gamma.sum(-1)) - torch.lgamma(alpha.sum())
    normaliser = normaliser - (torch.lgamma(gamma) - torch.lgamma(alpha)).sum(-1)
    return normaliser + ((gamma - alpha) * expected_log_theta(gamma)).sum(-1)


def faithfulness(phi_bar: Tensor, predictions: Tensor, label_head: Tensor) -> Tensor:
    """L_f by image (eq. faithful): Σ_n ŷ_mn η_nᵀφ̄_m - log Σ_n exp η_nᵀφ̄_m."""
    scores = phi_bar @ label_head
    return (predictions * scores).sum(1) - scores.logsumexp(1)


def faithfulness_gradients(phi_bar: Tensor, predictions: Tensor, label_head: Tensor) -> tuple[Tensor, Tensor]:
    """∂L_f/∂φ̄ (B, K), eq. gradient_phi_classify, and ∂ΣL_f/∂H (K, N)."""
    scores = phi_bar @ label_head
    residual = predictions - scores.softmax(1)
    return residual @ label_head.T, phi_bar.T @ residual


def stability(phi_bar: Tensor, phi_bar_perturbed: Tensor, pair_weights: Tensor, groups: Groups) -> Tensor:
    """L_s by image (eq. stability): βᵀ(φ̄_m∘φ̄'_m) - log Σ_f exp βᵀ(φ̄_m∘φ̄_f), f the other images of m's group."""
    own = (phi_bar * phi_bar_perturbed) @ pair_weights
    others = groups.similarities(phi_bar, pair_weights).logsumexp(2)
    return torch.where(groups.alone, 0.0, own - groups.flat(others))


def stability_gradients(
    phi_bar: Tensor, phi_bar_perturbed: Tensor, pair_weights: Tensor, groups: Groups, *, own_term_only: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """∂ΣL_s/∂φ̄, ∂ΣL_s/∂φ̄' and ∂ΣL_s/∂β.

    An image also stands among the negatives of others. The printed φ update leaves that out (`own_term_only`).
    """
    shares = groups.similarities(phi_bar, pair_weights).softmax(2)  # of negative f in m's denominator
    shares = torch.where(groups.padded(groups.alone)[:, :, None], 0.0, shares)
    tidy = groups.padded(phi_bar)
    paired = torch.where(groups.alone[:, None], 0.0, 1.0)
    difference = paired * phi_bar_perturbed - groups.flat(shares @ tidy)
    gradient = difference if own_term_only else difference - groups.flat(shares.mT @ tidy)
    return gradient * pair_weights, paired * phi_bar * pair_weights, (phi_bar * difference).sum(0)


class Groups:
    """Consecutive images that are each other's negatives, by the size of every group."""

    def __init__(self, sizes: list[int], device: torch.device | None = None):
        self.sizes = sizes
        self._largest = max(sizes)
        number = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        place = torch.cat([torch.arange(size) for size in sizes])
        self._number, self._place = number.to(device), place.to(device)
        self.alone = torch.tensor([size == 1 for size in sizes])[number].to(device)
        filled = place.new_zeros(len(sizes), self._largest, dtype=torch.bool)
        filled[number, place] = True
        self._others = (filled[:, None, :] & ~torch.eye(self._largest, dtype=torch.bool)).to(device)

    def padded(self, values: Tensor) -> Tensor:
        """(B, …) as (groups, largest, …), zeros where a group is smaller."""
        out = values.new_zeros(len(self.sizes), self._largest, *values.shape[1:])
        out[self._number, self._place] = values
        return out

    def flat(self, values: Tensor) -> Tensor:
        """Back to (B, …)."""
        return values[self._number, self._place]

    def similarities(self, phi_bar: Tensor, pair_weights: Tensor) -> Tensor:
        """βᵀ(φ̄_m∘φ̄_f) as (groups, m, f), -inf where f is no negative of m; zeros for an image that has none."""
        tidy = self.padded(phi_bar)
        similar = (tidy * pair_weights) @ tidy.mT
        none = ~self._others.any(2, keepdim=True)
        return torch.where(self._others, similar, torch.where(none, 0.0, -torch.inf))
