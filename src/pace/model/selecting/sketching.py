"""A first idea of the concepts: many small cells of patches, and the path of merges down to one."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pace.model.gaussians import Sums
from pace.model.selecting.evidence import SharedCovariance, covariance, whitening

_PATCHES_PER_CELL, _LEAST_PATCHES = 20, 6000
_CELLS_PER_CONCEPT = 4  # so many more cells than concepts, or merging could not have found them
_LLOYD_ROUNDS = 3
_ROUNDING = 1e-6  # of their squares, below which two patches are the same one
_AT_ONCE = 10  # one merge in so many cells before the next look


def sketch(x: Tensor, weights: Tensor, start: int, most: int, blur: float, rng: np.random.Generator) -> Tensor:
    """Means (K, d) of the best partition on the path with at most so many concepts, by the evidence of the cells' sums.

    The path goes on through merges that lose: single cells of a cloud may look like concepts of their own while halves of it
    do not. If the best partition is made of nearly as many concepts as there are cells, there are too few cells.
    """
    order = torch.as_tensor(rng.permutation(len(x)), device=x.device)
    limit = min(len(x) // _CELLS_PER_CONCEPT, _CELLS_PER_CONCEPT * most)
    cells = min(start, limit)
    while True:
        some = order[: max(_LEAST_PATCHES, _PATCHES_PER_CELL * cells)]
        patches, held = x[some], weights[some]
        spread = covariance(patches, held)
        evidence = SharedCovariance(spread, blur, spread)
        # Cells of patches as they are, and with all directions alike: a few wide ones would hide what the others tell.
        ways = (
            _best_on_path(evidence.blurred(_cells(seen, patches, held, max(cells, 1), rng)), evidence, most)
            for seen in (patches, patches @ whitening(spread).to(patches.dtype))
        )
        _, best = max(ways, key=lambda way: way[0])
        number = len(best["weight"])
        if number * _CELLS_PER_CONCEPT <= cells or cells >= limit:
            return (best["first"] / best["weight"][:, None]).to(x.dtype)
        cells = min(max(2 * cells, _CELLS_PER_CONCEPT * number), limit)


def _cells(x: Tensor, patches: Tensor, weights: Tensor, cells: int, rng: np.random.Generator) -> Sums:
    """k-means++ and a few rounds of Lloyd's algorithm on x; weight and first moments of the cells that hold patches."""
    chosen: list[Tensor] = []
    squares = x.square().sum(1)
    chance = weights.double()
    nearest = torch.full_like(weights, torch.inf)
    for draw in rng.random(cells):
        ladder = chance.cumsum(0)
        if ladder[-1] <= 0:  # fewer different patches than cells
            break
        place = torch.searchsorted(ladder, draw * ladder[-1], right=True).clamp_max(len(x) - 1)
        chosen.append(place)
        both = squares + squares[place]
        distance = torch.addmv(both, x, x[place], alpha=-2)
        nearest = torch.minimum(nearest, distance.masked_fill_(distance <= _ROUNDING * both, 0))
        chance = (nearest * weights).double()
    means = x[torch.stack(chosen)]
    weighted = x * weights[:, None]
    for _ in range(_LLOYD_ROUNDS + 1):
        owner = torch.addmm(means.square().sum(1), x, means.T, alpha=-2).argmin(1)
        size = weights.new_zeros(len(means)).index_add_(0, owner, weights)
        first = torch.zeros_like(means).index_add_(0, owner, weighted)
        means = torch.where(size[:, None] > 0, first / size.clamp_min(1e-30)[:, None], means)
    filled = size > 0
    first = torch.zeros_like(means).index_add_(0, owner, patches * weights[:, None])
    return {"weight": size[filled].double(), "first": first[filled].double()}


def _best_on_path(sums: Sums, evidence: SharedCovariance, most: int) -> tuple[float, Sums]:
    best, best_bound = sums, -np.inf
    while True:
        weight = sums["weight"]
        k = len(weight)
        bound = evidence.total(sums) + float(torch.xlogy(weight, weight / weight.sum()).sum())
        if bound > best_bound and k <= most:
            best, best_bound = sums, bound
        if k == 1:
            return best_bound, best
        a, b = torch.triu_indices(k, k, 1, device=weight.device)
        gains = evidence.merge_gains(sums, torch.stack([a, b], 1)) + _mixing_gain(weight[a], weight[b])
        table = weight.new_full((k, k), -torch.inf)
        table[a, b] = table[b, a] = gains
        value, partner = table.max(1)
        every = torch.arange(k, device=weight.device)
        mutual = every[(partner[partner] == every) & (every < partner)]  # each pair once
        gaining = int((value[mutual] > 0).sum())
        mutual = mutual[value[mutual].argsort(descending=True)][: max(1, gaining, k // _AT_ONCE)]
        every[partner[mutual]] = mutual
        _, group = torch.unique(every, return_inverse=True)
        sums = evidence.regrouped(sums, group, k - len(mutual))


def _mixing_gain(n_a: Tensor, n_b: Tensor) -> Tensor:
    """What the patches of two cells no longer have to say: which of the two they are in."""
    n = n_a + n_b
    return torch.xlogy(n, n) - torch.xlogy(n_a, n_a) - torch.xlogy(n_b, n_b)
