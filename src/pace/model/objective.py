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
    residual = predictions - predictions.sum(1, keepdim=True) * scores.softmax(1)
    return residual @ label_head.T, phi_bar.T @ residual


def stability(phi_bar: Tensor, phi_bar_perturbed: Tensor, pair_weights: Tensor, groups: Tensor) -> Tensor:
    """L_s by image (eq. stability): βᵀ(φ̄_m∘φ̄'_m) - log Σ_f exp βᵀ(φ̄_m∘φ̄_f), f the other images of m's group."""
    own = (phi_bar * phi_bar_perturbed) @ pair_weights
    others, alone = _similarities(phi_bar, pair_weights, groups)
    return torch.where(alone, 0.0, own - others.logsumexp(1))


def stability_gradients(
    phi_bar: Tensor, phi_bar_perturbed: Tensor, pair_weights: Tensor, groups: Tensor, *, own_term_only: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """∂ΣL_s/∂φ̄, ∂ΣL_s/∂φ̄' and ∂ΣL_s/∂β.

    An image also stands among the negatives of others. The printed φ update leaves that out (`own_term_only`).
    """
    others, alone = _similarities(phi_bar, pair_weights, groups)
    share = torch.where(alone[:, None], 0.0, others.softmax(1))  # weight of negative f in m's denominator
    paired = torch.where(alone[:, None], 0.0, 1.0)
    negatives = share @ phi_bar
    difference = paired * phi_bar_perturbed - negatives
    gradient = difference if own_term_only else difference - share.T @ phi_bar
    return gradient * pair_weights, paired * phi_bar * pair_weights, (phi_bar * difference).sum(0)


def _similarities(phi_bar: Tensor, pair_weights: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """βᵀ(φ̄_m∘φ̄_f) with -inf where f is not a negative of m, and which images have no negatives at all."""
    allowed = groups[:, None] == groups[None, :]
    allowed.fill_diagonal_(False)
    alone = ~allowed.any(1)
    similar = (phi_bar * pair_weights) @ phi_bar.T
    # An image without negatives gets a row of zeros: finite, and masked by the caller.
    return torch.where(allowed | alone[:, None], similar, -torch.inf), alone
