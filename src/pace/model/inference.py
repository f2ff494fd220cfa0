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
from functools import cache
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from pace.model.objective import dirichlet_kl, expected_log_theta
from pace.model.triton_support import succeeds

Updates = Literal["exact", "paper"]
Pull = Callable[[Tensor], Tensor]  # φ̄ (B, K) -> g (B, K)

_FIRST_SWEEPS = 8  # after these most images have settled, and the rest go on by themselves


@dataclass
class Weights:
    """The few places where the two update rules differ."""

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
    phi_bar: Tensor  # empty, as the bound and φ are, when patches were not asked for
    gamma: Tensor
    sweeps: int
    moving: Tensor  # (B,) images that had not settled when the sweeps ran out
    bound: Tensor  # (B,) L_e by image; for the printed rules, without Weights.correction
    phi: Tensor  # (B, J, K)


def uniform_start(
    n_images: int, n_concepts: int, n_tokens: int, updates: Updates, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Counts and φ̄ of images nothing is known about: every patch is equally likely to be any concept."""
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
    pull: Pull | None = None,
    max_sweeps: int = 100,
    tol: float = 1e-4,
    patches: bool = True,
) -> Posterior:
    """The E-step of a batch: sweep over φ and γ until γ moves by less than `tol` of its sum, image by image.

    Learning, selecting and explaining all call this. Without `patches` only γ is worked out, and the log-likelihood may lack
    what all concepts share.
    """
    kernel = None if pull is not None else _kernel(log_likelihood)
    if kernel is not None:
        settled = kernel.settle(log_likelihood, weights.count, alpha, start[0], max_sweeps=max_sweeps, tol=tol)
        sweeps = int(settled.sweeps.max()) if len(settled.sweeps) else 0
        if not patches:
            nothing = log_likelihood.new_empty(0)
            gamma = alpha + settled.counts
            return Posterior(settled.counts, nothing, gamma, sweeps, settled.moving, nothing, nothing)
        # The last sweep once more in torch, for φ and the bound.
        found = _sweep(log_likelihood, weights, alpha, (settled.before, start[1]), None, 1, tol, patches)
        return replace(found, sweeps=sweeps, moving=settled.moving)
    if pull is not None:  # ties images together, so that none goes on alone
        return _sweep(log_likelihood, weights, alpha, start, pull, max_sweeps, tol, patches)
    first = min(_FIRST_SWEEPS, max_sweeps)
    found = _sweep(log_likelihood, weights, alpha, start, None, first, tol, patches)
    rest = found.moving.nonzero().squeeze(1)
    while len(rest) > 0 and found.sweeps < max_sweeps:
        begin = (found.counts[rest], found.phi_bar[rest])
        some, more = weights.of_images(rest), min(found.sweeps, max_sweeps - found.sweeps)
        late = _sweep(log_likelihood[rest], some, alpha, begin, None, more, tol, patches)
        for name in ("counts", "phi_bar", "gamma", "moving", *(("bound", "phi") if patches else ())):
            getattr(found, name)[rest] = getattr(late, name)
        found.sweeps += late.sweeps
        rest = rest[late.moving]
    return found


def _sweep(
    log_likelihood: Tensor,
    weights: Weights,
    alpha: Tensor,
    start: tuple[Tensor, Tensor],
    pull: Pull | None,
    max_sweeps: int,
    tol: float,
    patches: bool,
) -> Posterior:
    """All images together, until every one has settled.

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
            phi, log_norm = _exponential(log_likelihood, reference.to(dtype), 1 - 2 * reach)
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

    counts = gamma - alpha
    if not patches:
        nothing = log_likelihood.new_empty(0)
        return Posterior(counts, phi_bar, gamma, sweeps, active, nothing, nothing)
    assert phi is not None
    assert log_norm is not None
    # log φ = E log θ + g/J + log-likelihood - log-normaliser, so the bound needs (B, K) sums only.
    log_norm = log_norm + norm.double().log() + peak
    gain = tokens * phi_bar * (expected_log_theta(gamma) - field)
    bound = (weights.mean.double() * log_norm).sum(1) + gain.sum(1) - dirichlet_kl(gamma, alpha)
    phi = phi.mul_(factor[:, None]).div_(norm[:, :, None])
    return Posterior(counts, phi_bar, gamma, sweeps, active, bound, phi)


def _exponential(log_likelihood: Tensor, field: Tensor, smallest: float) -> tuple[Tensor, Tensor]:
    """exp(log-likelihood + field) (B, J, K), scaled so that a token's largest is 1, and the log of that scale (B, J).

    Nowhere so small that it would be subnormal: those numbers are ten times as slow.
    """
    # Less its largest first, which is exact where it matters: beside a log-likelihood of -1000 the field would lose its digits.
    largest = log_likelihood.amax(2)
    phi = (log_likelihood - largest[:, :, None]).add_(field[:, None])
    scale = phi.amax(2)
    phi.sub_(scale[:, :, None])
    return phi.clamp_min_(smallest).exp_(), largest.double() + scale


def _kernel(log_likelihood: Tensor) -> ModuleType | None:
    """The sweeps of triton_sweeps.py, where they can run."""
    if log_likelihood.device.type != "cuda" or log_likelihood.dtype != torch.float32:
        return None
    try:
        from pace.model import triton_sweeps
    except ImportError:  # torch comes without Triton on some platforms
        return None
    fits = log_likelihood.shape[2] <= triton_sweeps.MOST_CONCEPTS
    return triton_sweeps if fits and _agrees(triton_sweeps, log_likelihood.device) else None


@cache
def _agrees(kernel: ModuleType, device: torch.device) -> bool:
    """Whether Triton can compile for this GPU, which takes a C compiler, and comes to the same γ as torch. Warns if not.

    Compilers differ from version to version, so one small case is always worked out both ways.
    """

    def compare() -> None:
        evidence = torch.linspace(0, 7, 3 * 40 * 5).square().cos().mul(4).view(3, 40, 5).to(device)
        alpha = torch.linspace(0.01, 0.2, 5, dtype=torch.float64).to(device)
        weights, start = Weights.of(evidence.new_ones(3, 40), "exact"), uniform_start(3, 5, 40, "exact", device)
        found = kernel.settle(evidence, weights.count, alpha, start[0], max_sweeps=6, tol=0.0)
        expected = _sweep(evidence, weights, alpha, start, None, 6, 0.0, False)
        if not torch.allclose(found.counts, expected.counts, rtol=1e-4):
            raise ArithmeticError("Triton's result differs from torch's")

    return succeeds(compare, f"explaining is slower on {device} than it could be")
