"""A first guess of the concepts: many small cells of a sample of patches, merged down to the best evidence.

Patches of one image are alike: light, focus and subject shift all of them together. Counted as independent, every image
would become a concept. So the search looks at few patches of many images, and scales their weights to the number of
independent patches that would say as much:

    Σ_c (Σ w)² / ((1 - ρ) Σ w² + ρ (Σ w)²)    w: weights of the patches of a cell c, held by one concept in one image

ρ is the intraclass correlation of two patches of a cell around the mean of their concept, by analysis of variance, along the
direction in which the concept varies most, since that is where it would be cut in two. (Over all directions together it would
be too small: images differ in a few of them.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pace.model.gaussians.family import precision_cholesky
from pace.model.inference import Weights
from pace.model.seeding import spread_out
from pace.model.selecting.evidence import BLUR, Clusters, covariance
from pace.model.selecting.grouping import Grouping, along_widest, nearest, summed
from pace.model.settings import Settings
from pace.observations import Observations

_PATCHES = 1 << 15  # in a sample at least, if there are so many
_TOKENS = 16  # of an image, at least: its mixture has to be seen
_VALUES_AT_ONCE = 1 << 26  # read from the images
_EXACT = 1e-6  # variance, of about one, that rounding makes of identical patches
_PATCHES_PER_CELL, _SEEDS_PER_CELL, _LEAST_PATCHES = 20, 8, 6000  # that make cells, and that they may start from
_CELLS_PER_CONCEPT = 4  # with fewer cells than this for each concept, merging could not have found them
_FIRST_CELLS_PER_CONCEPT = 8  # the same for the first few cells
_FIRST_CELLS = 24  # enough to see whether there are only a few concepts
_LLOYD_ROUNDS = 3
_WEIGHINGS = 10  # at most
_NEARLY_ALL = 0.9  # of their weight, with which patches make the same concepts as with all of it
_MERGED_AT_ONCE = 10  # one merge for so many cells before gains are computed again


@dataclass(frozen=True)
class Sample:
    """Patches of some images, in memory."""

    observations: Observations
    x: Tensor  # (n, d) patches, centred on their mean
    weights: Tensor  # (n,)
    offset: Tensor  # (d,)

    @classmethod
    def draw(
        cls, observations: Observations, settings: Settings, rng: np.random.Generator, patches: int = _PATCHES
    ) -> Sample:
        """All patches of the images drawn or, if there are more, some of each image, drawn by their attention.

        A copy of an image says nothing new and would pass for agreement between images, so it is left out.
        """
        wanted = -(-patches // min(observations.n_tokens, _TOKENS))
        images = np.sort(rng.choice(len(observations), min(wanted, len(observations)), replace=False))
        tokens = -(-patches // len(images))
        embeddings, attention, sums = [], [], []
        at_once = max(1, _VALUES_AT_ONCE // (observations.n_tokens * observations.dim))
        for start in range(0, len(images), at_once):
            batch = observations.batch(images[start : start + at_once], settings.device, settings.dtype)
            some, counts = batch.embeddings, batch.attention
            sums.append(torch.bmm(counts[:, None], some).squeeze(1))
            if tokens < observations.n_tokens:
                ladder = counts.double().cumsum(1)
                steps = np.arange(tokens) + rng.random((len(counts), 1))
                places = torch.from_numpy(steps / tokens).to(ladder.device) * ladder[:, -1:]
                drawn = torch.searchsorted(ladder, places, right=True).clamp_max(observations.n_tokens - 1)
                some = some.gather(1, drawn[:, :, None].expand(-1, -1, observations.dim))
                counts = torch.ones_like(counts[:, :tokens])
            embeddings.append(some)
            attention.append(counts)
        _, first = np.unique(torch.cat(sums).cpu().numpy(), axis=0, return_index=True)
        originals = torch.from_numpy(np.sort(first)).to(settings.device)
        kept = Observations(torch.cat(embeddings)[originals], torch.cat(attention)[originals])
        weights = Weights.of(kept.attention, "exact").count.flatten()
        x = kept.embeddings.flatten(0, 1)
        offset = (torch.mv(x.double().T, weights.double()) / weights.sum(dtype=torch.float64)).to(x.dtype)
        return cls(kept, x - offset, weights, offset)

    def discounted(self, means: Tensor, white: Tensor) -> Sample:
        """Weights scaled to what the patches count if concepts have these means. `white` gives patches unit spread."""
        (images, tokens), number = self.observations.shape[:2], len(means)
        rows = (self.weights > 0).nonzero().squeeze(1)
        x, means, weights = self.x[rows] @ white, means @ white, self.weights[rows].double()
        owner = nearest(x, means)
        filled, cell = torch.unique(rows // tokens * number + owner, return_inverse=True)
        rho = 0.0
        if images > 1:
            places = along_widest(x, self.weights[rows], Grouping(owner, number)).double()
            rho = _correlation(places, owner, cell, filled % number, number)
        total = summed(weights, cell, len(filled)).square()
        squares = summed(weights.square(), cell, len(filled))
        share = (total / ((1 - rho) * squares + rho * total)).sum() / weights.sum()
        return replace(self, weights=self.weights * share.to(self.weights.dtype))


def _correlation(x: Tensor, owner: Tensor, cell: Tensor, concept: Tensor, number: int) -> float:
    """The median ρ over concepts, by number of patches: it does not matter if a few concepts are still several in one.

    `x` (n,), `owner` and `cell` of every patch, `concept` of every cell. ρ of a concept follows from the mean squares within
    and between its cells; it is 1 for a concept that only one image has.
    """
    size, first = summed(torch.ones_like(x), cell, len(concept)), summed(x, cell, len(concept))
    by_cell = torch.stack([torch.ones_like(size), size, size.square(), first.square() / size, first], 1)
    cells, patches, squared, of_cells, sums = summed(by_cell, concept, number).T
    of_concepts = sums.square() / patches.clamp_min(1)
    within = ((summed(x.square(), owner, number) - of_cells) / (patches - cells).clamp_min(1)).clamp_min(0)
    between = (of_cells - of_concepts) / (cells - 1).clamp_min(1)
    typical = (patches - squared / patches.clamp_min(1)) / (cells - 1).clamp_min(1)  # patches of a cell
    shared = ((between - within) / typical.clamp_min(1)).clamp_min(0)
    rho = torch.where(cells > 1, shared / (shared + within).clamp_min(_EXACT), 1.0)
    known = patches > cells
    if not bool(known.any()):
        return 0.0
    rho, order = rho[known].sort()
    heavy = patches[known][order].cumsum(0)
    return float(rho[(heavy < heavy[-1] / 2).sum()])


class Sketch(NamedTuple):
    """Concepts, and a sample whose weights say what patches count if these are the concepts."""

    means: Tensor  # (K, d)
    sample: Sample
    spread: Tensor  # (d, d) covariance of all patches
    within: Tensor  # (d, d) around the concepts, blur included


def sketch(sample: Sample, start: int, most: int, rng: np.random.Generator) -> Sketch:
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
        white = precision_cholesky(spread).to(x.dtype)
        found = {}
        for way in ways:
            by = _cells(patches @ white if way == "white" else patches, held, cells, rng)
            clusters = Clusters.of(patches, held, by, spread)
            found[way] = clusters[clusters.weight > 0]
        if len(ways) == 1:
            concept = torch.arange(len(found[ways[0]]), device=x.device)  # each cell on its own
        else:
            paths = {way: _best_on_path(found[way], most) for way in ways}
            ways = sorted(ways, key=lambda way: paths[way][0])
            concept = paths[ways[-1]][1]
            # Rare concepts hide in a few cells: before there are `start` of them they decide only if they find very few.
            needed = (_FIRST_CELLS_PER_CONCEPT if cells < start else _CELLS_PER_CONCEPT) * (int(concept.max()) + 1)
            if cells < min(max(start, _FIRST_CELLS), limit) and cells < needed:
                cells = min(start if cells < start else 2 * cells, limit)
                continue
        means = found[ways[-1]].means.to(x.dtype)
        cell = nearest(x, means) if ways[-1] == "plain" else nearest(x @ white, means @ white)
        clusters = Clusters.of(x, weights, Grouping(cell, len(means)), overall)
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
    filled = cells.weight > 0
    cells, concept = cells[filled], torch.unique(concept[filled], return_inverse=True)[1]
    for _ in range(_WEIGHINGS):
        held = cells.regrouped(concept)
        within = (1 + BLUR) * cells.spread - held.between / held.weight.sum()
        means = held.means.to(sample.x.dtype)
        drawn = Sketch(
            means, sample.discounted(means, precision_cholesky(within).to(means.dtype)), cells.spread, within
        )
        share = drawn.sample.weights.sum(dtype=torch.float64) / cells.weight.sum()
        if share > _NEARLY_ALL and len(means) < len(cells):
            break
        _, concept = _best_on_path(cells.scaled(share), most)
        after = cells.regrouped(concept).means.to(means.dtype)
        if len(after) == len(means):
            return drawn._replace(means=after)
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


def _best_on_path(clusters: Clusters, most: int) -> tuple[float, Tensor]:
    """Merge down to one: the best bound with at most `most` clusters, and which of those each cell is then part of (C,).

    The path goes on through merges that lose: halves of a cloud may gain where its cells do not.
    """
    concept = torch.arange(len(clusters), device=clusters.weight.device)
    best = (-np.inf, concept)
    while True:
        weight, k = clusters.weight, len(clusters)
        bound = float(clusters.evidence() + torch.xlogy(weight, weight / weight.sum()).sum())
        if bound > best[0] and k <= most:
            best = (bound, concept)
        if k == 1:
            return best
        a, b = torch.triu_indices(k, k, 1, device=weight.device)
        each, both = torch.xlogy(weight, weight), weight[a] + weight[b]
        # Patches of a pair no longer have to say which of the two they are in.
        gains = clusters.merge_gains(torch.stack([a, b], 1)) + torch.xlogy(both, both) - each[a] - each[b]
        table = weight.new_full((k, k), -torch.inf)
        table[a, b] = table[b, a] = gains
        value, partner = table.max(1)
        every = torch.arange(k, device=weight.device)
        mutual = every[(partner[partner] == every) & (every < partner)]  # each pair once
        gaining = int((value[mutual] > 0).sum())
        mutual = mutual[value[mutual].argsort(descending=True)][: max(1, gaining, k // _MERGED_AT_ONCE)]
        every[partner[mutual]] = mutual
        _, group = torch.unique(every, return_inverse=True)
        clusters, concept = clusters.regrouped(group), group[concept]
