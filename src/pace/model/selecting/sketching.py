"""A first guess of the concepts: many small cells of patches, merged down to the partition with the best evidence."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pace.model.seeding import spread_out
from pace.model.selecting.evidence import Clusters, covariance, whitening
from pace.model.selecting.grouping import Grouping, nearest
from pace.model.selecting.sampling import Sample

_PATCHES_PER_CELL, _SEEDS_PER_CELL, _LEAST_PATCHES = 20, 8, 6000  # that make cells, and that they may start from
_CELLS_PER_CONCEPT = 4  # with fewer cells than this for each concept, merging could not have found them
_FIRST_CELLS_PER_CONCEPT = 8  # the same for the first few cells
_FIRST_CELLS = 24  # enough to see whether there are only a few concepts
_LLOYD_ROUNDS = 3
_WEIGHINGS = 10  # at most
_LEAST_BLUR = 1e-4  # above what rounding does to a covariance
_NEARLY_ALL = 0.9  # of their weight, with which patches make the same concepts as with all of it
_MERGED_AT_ONCE = 10  # one merge for so many cells before gains are computed again


class Sketch(NamedTuple):
    """Concepts, and a sample whose weights say what patches count if these are the concepts."""

    means: Tensor  # (K, d)
    sample: Sample
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
    """The best partition with at most `most` concepts on a path of merges of cells, by their evidence.

    If it has nearly as many concepts as there are cells, there were too few cells. A few come first, since they may be all it
    takes, then `start` of them. These are made both of the patches as they are and of whitened patches, since a few wide
    directions would hide what the others say; the better way goes on.
    """
    rows = (sample.weights > 0).nonzero().squeeze(1)
    x, weights = sample.x[rows], sample.weights[rows]
    overall = covariance(x, weights)
    order = torch.as_tensor(rng.permutation(len(x)), device=x.device)
    limit = max(1, min(len(x) // _CELLS_PER_CONCEPT, _CELLS_PER_CONCEPT * max(most, start)))
    cells = min(start, _FIRST_CELLS, limit)
    ways = ["white", "plain"]
    while True:
        some = order[: max(_LEAST_PATCHES, _PATCHES_PER_CELL * cells)]
        patches, held = x[some], weights[some]
        spread = covariance(patches, held)
        white = whitening(spread).to(x.dtype)
        found = {}
        for way in ways:
            by = _cells(patches @ white if way == "white" else patches, held, cells, rng)
            clusters = Clusters.of(patches, held, by, spread, blur)
            found[way] = clusters[clusters.weight > 0]
        if len(ways) == 1:
            concept = torch.arange(len(found[ways[0]]), device=x.device)  # each cell on its own
        else:
            paths = {way: _best_on_path(found[way], most) for way in ways}
            ways = sorted(ways, key=lambda way: paths[way].bound)
            concept, number = paths[ways[-1]].concept, paths[ways[-1]].number
            # Rare concepts hide in a few cells: before there are `start` of them they decide only if they find very few.
            needed = (_FIRST_CELLS_PER_CONCEPT if cells < start else _CELLS_PER_CONCEPT) * number
            if cells < min(max(start, _FIRST_CELLS), limit) and cells < needed:
                cells = min(start if cells < start else 2 * cells, limit)
                continue
        means = found[ways[-1]].means.to(x.dtype)
        cell = nearest(x, means) if ways[-1] == "plain" else nearest(x @ white, means @ white)
        clusters = Clusters.of(x, weights, Grouping(cell, len(means)), overall, blur)
        drawn = _weighed(sample, clusters, concept, most)
        if _CELLS_PER_CONCEPT * len(drawn.means) <= cells or cells >= limit:
            return drawn
        ways = ways[-1:]
        cells = min(max(2 * cells, _CELLS_PER_CONCEPT * len(drawn.means)), limit)


def _weighed(sample: Sample, cells: Clusters, concept: Tensor, most: int) -> Sketch:
    """From cells of all patches, and the concept that each is part of at first (C,).

    What patches count depends on the concepts, and which concepts there are on what patches count: both in turn until the
    number stays. So it hardly matters how many cells there were.
    """
    dtype = sample.x.dtype
    filled = cells.weight > 0
    cells, path = cells[filled], Path(-np.inf, torch.unique(concept[filled], return_inverse=True)[1])
    for _ in range(_WEIGHINGS):
        held = cells.regrouped(path.concept, path.number)
        within = (1 + max(cells.blur, _LEAST_BLUR)) * cells.spread - held.between / held.weight.sum()
        means = held.means.to(dtype)
        drawn = Sketch(means, sample.discounted(means, whitening(within).to(dtype)), cells.spread, within)
        share = drawn.sample.weights.sum(dtype=torch.float64) / cells.weight.sum()
        if share > _NEARLY_ALL and path.number < len(cells):
            break
        path = _best_on_path(cells.scaled(share), most)
        if path.number == len(means):
            return drawn._replace(means=cells.regrouped(path.concept, path.number).means.to(dtype))
    return drawn


def _cells(x: Tensor, weights: Tensor, number: int, rng: np.random.Generator) -> Grouping:
    """k-means++ and a few rounds of Lloyd's algorithm. Patches come in random order."""
    some = max(_LEAST_PATCHES, _SEEDS_PER_CELL * number)
    means = x[spread_out(x[:some], weights[:some], number, rng)]
    for _ in range(_LLOYD_ROUNDS + 1):
        by = Grouping(nearest(x, means), len(means))
        size = by.totals(weights)
        means = torch.where(size[:, None] > 0, by.sums(x, weights) / size.to(x.dtype).clamp_min(1e-30)[:, None], means)
    return by


def _best_on_path(clusters: Clusters, most: int) -> Path:
    """Merge down to one. The path goes on through merges that lose: halves of a cloud may gain where its cells do not."""
    concept = torch.arange(len(clusters), device=clusters.weight.device)
    best = Path(-np.inf, concept)
    while True:
        weight, k = clusters.weight, len(clusters)
        bound = float(clusters.evidence() + torch.xlogy(weight, weight / weight.sum()).sum())
        if bound > best.bound and k <= most:
            best = Path(bound, concept)
        if k == 1:
            return best
        a, b = torch.triu_indices(k, k, 1, device=weight.device)
        gains = clusters.merge_gains(torch.stack([a, b], 1)) + _mixing_gain(weight[a], weight[b])
        table = weight.new_full((k, k), -torch.inf)
        table[a, b] = table[b, a] = gains
        value, partner = table.max(1)
        every = torch.arange(k, device=weight.device)
        mutual = every[(partner[partner] == every) & (every < partner)]  # each pair once
        gaining = int((value[mutual] > 0).sum())
        mutual = mutual[value[mutual].argsort(descending=True)][: max(1, gaining, k // _MERGED_AT_ONCE)]
        every[partner[mutual]] = mutual
        _, group = torch.unique(every, return_inverse=True)
        clusters, concept = clusters.regrouped(group, k - len(mutual)), group[concept]


def _mixing_gain(n_a: Tensor, n_b: Tensor) -> Tensor:
    """What the patches of two cells no longer have to say: which of the two they are in."""
    n = n_a + n_b
    return torch.xlogy(n, n) - torch.xlogy(n_a, n_a) - torch.xlogy(n_b, n_b)
