"""The patches that are looked at, and what they are worth.

Patches of one image are alike: light, focus and what the image shows shift all of them together. To count each as one more
independent patch makes every image a concept of its own, the more tokens an image has the sooner. So few patches of many
images are looked at, and all of them together count as the patches that would say as much if they were independent:

    Σ_c (Σ w)² / ((1 - ρ) Σ w² + ρ (Σ w)²)    w: weights of the patches of a cell c, which one concept holds of one image

ρ is the correlation of two patches of a cell around the mean of their concept, by analysis of variance, along the direction in
which the concept varies most: that is where it would be cut in two. (In all directions together it would be too small: images
differ in a few of them.) Without it, and with equal weights, a cell counts as the patches it has; with ρ = 1 as one. A patch
with the weight of several counts as one, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pace.model.inference import Weights
from pace.model.selecting.grouping import Grouping, nearest
from pace.model.selecting.halving import along_widest
from pace.model.settings import Settings
from pace.observations import Observations

_PATCHES = 1 << 15  # at least, if there are so many
_TOKENS = 16  # of an image, at least, rather than those of more images: its mixture has to be seen
_VALUES_AT_ONCE = 1 << 26  # read from the images
_EXACT = 1e-6  # variance, of what has about one, that rounding makes of patches that are the same


@dataclass(frozen=True)
class Sample:
    """Patches of some images, in memory."""

    observations: Observations
    x: Tensor  # (n, d) patches, centred on their mean
    weights: Tensor  # (n,)
    offset: Tensor  # (d,)

    @classmethod
    def draw(cls, observations: Observations, settings: Settings, rng: np.random.Generator) -> Sample:
        wanted = -(-_PATCHES // min(observations.n_tokens, _TOKENS))
        images = rng.choice(len(observations), min(wanted, len(observations)), replace=False)
        return cls.of(observations, np.sort(images), settings, -(-_PATCHES // len(images)), rng)

    @classmethod
    def of(
        cls,
        observations: Observations,
        images: npt.NDArray[np.int64],
        settings: Settings,
        tokens: int,
        rng: np.random.Generator,
    ) -> Sample:
        """All patches of these images or, if there are more, so many of each, drawn by their attention.

        Copies of an image say nothing new, and would be taken for agreement between images: each is looked at once.
        """
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
        own = _first_of_each(torch.cat(sums))
        kept = Observations(torch.cat(embeddings)[own], torch.cat(attention)[own])
        weights = Weights.of(kept.attention, "exact").count.flatten()
        x = kept.embeddings.flatten(0, 1)
        offset = (torch.mv(x.double().T, weights.double()) / weights.sum(dtype=torch.float64)).to(x.dtype)
        return cls(kept, x - offset, weights, offset)

    def discounted(self, means: Tensor, white: Tensor) -> Sample:
        """With as much weight as the patches are worth, if concepts are about there. Times `white` they have unit spread."""
        (images, tokens), number = self.observations.shape[:2], len(means)
        rows = (self.weights > 0).nonzero().squeeze(1)
        x, means, weights = self.x[rows] @ white, means @ white, self.weights[rows].double()
        owner = nearest(x, means)
        filled, cell = torch.unique(rows // tokens * number + owner, return_inverse=True)
        alike = 0.0
        if images > 1:
            places = along_widest(x, self.weights[rows], Grouping(owner, number)).double()
            alike = _correlation(places, owner, cell, filled % number, number)
        total = weights.new_zeros(len(filled)).index_add_(0, cell, weights).square()
        squares = weights.new_zeros(len(filled)).index_add_(0, cell, weights.square())
        worth = (total / ((1 - alike) * squares + alike * total)).sum() / weights.sum()
        return replace(self, weights=self.weights * worth.to(self.weights.dtype))


def _first_of_each(rows: Tensor) -> Tensor:
    """Where every row is found first, in order."""
    known, same = torch.unique(rows, dim=0, return_inverse=True)
    place = torch.arange(len(rows), device=rows.device)
    return place.new_full((len(known),), len(rows)).scatter_reduce_(0, same, place, "amin").sort().values


def _correlation(x: Tensor, owner: Tensor, cell: Tensor, concept: Tensor, number: int) -> float:
    """ρ of the concept in the middle, by number of patches: that a few concepts are still several in one does not matter.

    `x` (n,), `owner` and `cell` of every patch, `concept` of every cell. For a concept, from the mean squares within and
    between its cells; of one that a single image has, all patches say the same.
    """

    def summed(rows: Tensor, where: Tensor, groups: int) -> Tensor:
        return rows.new_zeros(groups, *rows.shape[1:]).index_add_(0, where, rows)

    size, first = summed(torch.ones_like(x), cell, len(concept)), summed(x, cell, len(concept))
    by_cell = torch.stack([torch.ones_like(size), size, size.square(), first.square() / size, first], 1)
    cells, patches, squared, of_cells, sums = summed(by_cell, concept, number).T
    of_concepts = sums.square() / patches.clamp_min(1)
    within = ((summed(x.square(), owner, number) - of_cells) / (patches - cells).clamp_min(1)).clamp_min(0)
    between = (of_cells - of_concepts) / (cells - 1).clamp_min(1)
    typical = (patches - squared / patches.clamp_min(1)) / (cells - 1).clamp_min(1)  # patches of a cell
    shared = ((between - within) / typical.clamp_min(1)).clamp_min(0)
    rho = torch.where(cells > 1, shared / (shared + within).clamp_min(_EXACT), 1.0)
    told = patches > cells
    if not bool(told.any()):
        return 0.0
    rho, order = rho[told].sort()
    heavy = patches[told][order].cumsum(0)
    return float(rho[(heavy < heavy[-1] / 2).sum()])
