"""A first idea of the concepts: many small cells of patches, and the path of merges down to one."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pace.model.gaussians import Sums
from pace.model.seeding import spread_out
from pace.model.selecting.evidence import SharedCovariance, covariance, whitening
from pace.model.selecting.grouping import Grouping

_PATCHES_PER_CELL, _SEEDS_PER_CELL, _LEAST_PATCHES = 20, 8, 6000  # that make cells, and that they may start from
_CELLS_PER_CONCEPT = 4  # so many more cells than concepts, or merging could not have found them
_FEW = 24  # cells that tell whether there are only a few concepts
_LLOYD_ROUNDS = 3
_AT_ONCE = 10  # one merge in so many cells before the next look


def sketch(x: Tensor, weights: Tensor, start: int, most: int, blur: float, rng: np.random.Generator) -> Tensor:
    """Means (K, d) of the best partition on the path with at most so many concepts, by the evidence of the cells' sums.

    The path goes on through merges that lose: single cells of a cloud may look like concepts of their own while halves of it
    do not. If the best partition is made of nearly as many concepts as there are cells, there are too few cells. A few are
    looked at first, for that may be all it takes, and `start` of them next.
    """
    order = torch.as_tensor(rng.permutation(len(x)), device=x.device)
    limit = max(1, min(len(x) // _CELLS_PER_CONCEPT, _CELLS_PER_CONCEPT * max(most, start)))
    cells = min(start, _FEW, limit)
    # Cells of patches as they are, and with all directions alike: a few wide ones would hide what the others tell.
    ways = {"as they are", "all alike"}
    while True:
        some = order[: max(_LEAST_PATCHES, _PATCHES_PER_CELL * cells)]
        patches, held = x[some], weights[some]
        spread = covariance(patches, held)
        evidence = SharedCovariance(spread, blur, spread)
        found = {}
        for way in sorted(ways):
            seen = patches if way == "as they are" else patches @ whitening(spread).to(patches.dtype)
            found[way] = _best_on_path(evidence.blurred(_cells(seen, patches, held, cells, rng)), evidence, most)
        better = max(found, key=lambda way: found[way][0])
        best = found[better][1]
        number = len(best["weight"])
        # What is rare hides in a few cells: the first look decides only if it finds very few.
        enough = _CELLS_PER_CONCEPT * number * (2 if cells < start else 1)
        if enough <= cells or cells >= limit:
            return (best["first"] / best["weight"][:, None]).to(x.dtype)
        if cells >= _FEW:
            ways = {better}
        cells = max(2 * cells, _CELLS_PER_CONCEPT * number, start)
        cells = cells if 2 * cells <= limit else limit  # a look with hardly more cells would tell nothing new


def _cells(x: Tensor, patches: Tensor, weights: Tensor, cells: int, rng: np.random.Generator) -> Sums:
    """k-means++ and a few rounds of Lloyd's algorithm on x; weight and first moments of the cells that hold patches."""
    some = max(_LEAST_PATCHES, _SEEDS_PER_CELL * cells)  # they come in random order
    means = x[spread_out(x[:some], weights[:some], cells, rng)]
    for _ in range(_LLOYD_ROUNDS + 1):
        by = Grouping(torch.addmm(means.square().sum(1), x, means.T, alpha=-2).argmin(1), len(means))
        size = by.totals(weights)
        means = torch.where(size[:, None] > 0, by.sums(x, weights) / size.to(x.dtype).clamp_min(1e-30)[:, None], means)
    filled = size > 0
    return {"weight": size[filled], "first": by.sums(patches, weights)[filled].double()}


def _best_on_path(sums: Sums, evidence: SharedCovariance, most: int) -> tuple[float, Sums]:
    best, best_bound = sums, -np.inf
    while True:
        weight = sums["weight"]
        k = len(weight)
        bound = float(evidence.total(sums) + torch.xlogy(weight, weight / weight.sum()).sum())
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
