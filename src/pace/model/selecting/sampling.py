"""The patches the search looks at, and how many independent patches they count as.

Patches of one image are alike: light, focus and subject shift all of them together. Counted as independent, every image
would become a concept of its own, the sooner the more tokens it has. So the search looks at few patches of many images, and
scales their weights to the number of independent patches that would say as much:

    Σ_c (Σ w)² / ((1 - ρ) Σ w² + ρ (Σ w)²)    w: weights of the patches of a cell c, held by one concept in one image

ρ is the intraclass correlation of two patches of a cell around the mean of their concept, by analysis of variance, along the
direction in which the concept varies most, since that is where it would be cut in two. (Over all directions together it would
be too small: images differ in a few of them.) With ρ = 0 and equal weights a cell counts as the patches it has, with ρ = 1 as
one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pace.model.inference import Weights
from pace.model.selecting.grouping import Grouping, nearest
from pace.model.selecting.halving import along_widest
from pace.model.settings import Settings
from pace.observations import Observations

_PATCHES = 1 << 15  # at least, if there are so many
_TOKENS = 16  # of an image, at least: its mixture has to be seen
_VALUES_AT_ONCE = 1 << 26  # read from the images
_EXACT = 1e-6  # variance, of about one, that rounding makes of identical patches


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
        total = _summed(weights, cell, len(filled)).square()
        squares = _summed(weights.square(), cell, len(filled))
        share = (total / ((1 - rho) * squares + rho * total)).sum() / weights.sum()
        return replace(self, weights=self.weights * share.to(self.weights.dtype))


def _summed(rows: Tensor, group: Tensor, number: int) -> Tensor:
    return rows.new_zeros(number, *rows.shape[1:]).index_add_(0, group, rows)


def _correlation(x: Tensor, owner: Tensor, cell: Tensor, concept: Tensor, number: int) -> float:
    """The median ρ over concepts, by number of patches: it does not matter if a few concepts are still several in one.

    `x` (n,), `owner` and `cell` of every patch, `concept` of every cell. ρ of a concept follows from the mean squares within
    and between its cells; it is 1 for a concept that only one image has.
    """
    size, first = _summed(torch.ones_like(x), cell, len(concept)), _summed(x, cell, len(concept))
    by_cell = torch.stack([torch.ones_like(size), size, size.square(), first.square() / size, first], 1)
    cells, patches, squared, of_cells, sums = _summed(by_cell, concept, number).T
    of_concepts = sums.square() / patches.clamp_min(1)
    within = ((_summed(x.square(), owner, number) - of_cells) / (patches - cells).clamp_min(1)).clamp_min(0)
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
