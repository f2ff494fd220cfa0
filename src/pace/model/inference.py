"""Image- and patch-level inference: φ and γ of a batch of images, by fixed-point sweeps.

B images (both views of a pair count) · J tokens · K concepts · a (B, J) attention, summing to 1

    exact: φ_mjk ∝ exp[E log θ_mk + log N(e_mj | μ_k, Σ_k) + g_mk / J],    w_mj = v_mj = J a_mj
    paper: φ_mjk ∝ exp[E log θ_mk - a_mj maha_mjk / 2 - log|Σ_k| / 2 + g_mk / J],  w_mj = a_mj, v_mj = 1   (eq. update_phi)
    both:  γ_mk = α_k + Σ_j w_mj φ_mjk,   φ̄_mk = Σ_j v_mj φ_mjk / J,   g_m = ∂(L_f + L_s)/∂φ̄_m
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from pace.model.objective import dirichlet_kl, expected_log_theta

Updates = Literal["exact", "paper"]
Pull = Callable[[Tensor], Tensor]  # φ̄ (B, K) -> g (B, K)

_FIRST_SWEEPS = 8  # after which most images have settled


@dataclass
class Weights:
    """The few places in which the two update rules differ."""

    count: Tensor  # w (B, J): how much a token counts in γ and in μ, Σ
    mean: Tensor  # v (B, J): how much it counts in φ̄
    temper: Tensor | None  # factor on the Mahalanobis term, or none

    @classmethod
    def of(cls, attention: Tensor, updates: Updates) -> Weights:
        share = attention / attention.sum(1, keepdim=True)
        if updates == "exact":
            count = share * attention.shape[1]
            return cls(count, count, None)
        return cls(share, torch.ones_like(share), share)

    def of_images(self, images: Tensor) -> Weights:
        """Those of some of the images."""
        count = self.count[images]
        mean = count if self.mean is self.count else self.mean[images]
        return Weights(count, mean, None if self.temper is None else self.temper[images])

    def log_likelihood(self, mahalanobis: Tensor, log_det: Tensor, dim: int) -> Tensor:
        """What a token says about its concept (B, J, K); overwrites `mahalanobis`."""
        if self.temper is not None:
            return mahalanobis.mul_(self.temper[:, :, None] / -2).sub_(log_det / 2)
        return torch.add((log_det + dim * math.log(2 * math.pi)) / -2, mahalanobis, alpha=-0.5, out=mahalanobis)

    def correction(self, phi_bar: Tensor, counts: Tensor, log_det: Tensor, dim: int) -> Tensor | float:
        """Printed L_e minus the sum that the printed φ update maximises: only the determinant's and 2π's weight differ."""
        if self.temper is None:
            return 0.0
        tokens = self.mean.shape[1]
        constant = self.count.sum(1).double() * (dim * math.log(2 * math.pi) / 2)
        return (tokens * phi_bar - counts) @ log_det.double() / 2 - constant


@dataclass
class Posterior:
    """q(θ_m) and q(z_mj) of a batch. (B, K) fields are float64."""

    counts: Tensor  # γ - α
    phi_bar: Tensor
    gamma: Tensor
    bound: Tensor  # L_e by image
    phi: Tensor  # (B, J, K)
    sweeps: int
    moving: Tensor  # (B,) images that had not settled when the sweeps ran out


def uniform_start(
    n_images: int, n_concepts: int, n_tokens: int, updates: Updates, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Counts and φ̄ of images nothing is known about: every patch is every concept alike."""
    phi_bar = torch.full((n_images, n_concepts), 1 / n_concepts, dtype=torch.float64, device=device)
    return phi_bar * (n_tokens if updates == "exact" else 1), phi_bar


def furthest_plausible(alpha: Tensor, n_tokens: int) -> float:
    """How far below its best a concept's log-likelihood can lie and still get φ above 1e-6, whatever θ (exact rule).

    γ_mk lies between α_k and α_k + J, which bounds the differences of E log θ; those of g/J are less than two nats.
    """
    return float(torch.digamma(alpha.max() + n_tokens) - torch.digamma(alpha.min())) + 2 - math.log(1e-6)


def infer(
    log_likelihood: Tensor,
    weights: Weights,
    alpha: Tensor,
    start: tuple[Tensor, Tensor],
    *,
    log_det: Tensor,
    dim: int,
    pull: Pull | None = None,
    max_sweeps: int = 100,
    tol: float = 1e-4,
) -> Posterior:
    """Sweep over φ and γ until γ moves by less than `tol` of its sum, image by image.

    A sweep needs Σ_k φ and Σ_j w φ only. With φ from an earlier sweep at hand, a later one is that φ times exp(change of
    E log θ + g/J), normalised: two small products in place of an exponential of every (image, token, concept). The
    exponential is taken anew when the change grows too large for the precision.
    """
    tokens, dtype = log_likelihood.shape[1], log_likelihood.dtype
    counts, phi_bar = start
    gamma = alpha + counts
    reach = -math.log(torch.finfo(dtype).tiny) / 2
    exact = weights.count is weights.mean
    reduce = weights.count[:, None] if exact else torch.stack([weights.count, weights.mean], 1)

    active = torch.ones(len(gamma), dtype=torch.bool, device=gamma.device)
    reference = phi = log_norm = None
    field = torch.zeros_like(gamma)
    norm = torch.zeros_like(weights.count)
    sweeps = 0
    while sweeps < max_sweeps and bool(active.any()):
        sweeps += 1
        fresh_field = expected_log_theta(gamma)
        if pull is not None:
            fresh_field = fresh_field + pull(phi_bar) / tokens
        field = torch.where(active[:, None], fresh_field, field)  # a converged image keeps the φ it converged with
        change = None if reference is None else field - reference
        if change is None or float(change.amax() - change.amin()) > reach:
            reference, change = field, torch.zeros_like(field)
            phi = log_likelihood + reference[:, None].to(dtype)
            log_norm = phi.amax(2)
            # Not normalised yet, and nowhere so small that it would be subnormal: those are ten times as slow.
            phi.sub_(log_norm[:, :, None]).clamp_min_(1 - 2 * reach).exp_()
        assert phi is not None
        peak = change.amax(1, keepdim=True)
        factor = (change - peak).exp().to(dtype)
        norm = torch.bmm(factor[:, None], phi.mT).squeeze(1)  # several times as fast as φ by a column
        sums = (torch.bmm(reduce / norm[:, None], phi) * factor[:, None]).double()
        fresh = alpha + sums[:, 0]
        moved = (fresh - gamma).abs().sum(1) / fresh.sum(1)
        gamma = torch.where(active[:, None], fresh, gamma)
        phi_bar = torch.where(active[:, None], sums[:, -1] / tokens, phi_bar)
        active = active & (moved > tol)

    assert phi is not None
    assert log_norm is not None
    counts = gamma - alpha
    # log φ = E log θ + g/J + log-likelihood - log-normaliser makes the bound a matter of (B, K) sums.
    log_norm = log_norm.double() + norm.double().log() + peak
    gain = tokens * phi_bar * (expected_log_theta(gamma) - field)
    bound = (weights.mean.double() * log_norm).sum(1) + gain.sum(1) - dirichlet_kl(gamma, alpha)
    bound = bound + weights.correction(phi_bar, counts, log_det, dim)
    phi = phi.mul_(factor[:, None]).div_(norm[:, :, None])
    return Posterior(counts, phi_bar, gamma, bound, phi, sweeps, active)


def infer_alone(
    log_likelihood: Tensor,
    weights: Weights,
    alpha: Tensor,
    start: tuple[Tensor, Tensor],
    *,
    log_det: Tensor,
    dim: int,
    max_sweeps: int = 100,
    tol: float = 1e-4,
) -> Posterior:
    """`infer` for images that no pull ties together: the few that take long go on without the others."""
    settle = partial(infer, log_det=log_det, dim=dim, tol=tol)
    kernel = _kernel(log_likelihood)
    if kernel is not None and max_sweeps > 1:
        settled = kernel.settle(log_likelihood, weights.count, alpha, start[0], max_sweeps=max_sweeps - 1, tol=tol)
        found = settle(log_likelihood, weights, alpha, (settled.counts, start[1]), max_sweeps=1)  # for φ and the bound
        return replace(found, sweeps=int(settled.sweeps.max()) + 1)
    found = settle(log_likelihood, weights, alpha, start, max_sweeps=min(_FIRST_SWEEPS, max_sweeps))
    rest = found.moving.nonzero().squeeze(1)
    while len(rest) > 0 and found.sweeps < max_sweeps:
        begin = (found.counts[rest], found.phi_bar[rest])
        more = min(found.sweeps, max_sweeps - found.sweeps)
        late = settle(log_likelihood[rest], weights.of_images(rest), alpha, begin, max_sweeps=more)
        for name in ("counts", "phi_bar", "gamma", "bound", "phi", "moving"):
            getattr(found, name)[rest] = getattr(late, name)
        found.sweeps += late.sweeps
        rest = rest[late.moving]
    return found


def infer_gamma(
    log_likelihood: Tensor,
    weights: Weights,
    alpha: Tensor,
    start: tuple[Tensor, Tensor],
    *,
    max_sweeps: int,
    tol: float,
) -> Tensor:
    """γ (B, K) of `infer_alone`, for those who ask for neither φ nor the bound; evidence may lack what all concepts share."""
    kernel = _kernel(log_likelihood)
    if kernel is None:
        nothing = log_likelihood.new_zeros(log_likelihood.shape[2])
        return infer_alone(
            log_likelihood, weights, alpha, start, log_det=nothing, dim=0, max_sweeps=max_sweeps, tol=tol
        ).gamma
    sweep = partial(kernel.settle, log_likelihood, weights.count, alpha)
    settled = sweep(start[0], max_sweeps=max_sweeps - 1, tol=tol)
    gamma: Tensor = alpha + sweep(settled.counts, max_sweeps=1, tol=tol).counts  # the one that gives φ to those who ask
    return gamma


def _kernel(log_likelihood: Tensor) -> ModuleType | None:
    """The sweeps of sweeping.py, where they can run."""
    if log_likelihood.device.type != "cuda" or log_likelihood.dtype != torch.float32:
        return None
    try:
        from pace.model import sweeping
    except ImportError:  # torch comes without Triton on some platforms
        return None
    fits = log_likelihood.shape[2] <= sweeping.MOST_CONCEPTS
    return sweeping if fits and sweeping.usable(log_likelihood.device) else None
