"""Sweeps over φ and γ as one Triton kernel, for NVIDIA GPUs: an image stays with one program until it has settled.

In torch a sweep is a dozen small steps over all images, with φ written out beside the evidence, and then the GPU is asked
whether one more is needed. Here a sweep reads the evidence once, and no image waits for another.

φ is float32, as in torch. γ and Ψ(γ) are float64: where a concept is all but absent Ψ(γ) is near -1/γ, and float32 would keep
few digits of the differences between concepts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from pace.model.triton_support import on_its_gpu

MOST_CONCEPTS = 1024  # of which a program can hold γ and a few rows of φ

# Entries of φ that a thread works on at once, and concepts that a warp takes: of several sizes the quickest on an H200 with
# K = 100, where four warps share an image (benchmarks/gpu.py).
TILE = (16, 32)


class Settled(NamedTuple):
    """Where the sweeps left B images."""

    counts: Tensor  # (B, K) float64, γ - α
    before: Tensor  # (B, K) the same before the last sweep, from which φ follows
    sweeps: Tensor  # (B,) int32
    moving: Tensor  # (B,) bool, images that had not settled when the sweeps ran out


def settle(
    log_likelihood: Tensor, count: Tensor, alpha: Tensor, counts: Tensor, *, max_sweeps: int, tol: float
) -> Settled:
    """Sweep until γ moves by less than `tol` of its sum, image by image.

    log_likelihood (B, J, K) float32 · count (B, J) float32, how much a token counts in γ · alpha (K,) float64 · counts (B, K)
    float64, where to start
    """
    n_images, n_tokens, n_concepts = log_likelihood.shape
    wide = triton.next_power_of_2(n_concepts)
    entries, per_warp = TILE
    warps = max(1, wide // per_warp)
    found = Settled(
        torch.empty_like(counts, memory_format=torch.contiguous_format),
        torch.empty_like(counts, memory_format=torch.contiguous_format),
        torch.empty(n_images, dtype=torch.int32, device=counts.device),
        torch.empty(n_images, dtype=torch.bool, device=counts.device),
    )
    with on_its_gpu(log_likelihood):  # and Triton knows Python's numbers only, not NumPy's
        _settle_kernel[(n_images,)](
            log_likelihood.contiguous(), log_likelihood.amax(2).contiguous(), count.contiguous(), alpha.contiguous(),
            counts.contiguous(), *found, n_tokens, n_concepts, int(max_sweeps),
            TOL=float(tol), TOKENS=max(1, 32 * warps * entries // wide), CONCEPTS=wide, num_warps=warps,
        )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["max_sweeps"])  # type: ignore[untyped-decorator]
def _settle_kernel(  # type: ignore[no-untyped-def]
    log_likelihood, largest, weights, alpha, start, end, before_end, sweeps, moving, n_tokens, n_concepts, max_sweeps,
    TOL: tl.constexpr, TOKENS: tl.constexpr, CONCEPTS: tl.constexpr,
):  # fmt: skip
    """One image: γ in registers from sweep to sweep, φ of a few tokens at a time."""
    image = tl.program_id(0).to(tl.int64)
    log_likelihood += image * n_tokens * n_concepts
    largest += image * n_tokens
    weights += image * n_tokens
    concept = tl.arange(0, CONCEPTS)
    known = concept < n_concepts
    place = image * n_concepts + concept
    prior = tl.load(alpha + concept, mask=known, other=1.0)
    prior_sum = tl.sum(tl.where(known, prior, 0.0), 0)
    counts = tl.load(start + place, mask=known, other=0.0)
    sweep = 0
    unsettled = max_sweeps > 0
    while unsettled & (sweep < max_sweeps):
        tl.store(before_end + place, counts, mask=known)
        # E log θ but for what is the same for all concepts, which φ does not feel: the largest is 0, for float32.
        field = tl.where(known, _digamma(prior + counts), float("-inf"))
        field = (field - tl.max(field, 0)).to(tl.float32)
        sums = tl.zeros((TOKENS, CONCEPTS), tl.float32)
        for first in range(0, n_tokens, TOKENS):
            token = first + tl.arange(0, TOKENS)
            inside = token < n_tokens
            at = token[:, None] * n_concepts + concept[None, :]
            phi = tl.load(log_likelihood + at, mask=inside[:, None] & known[None, :], other=0.0)
            # Less its largest first: beside a log-likelihood of -1000 the field would lose its digits.
            phi = phi - tl.load(largest + token, mask=inside, other=0.0)[:, None] + field[None, :]
            phi = tl.exp(phi - tl.max(phi, 1)[:, None])
            weight = tl.load(weights + token, mask=inside, other=0.0)
            sums += phi * (weight / tl.sum(phi, 1))[:, None]
        found = tl.sum(sums, 0).to(tl.float64)
        # A product, in which the tolerance is float64; in a comparison it would be float32 first.
        unsettled = tl.sum(tl.abs(found - counts), 0) > TOL * (prior_sum + tl.sum(found, 0))
        counts = found
        sweep += 1
    tl.store(end + place, counts, mask=known)
    tl.store(sweeps + image, sweep)
    tl.store(moving + image, unsettled)


@triton.jit
def _digamma(x):  # type: ignore[no-untyped-def]
    """Ψ(x) for positive float64, to 1e-12: Ψ(x + 6) by its asymptotic series, less 1/x + 1/(x + 1) + … + 1/(x + 5).

    With p = x(x + 5), first and last of the six make (2x + 5)/p, the next two (2x + 5)/(p + 4), then (2x + 5)/(p + 6).
    """
    p = x * (x + 5)
    below = (2 * x + 5) * ((3 * p + 20) * p + 24) / (p * (p + 4) * (p + 6))
    r = 1 / (x + 6)
    s = r * r
    series = s * (1 / 12 - s * (1 / 120 - s * (1 / 252 - s * (1 / 240 - s * (1 / 132 - s * (691 / 32760))))))
    return tl.log(x + 6) - r / 2 - series - below
