"""Centres and factors of patches, in PyTorch: k-means, non-negative coefficients, NMF and semi-NMF.

A patches (n, d) · U coefficients (n, K), not negative · W dictionary (K, d), its rows of length 1

scikit-learn has the first and the third, for a CPU. Here every step is a product of large matrices over all concepts at
once, which suits a GPU, and several problems of one size are solved together.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_TINY = 1e-12
_SEEDING = 200  # patches for every centre that k-means++ chooses among
_LLOYD_STEPS, _NMF_STEPS, _SEMI_NMF_STEPS = 50, 200, 50


def k_means(patches: Tensor, k: int, seed: int) -> Tensor:
    """Centres (K, d): k-means++ on a sample, then Lloyd's algorithm on all patches."""
    from sklearn.cluster import kmeans_plusplus

    rng = np.random.default_rng(seed)
    some = rng.permutation(len(patches))[: _SEEDING * k]
    sample = patches[torch.from_numpy(some).to(patches.device)].cpu().numpy()
    centres = torch.from_numpy(kmeans_plusplus(sample, k, random_state=int(rng.integers(2**31)))[0]).to(patches)
    for _ in range(_LLOYD_STEPS):
        owned = torch.nn.functional.one_hot(nearest(patches, centres), k).to(patches.dtype)
        sizes = owned.sum(0)[:, None]
        fresh = torch.where(sizes > 0, owned.T @ patches / sizes.clamp_min(1), centres)
        if torch.equal(fresh, centres):
            break
        centres = fresh
    return centres


def nearest(patches: Tensor, centres: Tensor) -> Tensor:
    """The index (n,) of every patch's nearest centre."""
    distances = [torch.cdist(some, centres) for some in torch.split(patches, 1 << 18)]
    return torch.cat([some.argmin(1) for some in distances])


def coefficients(patches: Tensor, dictionary: Tensor, start: Tensor | None = None, steps: int = 200) -> Tensor:
    """U ≥ 0 that minimises ‖A − U W‖² for a given dictionary.

    Accelerated projected gradient; a patch whose momentum points uphill starts anew. Patches do not influence each other.
    """
    gram, target = dictionary @ dictionary.mT, patches @ dictionary.mT
    rate = 1 / gram.abs().sum(-1, keepdim=True).amax(-2, keepdim=True).clamp_min(_TINY)  # no eigenvalue is larger
    found = torch.zeros_like(target) if start is None else start
    ahead, momentum = found, torch.ones_like(target[..., :1])
    for _ in range(steps):
        fresh = (ahead - rate * (ahead @ gram - target)).clamp_min_(0)
        moved = fresh - found
        momentum = torch.where(((ahead - fresh) * moved).sum(-1, keepdim=True) > 0, 1.0, momentum)
        faster = (1 + (1 + 4 * momentum.square()).sqrt()) / 2
        ahead = fresh + (momentum - 1) / faster * moved
        found, momentum = fresh, faster
    return found


def nmf(patches: Tensor, k: int, seed: int) -> Tensor:
    """The dictionary W ≥ 0 (K, d) of A ≈ U W, for patches (n, d) ≥ 0; leading dimensions are separate problems.

    Multiplicative updates (Lee & Seung 2001), each factor twice in a row, since its products can be used again
    (Gillis & Glineur 2012). The error never rises.
    """
    n, d = patches.shape[-2:]
    rng = np.random.default_rng(seed)
    chosen = torch.from_numpy(rng.choice(n, k, replace=n < k)).to(patches.device)
    noise = torch.from_numpy(rng.random((k, d), dtype=np.float32)).to(patches)
    level = patches.mean((-2, -1), keepdim=True)
    dictionary = patches[..., chosen, :] + level * (0.1 + noise)  # from patches, but with no zero that could not grow
    weights = (patches @ dictionary.mT) / dictionary.square().sum(-1).sum(-1)[..., None, None].clamp_min(_TINY)
    for _ in range(_NMF_STEPS):
        gram, target = dictionary @ dictionary.mT, patches @ dictionary.mT
        for _ in range(2):
            weights = weights * target / (weights @ gram).clamp_min(_TINY)
        gram, target = weights.mT @ weights, weights.mT @ patches
        for _ in range(2):
            dictionary = dictionary * target / (gram @ dictionary).clamp_min(_TINY)
    return unit(dictionary)


def semi_nmf(patches: Tensor, k: int, seed: int) -> Tensor:
    """The dictionary W (K, d), of either sign, of A ≈ U W with U ≥ 0 (Ding, Li & Jordan 2010), from the k-means centres."""
    dictionary = unit(k_means(patches, k, seed))
    weights = None
    for _ in range(_SEMI_NMF_STEPS):
        weights = coefficients(patches, dictionary, weights, steps=20)
        gram = weights.mT @ weights
        ridge = 1e-6 * gram.diagonal().mean().clamp_min(_TINY)
        fresh = torch.linalg.solve(gram + ridge * torch.eye(k).to(gram), weights.mT @ patches)
        used = fresh.norm(dim=1, keepdim=True) > _TINY  # a row that no patch uses stays as it is
        fresh = torch.where(used, fresh, dictionary)
        weights = weights * fresh.norm(dim=1)
        dictionary = unit(fresh)
    return dictionary


def unit(dictionary: Tensor) -> Tensor:
    return torch.nn.functional.normalize(dictionary, dim=-1, eps=_TINY)
