"""The regressions behind SHAP and LIME, for many images at once."""

from __future__ import annotations

import torch
from torch import Tensor

_POWER_STEPS, _LASSO_STEPS, _LASSO_TOLERANCE = 50, 2000, 1e-6


def least_squares_map(design: Tensor, weights: Tensor) -> Tensor:
    """(d, S): what turns outputs (S,) into the coefficients of a weighted regression with intercept on design (S, d).

    Of all best coefficients the shortest, as lstsq gives them.
    """
    centred = design - (weights @ design / weights.sum())
    scaled = centred * weights[:, None]
    values, vectors = torch.linalg.eigh(centred.T @ scaled)
    inverse = torch.where(values > 1e-12 * values[-1], 1 / values, 0.0)
    # The outputs need no centring: the weighted rows of `centred` sum to zero.
    solve: Tensor = (vectors * inverse) @ vectors.T @ scaled.T
    return solve


def lasso(design: Tensor, outputs: Tensor, weights: Tensor, alpha: float) -> Tensor:
    """Coefficients (B, d) that minimise Σ_s w_bs (y_bs − x_s·β_b − β_b0)² / (2 Σ_s w_bs) + alpha ‖β_b‖₁.

    design (S, d) is shared; outputs and weights are (B, S). By accelerated proximal gradient steps, which work on all
    images together, each restarted where its momentum points uphill.
    """
    weights = weights / weights.sum(1, keepdim=True)
    centre = weights @ design
    gram = torch.einsum("bs,sc,se->bce", weights, design, design) - centre[:, :, None] * centre[:, None]
    target = (weights * (outputs - (weights * outputs).sum(1, keepdim=True))) @ design
    direction = torch.ones_like(target)
    for _ in range(_POWER_STEPS):
        direction = torch.bmm(gram, direction[:, :, None]).squeeze(2)
        size = direction.norm(dim=1, keepdim=True).clamp_min(1e-30)
        direction = direction / size
    rate = 1 / (1.1 * size).clamp_min(1e-12)  # the power method comes from below
    found = ahead = torch.zeros_like(target)
    momentum = torch.ones_like(rate)
    for _ in range(_LASSO_STEPS):
        slope = torch.bmm(gram, ahead[:, :, None]).squeeze(2) - target
        fresh = torch.nn.functional.softshrink(ahead / rate - slope, alpha) * rate
        moved = fresh - found
        uphill = ((ahead - fresh) * moved).sum(1, keepdim=True) > 0
        momentum = torch.where(uphill, 1.0, momentum)
        faster = (1 + (1 + 4 * momentum.square()).sqrt()) / 2
        ahead = fresh + (momentum - 1) / faster * moved
        found, momentum = fresh, faster
        if bool((moved.abs().amax(1) <= _LASSO_TOLERANCE * found.abs().amax(1)).all()):
            break
    return found
