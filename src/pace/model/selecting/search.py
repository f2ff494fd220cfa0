"""Merges, splits and births of concepts, each kept only if the bound rises."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pace.model.gaussians import Prior, TiedGaussians
from pace.model.inference import Weights, infer, uniform_start
from pace.model.selecting.evidence import Clusters, whitening
from pace.model.selecting.grouping import Grouping, segment_sums
from pace.model.selecting.halving import halves
from pace.model.selecting.sketching import Sketch
from pace.model.settings import Settings

_NEIGHBOURS = 4  # of every concept, that it may merge with
_EPOCHS = 3  # after a move, before it is judged
_ROUNDS = 30
_ALPHA_STEPS = 20
_PROMISING = 10  # one concept in so many is split even if no split gains at once
_SPLIT_PATCHES = 2000  # of a concept, from which its halves are found
_FEWEST = 4  # patches that could be two concepts
_ENTRIES_AT_ONCE = 1 << 19  # of φ, that stay in a CPU's cache; a GPU takes all images together


class Move(NamedTuple):
    """How many concepts there are after a move, and the bound then (nats, of the whole sample)."""

    number: int
    bound: float


@dataclass(frozen=True)
class Partition:
    """Every patch given to one concept."""

    alpha: Tensor  # (K,)
    owner: Tensor  # (n,) concept of a patch
    counts: Tensor  # (K, M) weight of a concept's patches in an image
    clusters: Clusters
    bound: float

    def __len__(self) -> int:
        return len(self.alpha)


class Splits(NamedTuple):
    """Concepts that could be two, the best first."""

    gains: list[float]
    concepts: Tensor  # (P,)
    halves: Clusters  # rows 2p and 2p + 1 of concept p


class Search:
    """Looks for the number of concepts with the best bound.

    The bound is that of the model with each patch given to one concept, and θ_m, μ_k and Σ integrated out:

        Σ_m log ∫ Π_k θ_mk^c_mk Dirichlet(θ_m | α) dθ_m  +  the evidence of the patches given who holds them

    c_mk: weight of concept k's patches in image m. It needs sums only, so the effect of a merge is known exactly. α is
    estimated; as in BIC, every α_k costs half the log of the number of images.
    """

    def __init__(
        self,
        drawn: Sketch,
        blur: float,
        most: int,
        settings: Settings,
        report: Callable[[Move], object] = lambda _: None,
    ):
        self._sample, self._spread, self._blur = drawn.sample, drawn.spread, blur
        self._most, self._settings, self._report = most, settings, report
        self._means = drawn.means
        self._prior = Prior(drawn.within, drawn.means.shape[1] / len(drawn.means))
        self._white = whitening(drawn.within).to(drawn.means.dtype)
        self._counted = (self._sample.weights > 0).nonzero().squeeze(1)
        self._alpha_price = math.log(len(self._sample.observations)) / 2
        self.bounds: dict[int, float] = {}  # the best with each number of concepts

    def run(self) -> Partition:
        """From the sketch to a partition that no move improves."""
        k = len(self._means)
        alpha = torch.full((k,), max(1.0, 0.1 * k) / k, dtype=torch.float64, device=self._means.device)
        found = self._assign(TiedGaussians(self._means, self._white), alpha)
        found = self._settle(found.clusters, found.alpha)
        self._keep(found)
        for _ in range(_ROUNDS):
            better = self._merge(found) or self._split(found)
            if better is None:  # several merges in a row may gain where the first alone does not
                best, below = self._merge_to_one(found)
                if best is found:
                    break
                better = max(best, self._settle(best.clusters, best.alpha), key=lambda partition: partition.bound)
            self._keep(better)
            found = better
        else:
            _, below = self._merge_to_one(found)
        for move in below:
            self._record(*move)
        return found

    def merge_gains(self, found: Partition, known: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Pairs of neighbours (P, 2), and what the bound gains (P,) when the two become one and nothing else changes.

        `known` (K, K) holds what the mixtures gain, NaN where that is not known yet; it is filled in.
        """
        pairs = self._neighbours(found)
        if not len(pairs):
            return pairs, pairs.new_zeros(0, dtype=torch.float64)
        if known is None:
            known = found.alpha.new_full((len(found), len(found)), torch.nan)
        a, b = pairs[known[pairs[:, 0], pairs[:, 1]].isnan()].T
        alone = ImageCounts.of(found.counts).mixing(found.alpha)
        together = ImageCounts.of(found.counts[a] + found.counts[b]).mixing(found.alpha[a] + found.alpha[b])
        known[a, b] = together - alone[a] - alone[b]
        a, b = pairs.T
        return pairs, known[a, b] + self._alpha_price + found.clusters.merge_gains(pairs)

    def merged(self, found: Partition, pairs: list[tuple[int, int]], gain: float) -> Partition:
        """Without a pass over the patches: sums, counts and α add up."""
        group = torch.arange(len(found))
        for a, b in pairs:
            group[b] = a
        group = torch.unique(group, return_inverse=True)[1].to(found.alpha.device)
        number = len(found) - len(pairs)
        counts = found.counts.new_zeros(number, found.counts.shape[1]).index_add_(0, group, found.counts)
        alpha = found.alpha.new_zeros(number).index_add_(0, group, found.alpha)
        clusters = found.clusters.regrouped(group, number)
        return Partition(alpha, group[found.owner], counts, clusters, found.bound + gain)

    # -- moves --------------------------------------------------------------------------------------------------------

    def _merge(self, found: Partition) -> Partition | None:
        """All pairs that gain, then all pairs of the result that gain, and so on; failing that, the best pair alone."""
        pairs = first = self._gaining(found)
        after = found
        while pairs:
            after = self.merged(after, pairs, 0.0)
            pairs = self._gaining(after)
        tried = [after] if len(after) < len(found) else []
        if len(after) < len(found) - 1:
            tried.append(self.merged(found, first[:1], 0.0))
        for after in tried:
            after = self._settle(after.clusters, after.alpha)
            if after.bound > found.bound:
                return after
        return None

    def _gaining(self, found: Partition) -> list[tuple[int, int]]:
        """Pairs that gain by becoming one, the best first, no concept twice."""
        pairs, gains = self.merge_gains(found)
        best_first = gains.argsort(descending=True)[: int((gains > 0).sum())]
        chosen: list[tuple[int, int]] = []
        taken: set[int] = set()
        for a, b in pairs[best_first].tolist():
            if not {a, b} & taken:
                chosen.append((a, b))
                taken |= {a, b}
        return chosen

    def _merge_to_one(self, found: Partition) -> tuple[Partition, list[Move]]:
        """Merge the cheapest pair until one is left: the best partition, which may be `found`, and the bounds."""
        best, below = found, []
        known = found.alpha.new_full((len(found), len(found)), torch.nan)
        while len(found) > 1:
            pairs, gains = self.merge_gains(found, known)
            gain, cheapest = gains.max(0)
            a, b = pairs[cheapest].tolist()
            found = self.merged(found, [(a, b)], float(gain))
            others = torch.tensor([k for k in range(len(known)) if k != b], device=known.device)
            known = known[others][:, others]
            known[a] = known[:, a] = torch.nan
            below.append(Move(len(found), found.bound))
            best = max(best, found, key=lambda partition: partition.bound)
        return best, below

    def _split(self, found: Partition) -> Partition | None:
        """All concepts that gain by it; failing that, the better half of them, and so on down to one.

        If none gains at once the most promising are tried all the same: a few odd patches may find others of their kind.
        """
        splits = self._splits(found)
        gaining = sum(gain > 0 for gain in splits.gains)
        number = min(gaining or 1 + len(found) // _PROMISING, len(splits.gains), self._most - len(found))
        while number > 0:
            concepts, parts = splits.concepts[:number], splits.halves[: 2 * number]
            one, other = (found.alpha[concepts, None] * _shares(parts)).T
            alpha = torch.cat([found.alpha, other]).index_copy_(0, concepts, one)
            after = self._settle(found.clusters.divided(concepts, parts), alpha)
            if after.bound > found.bound:
                return after
            self._record(len(after), after.bound)
            number //= 2
        return None

    def _splits(self, found: Partition) -> Splits:
        """The best way to cut each concept that has enough patches."""
        owners = Grouping(found.owner[self._counted], len(found))
        concept = owners.group[owners.order]
        place = torch.arange(len(concept), device=concept.device) - owners.starts[concept]
        looked_at = place % (owners.sizes // _SPLIT_PATCHES).clamp_min(1)[concept] == 0
        looked_at &= owners.sizes[concept] >= _FEWEST
        rows = self._counted[owners.order][looked_at]
        concepts, group = torch.unique_consecutive(concept[looked_at], return_inverse=True)
        number = len(concepts)
        if number == 0:
            return Splits([], concepts, found.clusters[:0])
        x, by, weights = self._sample.x[rows], Grouping(group, number), self._sample.weights[rows]
        held = weights * (found.clusters.weight[concepts] / by.totals(weights)).to(weights.dtype)[group]
        whole = ImageCounts.of(self._counts(group, rows, held, number)).mixing(found.alpha[concepts])
        gains = torch.full((number,), -torch.inf, dtype=torch.float64, device=rows.device)
        weight, first = gains.new_zeros(2 * number), gains.new_zeros(2 * number, x.shape[1])
        # Both whitened and as they are: what divides every concept alike is hidden where the pooled spread has unit length.
        ways = [*halves(x @ self._white, weights, by, white=True), *halves(x, weights, by)]
        for side in ways:
            two = Grouping(2 * group + ~side, 2 * number)
            parts = Clusters.of(x, held, two, self._spread, self._blur)
            alpha = (found.alpha[concepts, None] * _shares(parts)).flatten()
            apart = ImageCounts.of(self._counts(two.group, rows, held, 2 * number)).mixing(alpha).view(-1, 2).sum(1)
            gain = found.clusters.split_gains(concepts, parts) + apart - whole - self._alpha_price
            better = (two.sizes.view(-1, 2) > 0).all(1) & (gain > gains)
            gains = torch.where(better, gain, gains)
            which = better.repeat_interleave(2)
            weight, first = torch.where(which, parts.weight, weight), torch.where(which[:, None], parts.first, first)
        gains, order = gains.sort(descending=True, stable=True)
        order = order[: int((gains > -torch.inf).sum())]
        both = torch.stack([2 * order, 2 * order + 1], 1).flatten()
        return Splits(
            gains.tolist()[: len(order)], concepts[order], Clusters(weight, first, self._spread, self._blur)[both]
        )

    def _neighbours(self, found: Partition) -> Tensor:
        """(P, 2), each pair once."""
        k = len(found)
        means = found.clusters.means @ self._white.double()
        distances = torch.cdist(means, means).fill_diagonal_(torch.inf)
        near = distances.topk(min(_NEIGHBOURS, k - 1), largest=False).indices
        pairs = torch.stack([torch.arange(k, device=near.device)[:, None].expand_as(near), near], 2).flatten(0, 1)
        unique: Tensor = torch.unique(pairs.sort(1).values, dim=0)
        return unique

    # -- epochs -------------------------------------------------------------------------------------------------------

    def _settle(self, clusters: Clusters, alpha: Tensor) -> Partition:
        for _ in range(_EPOCHS):
            start = TiedGaussians(clusters.means.to(self._settings.dtype), self._white)
            found = self._assign(start.maximise(clusters.sums, self._prior), alpha)
            clusters, alpha = found.clusters, found.alpha
        return found

    def _assign(self, gaussians: TiedGaussians, alpha: Tensor) -> Partition:
        """Each patch goes to the concept with the largest φ."""
        settings, observations = self._settings, self._sample.observations
        k, tokens, dim = len(alpha), observations.n_tokens, observations.dim
        at_once = _ENTRIES_AT_ONCE if settings.device.type == "cpu" else len(self._sample.x) * k
        size = min(settings.images_per_batch(tokens, 1, gaussians), max(1, at_once // (tokens * k)))
        owners = []
        for _, batch in observations.batches(size, settings.device, settings.dtype):
            weights = Weights.of(batch.attention, "exact")
            x = gaussians.features(batch.embeddings.flatten(0, 1), self._sample.offset)
            distances = gaussians.mahalanobis(x, relative=True).view(-1, tokens, k)
            likelihood = weights.log_likelihood(distances, gaussians.log_det, dim)
            start = uniform_start(len(likelihood), k, tokens, "exact", likelihood.device)
            settled = infer(
                likelihood, weights, alpha, start,
                max_sweeps=settings.max_sweeps, tol=settings.sweep_tol, patches=False,
            )  # fmt: skip
            last = infer(
                likelihood, weights, alpha, (settled.counts, start[1]), max_sweeps=1
            )  # φ that goes with this γ
            owners.append(last.phi.argmax(2).flatten())
        owner, weight = torch.cat(owners), self._sample.weights
        clusters = Clusters.of(self._sample.x, weight, Grouping(owner, k), self._spread, self._blur)
        counts = self._counts(owner, torch.arange(len(owner), device=owner.device), weight, k)
        held, total = ImageCounts.of(counts), counts.sum(0)
        alpha = held.fit_alpha(alpha, total, settings.smallest_alpha)
        bound = clusters.evidence() + held.mixing(alpha).sum()
        bound = bound - (torch.lgamma(total + alpha.sum()) - torch.lgamma(alpha.sum())).sum()
        return Partition(alpha, owner, counts, clusters, float(bound) - k * self._alpha_price)

    def _counts(self, group: Tensor, rows: Tensor, weights: Tensor, number: int) -> Tensor:
        """(number, M): weight of each group's patches, which are these rows of the sample, in an image."""
        observations = self._sample.observations
        # The order does not matter: float64 adds up a few float32 without rounding.
        counts = torch.zeros(number * len(observations), dtype=torch.float64, device=rows.device)
        counts.index_add_(0, group * len(observations) + rows // observations.n_tokens, weights.double())
        return counts.view(number, -1)

    def _keep(self, found: Partition) -> None:
        self._record(len(found), found.bound)
        self._report(Move(len(found), found.bound))

    def _record(self, number: int, bound: float) -> None:
        self.bounds[number] = max(bound, self.bounds.get(number, -math.inf))


def _shares(parts: Clusters) -> Tensor:
    """Of each half in its concept (P, 2)."""
    weight = parts.weight.view(-1, 2)
    return weight / weight.sum(1, keepdim=True)


class ImageCounts(NamedTuple):
    """The weight of each concept's patches in each image, where it is not zero (it nearly always is)."""

    weight: Tensor  # (n,)
    concept: Tensor  # (n,) ascending
    starts: Tensor  # (K + 1,)

    @classmethod
    def of(cls, counts: Tensor) -> ImageCounts:
        concept, image = counts.nonzero().T.contiguous()
        starts = torch.searchsorted(concept, torch.arange(len(counts) + 1, device=counts.device))
        return cls(counts[concept, image], concept, starts)

    def mixing(self, alpha: Tensor) -> Tensor:
        """What each concept adds to Σ_m log ∫ Π_k θ_mk^c_mk Dirichlet(θ_m | α) dθ_m, images' totals aside (K,)."""
        change = torch.lgamma(self.weight + alpha[self.concept]) - torch.lgamma(alpha)[self.concept]
        return segment_sums(change, self.starts)

    def fit_alpha(self, alpha: Tensor, total: Tensor, smallest: float) -> Tensor:
        """Minka's fixed point, every step of which raises the bound; `total` (M,) of every image."""
        for _ in range(_ALPHA_STEPS):
            up = torch.digamma(self.weight + alpha[self.concept]) - torch.digamma(alpha)[self.concept]
            down = (torch.digamma(total + alpha.sum()) - torch.digamma(alpha.sum())).sum()
            alpha = (alpha * segment_sums(up, self.starts) / down).clamp_min(smallest)
        return alpha
