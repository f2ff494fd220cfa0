"""Centres and factors of patches, in PyTorch: k-means, non-negative coefficients, NMF and semi-NMF.

A patches (n, d) · U coefficients (n, K), non-negative · W dictionary (K, d), rows of length 1

scikit-learn has k-means and NMF for a CPU only. Here every step is a product of large matrices, which suits a GPU. On a CPU
patches are processed in small chunks, so that their coefficients stay in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from pace.model.seeding import spread_out

_TINY = 1e-12
_SEEDING = 200  # patches per centre that k-means++ chooses from
_LLOYD_STEPS, _NMF_STEPS, _SEMI_NMF_STEPS = 50, 200, 50
_ROWS_PER_THREAD, _ROWS = 1 << 11, 1 << 18  # chunk size in patches, on a CPU (per thread) and on a GPU


def k_means(patches: Tensor, weights: Tensor, k: int, seed: int) -> Tensor:
    """Centres (K, d) of patches with weights (n,): k-means++ on a sample, then Lloyd's algorithm on all patches."""
    rng = np.random.default_rng(seed)
    some = torch.from_numpy(rng.permutation(len(patches))[: _SEEDING * k]).to(patches.device)
    sample = patches[some]
    chosen = spread_out(sample - sample.mean(0), weights[some], k, rng, trials=2 + int(math.log(k)))
    centres = sample[chosen]
    for _ in range(_LLOYD_STEPS):
        sums, sizes = torch.zeros_like(centres), torch.zeros_like(centres[:, :1])
        for rows in chunks(patches):
            owned = one_hot(nearest(patches[rows], centres), k) * weights[rows, None]
            sums += owned.T @ patches[rows]
            sizes += owned.sum(0)[:, None]
        fresh = torch.where(sizes > 0, sums / sizes.clamp_min(_TINY), centres)
        if torch.equal(fresh, centres):
            break
        centres = fresh
    return centres


def nearest(patches: Tensor, centres: Tensor) -> Tensor:
    """The index (n,) of every patch's nearest centre."""
    offset = centres.mean(0)  # removed, so that it does not dominate the differences
    centred = centres - offset
    sizes = centred.square().sum(1)
    distances = (torch.addmm(sizes, patches[rows] - offset, centred.T, alpha=-2) for rows in chunks(patches))
    return torch.cat([distance.argmin(1) for distance in distances])


def coefficients(patches: Tensor, dictionary: Tensor, start: Tensor | None = None, steps: int = 200) -> Tensor:
    """U ≥ 0 (…, n, K) that minimises ‖A − U W‖² for a given dictionary; leading dimensions of it are separate problems.

    Patches do not influence each other.
    """
    if dictionary.ndim == 2 and patches.ndim > 2:
        return coefficients(patches.flatten(0, -2), dictionary, start, steps).reshape(*patches.shape[:-1], -1)
    gram = dictionary @ dictionary.mT
    rate = 1 / gram.abs().sum(-1, keepdim=True).amax(-2, keepdim=True).clamp_min(_TINY)  # no eigenvalue is larger
    step = torch.eye(gram.shape[-1]).to(gram) - rate * gram

    def descend(rows: slice) -> Tensor:
        pull = patches[..., rows, :] @ (rate * dictionary.mT)
        first = torch.zeros_like(pull) if start is None else start[..., rows, :]
        return accelerated(lambda ahead: (ahead @ step).add_(pull).clamp_min_(0), first, steps)

    return torch.cat([descend(rows) for rows in chunks(patches)], -2)


def accelerated(step: Callable[[Tensor], Tensor], start: Tensor, steps: int, tolerance: float = -1.0) -> Tensor:
    """Accelerated proximal gradient descent of many problems (…, K): a problem restarts when its momentum points uphill.

    It ends early when no problem moves by more than `tolerance` of its size.
    """
    found = ahead = start
    momentum = torch.ones_like(start[..., :1])
    for _ in range(steps):
        fresh = step(ahead)
        moved = fresh - found
        if tolerance >= 0 and bool((moved.abs().amax(-1) <= tolerance * fresh.abs().amax(-1)).all()):
            return fresh
        uphill = (ahead.sub(fresh).mul_(moved)).sum(-1, keepdim=True) > 0
        momentum = torch.where(uphill, 1.0, momentum)
        faster = (1 + (1 + 4 * momentum.square()).sqrt()) / 2
        ahead = moved.mul_((momentum - 1) / faster).add_(fresh)
        found, momentum = fresh, faster
    return found


def nmf(patches: Tensor, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """U (n, K) ≥ 0 and the dictionary W (K, d) ≥ 0 of A ≈ U W for patches (n, d) ≥ 0.

    Leading dimensions are separate problems. Multiplicative updates (Lee & Seung 2001), each factor twice in a row, since its
    products can be reused (Gillis & Glineur 2012). The error never rises.
    """
    n, d = patches.shape[-2:]
    rng = np.random.default_rng(seed)
    chosen = torch.from_numpy(rng.choice(n, k, replace=n < k)).to(patches.device)
    noise = torch.from_numpy(rng.random((k, d), dtype=np.float32)).to(patches)
    level = patches.mean((-2, -1), keepdim=True)
    dictionary = patches[..., chosen, :] + level * (0.1 + noise)  # no zeros: they could never grow
    weights = (patches @ dictionary.mT) / dictionary.square().sum(-1).sum(-1)[..., None, None].clamp_min(_TINY)
    for _ in range(_NMF_STEPS):
        gram = dictionary @ dictionary.mT
        overlap, target = torch.zeros_like(gram), torch.zeros_like(dictionary)
        for rows in chunks(patches):
            some, own = patches[..., rows, :], weights[..., rows, :]
            pull = some @ dictionary.mT
            for _ in range(2):
                own = (own @ gram).clamp_min_(_TINY).reciprocal_().mul_(pull).mul_(own)
            weights[..., rows, :] = own
            overlap += own.mT @ own
            target += own.mT @ some
        for _ in range(2):
            dictionary = dictionary * target / (overlap @ dictionary).clamp_min(_TINY)
    sizes = dictionary.norm(dim=-1).clamp_min(_TINY)
    return weights * sizes[..., None, :], dictionary / sizes[..., None]


def semi_nmf(patches: Tensor, k: int, seed: int) -> Tensor:
    """The dictionary W (K, d), of either sign, of A ≈ U W with U ≥ 0 (Ding, Li & Jordan 2010), from the k-means centres."""
    dictionary = normalize(k_means(patches, torch.ones_like(patches[:, 0]), k, seed))
    weights = None
    for _ in range(_SEMI_NMF_STEPS):
        weights = coefficients(patches, dictionary, weights, steps=20)
        gram = weights.mT @ weights
        ridge = 1e-6 * gram.diagonal().mean().clamp_min(_TINY)
        fresh = torch.linalg.solve(gram + ridge * torch.eye(k).to(gram), weights.mT @ patches)
        used = fresh.norm(dim=1, keepdim=True) > _TINY  # a row that no patch uses stays unchanged
        fresh = torch.where(used, fresh, dictionary)
        weights = weights * fresh.norm(dim=1)
        dictionary = normalize(fresh)
    return dictionary


def chunks(patches: Tensor) -> Iterator[slice]:
    """The rows of (…, n, d), in chunks."""
    most = _ROWS if patches.device.type != "cpu" else _ROWS_PER_THREAD * torch.get_num_threads()
    size = max(1, most // math.prod(patches.shape[:-2]))
    for start in range(0, patches.shape[-2], size):
        yield slice(start, start + size)
