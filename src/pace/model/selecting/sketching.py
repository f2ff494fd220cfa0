"""A first idea of the concepts: many small cells of patches, and the path of merges down to one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pace.model.gaussians import Sums
from pace.model.seeding import spread_out
from pace.model.selecting.evidence import SharedCovariance, covariance, whitening
from pace.model.selecting.grouping import Grouping, nearest
from pace.model.selecting.sampling import Sample

_PATCHES_PER_CELL, _SEEDS_PER_CELL, _LEAST_PATCHES = 20, 8, 6000  # that make cells, and that they may start from
_CELLS_PER_CONCEPT = 4  # so many more cells than concepts, or merging could not have found them
_CELLS_TO_BEGIN = 8  # likewise, if a few cells are to decide
_FEW = 24  # cells that tell whether there are only a few concepts
_LLOYD_ROUNDS = 3
_WEIGHINGS = 10  # at most
_LEAST_BLUR = 1e-4  # above what rounding does to a covariance
_NEARLY_ALL = 0.9  # of their weight, with which patches make the same concepts as with all of it
_AT_ONCE = 10  # one merge in so many cells before the next look


class Sketch(NamedTuple):
    """Concepts, and what patches are worth if there are these."""

    means: Tensor  # (K, d)
    sample: Sample  # its weights
    spread: Tensor  # (d, d) covariance of all patches
    within: Tensor  # (d, d) around the concepts, blur included


class Path(NamedTuple):
    """The best partition on a path of merges."""

    bound: float
    concept: Tensor  # (C,) that every cell is part of

    @property
    def number(self) -> int:
        return int(self.concept.max()) + 1


def sketch(sample: Sample, start: int, most: int, blur: float, rng: np.random.Generator) -> Sketch:
    """The best partition on the path with at most so many concepts, by the evidence of the cells' sums.

    The path goes on through merges that lose: single cells of a cloud may look like concepts of their own while halves of it
    do not. If the best partition is made of nearly as many concepts as there are cells, there are too few cells. A few are
    looked at first, for that may be all it takes, and `start` of them next. These make cells of the patches as they are, and
    of patches with all directions alike, since a few wide ones would hide what the others tell; the better way goes on.
    """
    rows = (sample.weights > 0).nonzero().squeeze(1)
    x, weights = sample.x[rows], sample.weights[rows]
    overall = covariance(x, weights)
    order = torch.as_tensor(rng.permutation(len(x)), device=x.device)
    limit = max(1, min(len(x) // _CELLS_PER_CONCEPT, _CELLS_PER_CONCEPT * max(most, start)))
    cells = min(start, _FEW, limit)
    ways = ["all alike", "as they are"]
    while True:
        some = order[: max(_LEAST_PATCHES, _PATCHES_PER_CELL * cells)]
        patches, held = x[some], weights[some]
        spread = covariance(patches, held)
        white = whitening(spread).to(x.dtype)
        found = {}
        for way in ways:
            seen = patches if way == "as they are" else patches @ white
            found[way] = _cells(seen, patches, held, cells, rng)
        if len(ways) == 1:
            concept = torch.arange(len(found[ways[0]]["weight"]), device=x.device)  # each cell one of its own
        else:
            evidence = SharedCovariance(spread, blur, spread)
            paths = {way: _best_on_path(evidence.blurred(found[way]), evidence, most) for way in ways}
            ways = sorted(ways, key=lambda way: paths[way].bound)
            concept, number = paths[ways[-1]].concept, paths[ways[-1]].number
            # What is rare hides in a few cells: before there are `start` of them they decide only if they find very few.
            needed = (_CELLS_TO_BEGIN if cells < start else _CELLS_PER_CONCEPT) * number
            if cells < min(max(start, _FEW), limit) and cells < needed:
                cells = min(start if cells < start else 2 * cells, limit)
                continue
        means = _means(found[ways[-1]], x.dtype)
        cell = nearest(x, means) if ways[-1] == "as they are" else nearest(x @ white, means @ white)
        drawn = _weighed(sample, overall, _moments(Grouping(cell, len(means)), x, weights), concept, most, blur)
        number = len(drawn.means)
        if _CELLS_PER_CONCEPT * number <= cells or cells >= limit:
            return drawn
        ways = ways[-1:]
        cells = min(max(2 * cells, _CELLS_PER_CONCEPT * number), limit)


def _weighed(sample: Sample, spread: Tensor, cells: Sums, concept: Tensor, most: int, blur: float) -> Sketch:
    """From the covariance of all patches, the sums of cells, and the concept that each of these is part of at first (C,).

    What patches are worth depends on the concepts, and which concepts there are on what patches are worth: both in turn, until
    the number stays, or ten times. So it hardly matters how many cells there were.
    """
    dtype, evidence = sample.x.dtype, SharedCovariance(spread, blur, spread)
    filled = cells["weight"] > 0
    cells = {name: part[filled] for name, part in cells.items()}
    path = Path(-np.inf, torch.unique(concept[filled], return_inverse=True)[1])
    for _ in range(_WEIGHINGS):
        held = evidence.regrouped(cells, path.concept, path.number)
        means = _means(held, torch.float64)
        weight = held["weight"]
        within = (1 + max(blur, _LEAST_BLUR)) * spread - (means * weight[:, None]).T @ means / weight.sum()
        drawn = Sketch(means.to(dtype), sample.discounted(means.to(dtype), whitening(within).to(dtype)), spread, within)
        worth = drawn.sample.weights.sum(dtype=torch.float64) / cells["weight"].sum()
        if worth > _NEARLY_ALL and path.number < len(cells["weight"]):
            break
        path = _best_on_path(evidence.blurred({name: worth * part for name, part in cells.items()}), evidence, most)
        if path.number == len(means):
            return drawn._replace(means=_means(evidence.regrouped(cells, path.concept, path.number), dtype))
    return drawn


def _cells(x: Tensor, patches: Tensor, weights: Tensor, cells: int, rng: np.random.Generator) -> Sums:
    """k-means++ and a few rounds of Lloyd's algorithm on x; weight and first moments of the cells that hold patches."""
    some = max(_LEAST_PATCHES, _SEEDS_PER_CELL * cells)  # they come in random order
    means = x[spread_out(x[:some], weights[:some], cells, rng)]
    for _ in range(_LLOYD_ROUNDS + 1):
        by = Grouping(nearest(x, means), len(means))
        size = by.totals(weights)
        means = torch.where(size[:, None] > 0, by.sums(x, weights) / size.to(x.dtype).clamp_min(1e-30)[:, None], means)
    return {name: part[size > 0] for name, part in _moments(by, patches, weights).items()}


def _moments(by: Grouping, x: Tensor, weights: Tensor) -> Sums:
    return {"weight": by.totals(weights), "first": by.sums(x, weights).double()}


def _means(sums: Sums, dtype: torch.dtype) -> Tensor:
    return (sums["first"] / sums["weight"].clamp_min(1e-300)[:, None]).to(dtype)


def _best_on_path(sums: Sums, evidence: SharedCovariance, most: int) -> Path:
    concept = torch.arange(len(sums["weight"]), device=sums["weight"].device)
    best = Path(-np.inf, concept)
    while True:
        weight = sums["weight"]
        k = len(weight)
        bound = float(evidence.total(sums) + torch.xlogy(weight, weight / weight.sum()).sum())
        if bound > best.bound and k <= most:
            best = Path(bound, concept)
        if k == 1:
            return best
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
        sums, concept = evidence.regrouped(sums, group, k - len(mutual)), group[concept]


def _mixing_gain(n_a: Tensor, n_b: Tensor) -> Tensor:
    """What the patches of two cells no longer have to say: which of the two they are in."""
    n = n_a + n_b
    return torch.xlogy(n, n) - torch.xlogy(n_a, n_a) - torch.xlogy(n_b, n_b)
