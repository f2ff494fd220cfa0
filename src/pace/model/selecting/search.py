"""Merges, splits and births, each kept only if the bound rises."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pace.model.concepts import Concepts
from pace.model.gaussians import FAMILIES, Gaussians, Prior, Sums
from pace.model.inference import Weights, furthest_plausible, infer, uniform_start
from pace.model.objective import expected_log_theta
from pace.model.selecting.evidence import Evidence, whitening
from pace.model.selecting.grouping import Grouping, segment_sums
from pace.model.selecting.halving import FEWEST, halves
from pace.model.selecting.sampling import Sample
from pace.model.settings import Settings

_NEIGHBOURS = 4  # of every concept, with which it could be one
_EPOCHS = 2  # after a move, before it is judged
_ROUNDS = 30
_ALPHA_STEPS = 20
_PROMISING = 10  # one concept in so many
_SPLIT_PATCHES = 2000  # of a concept, from which its halves are found
_AT_ONCE = {"cpu": 1 << 19}  # entries of φ that stay in a CPU's cache; a GPU takes all images together


class Move(NamedTuple):
    """What was done, how many concepts there were then, and the bound (nats, of the whole sample)."""

    kind: str  # "start", "merge", "split"
    number: int
    bound: float


@dataclass(frozen=True)
class Partition:
    """Every patch given to one concept."""

    alpha: Tensor  # (K,)
    owner: Tensor  # (n,) concept of a patch
    counts: Tensor  # (K, M) weight of a concept's patches in an image
    sums: Sums  # blurred
    bound: float

    def __len__(self) -> int:
        return len(self.alpha)

    @property
    def means(self) -> Tensor:
        return self.sums["first"] / self.sums["weight"].clamp_min(1e-300)[:, None]


class Down(NamedTuple):
    """Merges of a partition down to one concept: the best on the way, and the bound with every number."""

    of: Partition
    best: Partition  # or the partition itself
    bounds: dict[int, float]


class Splits(NamedTuple):
    """Concepts that could be two, the best first."""

    gains: list[float]
    concepts: Tensor  # (P,)
    parts: Sums  # of both halves, rows 2p and 2p + 1

    def best(self, number: int) -> Splits:
        parts = {name: rows[: 2 * number] for name, rows in self.parts.items()}
        return Splits(self.gains[:number], self.concepts[:number], parts)


class Search:
    """Looks for the number of concepts whose bound is best.

    The bound is that of the model with each patch given to one concept, θ_m, μ_k and Σ_k integrated out:

        Σ_m log ∫ Π_k θ_mk^c_mk Dirichlet(θ_m | α) dθ_m  +  the evidence of the patches given who holds them

    c_mk: weight of concept k's patches in image m. It needs sums only, and what a merge does to it is known exactly. α is
    estimated; for every α_k half the log of the number of images is taken off for that, as in BIC.
    """

    def __init__(
        self, sample: Sample, evidence: Evidence, family: str, strength: float, most: int, settings: Settings,
        report: Callable[[Move], object],
    ):  # fmt: skip
        self._sample, self._evidence, self._settings, self._report = sample, evidence, settings, report
        self._family: type[Gaussians] = FAMILIES[family]
        self._most = most
        self._prior = Prior(evidence.within, strength)
        self._white = whitening(evidence.within).to(sample.x.dtype)
        self._whitened = sample.x @ self._white
        self._counted = (sample.weights > 0).nonzero().squeeze(1)
        self._alpha_price = math.log(len(sample.observations)) / 2
        self.moves: list[Move] = []
        self.rejected: list[Move] = []
        self._down: Down | None = None

    def run(self, means: Tensor) -> Partition:
        """From some means to a partition that no move improves."""
        k = len(means)
        dim = means.shape[1]
        alpha = torch.full((k,), max(1.0, 0.1 * k) / k, dtype=torch.float64, device=means.device)
        found = self._assign(Concepts(self._family.seed(means, self._evidence.within, dim), *self._rest(alpha)))
        found = self._settle(found.sums, found.alpha)
        self._note("start", found)
        for _ in range(_ROUNDS):
            better = self._merge(found) or self._split(found) or self._merge_on(found)
            if better is None:
                break
            self._note("merge" if len(better) < len(found) else "split", better)
            found = better
        return found

    def merge_gains(self, found: Partition, known: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Pairs of neighbours (P, 2), and what the bound gains (P,) when the two are one and nothing else changes.

        `known` (K, K): what the mixtures gain by it, NaN where that is not known yet, and which is then filled in.
        """
        pairs = self._neighbours(found)
        if not len(pairs):
            return pairs, pairs.new_zeros(0, dtype=torch.float64)
        if known is None:
            known = found.alpha.new_full((len(found), len(found)), torch.nan)
        a, b = pairs[known[pairs[:, 0], pairs[:, 1]].isnan()].T
        (counts, alpha), alone = (found.counts, found.alpha), _Held.of(found.counts).mixing(found.alpha)
        together = _Held.of(counts[a] + counts[b]).mixing(alpha[a] + alpha[b])
        known[a, b] = together - alone[a] - alone[b]
        a, b = pairs.T
        return pairs, known[a, b] + self._alpha_price + self._evidence.merge_gains(found.sums, pairs)

    def merged(self, found: Partition, pairs: list[tuple[int, int]], gain: float) -> Partition:
        """Without a pass over the patches: sums, counts and α add up."""
        group = torch.arange(len(found))
        for a, b in pairs:
            group[b] = a
        group = torch.unique(group, return_inverse=True)[1].to(found.alpha.device)
        number = len(found) - len(pairs)
        counts = found.counts.new_zeros(number, found.counts.shape[1]).index_add_(0, group, found.counts)
        alpha = found.alpha.new_zeros(number).index_add_(0, group, found.alpha)
        sums = self._evidence.regrouped(found.sums, group, number)
        return Partition(alpha, group[found.owner], counts, sums, found.bound + gain)

    def merges(self, found: Partition) -> Iterator[Partition]:
        """Down to one concept, each time by the merge that costs least, and without a pass over the patches."""
        known = found.alpha.new_full((len(found), len(found)), torch.nan)
        while len(found) > 1:
            pairs, gains = self.merge_gains(found, known)
            gain, best = gains.max(0)
            a, b = pairs[best].tolist()
            found = self.merged(found, [(a, b)], float(gain))
            others = torch.tensor([k for k in range(len(known)) if k != b], device=known.device)
            known = known[others][:, others]
            known[a] = known[:, a] = torch.nan
            yield found

    def down(self, found: Partition) -> Down:
        """What comes of all these merges, remembered for the last partition that was asked about."""
        if self._down is None or self._down.of is not found:
            best, bounds = found, {}
            for fewer in self.merges(found):
                bounds[len(fewer)] = fewer.bound
                best = max(best, fewer, key=lambda partition: partition.bound)
            self._down = Down(found, best, bounds)
        return self._down

    # -- moves --------------------------------------------------------------------------------------------------------

    def _merge(self, found: Partition) -> Partition | None:
        """All pairs that gain by it, then all pairs of what there is then, and so on; failing that, the best pair alone."""
        pairs = first = self._gaining(found)
        after = found
        while pairs:
            after = self.merged(after, pairs, 0.0)
            pairs = self._gaining(after)
        tried = [after] if len(after) < len(found) else []
        if len(after) < len(found) - 1:
            tried.append(self.merged(found, first[:1], 0.0))
        for after in tried:
            after = self._settle(after.sums, after.alpha)
            if after.bound > found.bound:
                return after
        return None

    def _merge_on(self, found: Partition) -> Partition | None:
        """Several merges in a row, of which the first alone gains nothing."""
        best = self.down(found).best
        if best is found:
            return None
        return max(best, self._settle(best.sums, best.alpha), key=lambda partition: partition.bound)

    def _gaining(self, found: Partition) -> list[tuple[int, int]]:
        """Pairs that gain by being one, the best first, none of which share a concept."""
        pairs, gains = self.merge_gains(found)
        best_first = gains.argsort(descending=True)[: int((gains > 0).sum())]
        chosen: list[tuple[int, int]] = []
        taken: set[int] = set()
        for a, b in pairs[best_first].tolist():
            if not {a, b} & taken:
                chosen.append((a, b))
                taken |= {a, b}
        return chosen

    def _split(self, found: Partition) -> Partition | None:
        """All concepts that gain by it; failing that, the better half of them, and so on down to one.

        If none gains at once, the most promising are tried all the same: a few strange patches may find others of their kind.
        """
        splits = self._splits(found)
        gaining = sum(gain > 0 for gain in splits.gains)
        number = min(gaining or 1 + len(found) // _PROMISING, len(splits.gains), self._most - len(found))
        while number > 0:
            after = self._after_splits(found, splits.best(number))
            if after.bound > found.bound:
                return after
            self.rejected.append(Move("split", len(after), after.bound))
            number //= 2
        return None

    def _after_splits(self, found: Partition, splits: Splits) -> Partition:
        weight = splits.parts["weight"].view(-1, 2)
        one, other = (found.alpha[splits.concepts, None] * weight / weight.sum(1, keepdim=True)).T
        alpha = torch.cat([found.alpha, other]).index_copy_(0, splits.concepts, one)
        return self._settle(self._evidence.divided(found.sums, splits.concepts, splits.parts), alpha)

    def _splits(self, found: Partition) -> Splits:
        """The best way to cut each concept of which there are patches enough."""
        by = Grouping(found.owner[self._counted], len(found))
        concept = by.group[by.order]
        place = torch.arange(len(concept), device=concept.device) - by.starts[concept]
        looked_at = place % (by.sizes // _SPLIT_PATCHES).clamp_min(1)[concept] == 0
        looked_at &= by.sizes[concept] >= FEWEST
        rows = self._counted[by.order][looked_at]
        concepts, group = torch.unique_consecutive(concept[looked_at], return_inverse=True)
        number = len(concepts)
        best = torch.full((number,), -torch.inf, dtype=torch.float64, device=rows.device)
        parts: Sums = {}
        if number == 0:
            return Splits([], concepts, parts)
        x, weights = self._sample.x[rows], self._sample.weights[rows]
        scale = found.sums["weight"][concepts] / Grouping(group, number).totals(weights)
        held = weights * scale.to(weights.dtype)[group]
        means = found.means[concepts].repeat_interleave(2, 0).to(x.dtype)
        empty = self._family.seed(means, self._evidence.within, x.shape[1])
        whole = _Held.of(self._counts(group, rows, held, number)).mixing(found.alpha[concepts])
        # As they are, too: what divides every concept alike is hidden where the pooled spread has unit length.
        for white, view in ((True, self._whitened), (False, self._sample.x)):
            for side in halves(view[rows], weights, group, number, white=white):
                two = Grouping(2 * group + ~side, 2 * number)
                sums = self._evidence.held(x, two, held, empty)
                share = sums["weight"].view(-1, 2) / sums["weight"].view(-1, 2).sum(1, keepdim=True)
                alpha = (found.alpha[concepts, None] * share).flatten()
                apart = _Held.of(self._counts(two.group, rows, held, 2 * number)).mixing(alpha).view(-1, 2).sum(1)
                gains = self._evidence.split_gains(found.sums, concepts, sums) + apart - whole - self._alpha_price
                better = (two.sizes.view(-1, 2) > 0).all(1) & (gains > best)
                best = torch.where(better, gains, best)
                for name in self._evidence.by_concept:
                    new = sums[name]
                    which = better.repeat_interleave(2).view(-1, *[1] * (new.ndim - 1))
                    parts[name] = torch.where(which, new, parts.get(name, new))
        best, order = best.sort(descending=True, stable=True)
        order = order[: int((best > -torch.inf).sum())]
        both = torch.stack([2 * order, 2 * order + 1], 1).flatten()
        return Splits(best.tolist()[: len(order)], concepts[order], {name: part[both] for name, part in parts.items()})

    def _neighbours(self, found: Partition) -> Tensor:
        """(P, 2), each pair once."""
        k = len(found)
        means = found.means @ self._white.double()
        distances = torch.cdist(means, means).fill_diagonal_(torch.inf)
        near = distances.topk(min(_NEIGHBOURS, k - 1), largest=False).indices
        pairs = torch.stack([torch.arange(k, device=near.device)[:, None].expand_as(near), near], 2).flatten(0, 1)
        unique: Tensor = torch.unique(pairs.sort(1).values, dim=0)
        return unique

    # -- epochs -------------------------------------------------------------------------------------------------------

    def _settle(self, sums: Sums, alpha: Tensor) -> Partition:
        for _ in range(_EPOCHS + 1):
            seed = self._family.seed(self._means(sums), self._evidence.within, sums["first"].shape[1])
            found = self._assign(Concepts(seed.maximise(sums, self._prior), *self._rest(alpha)))
            sums, alpha = found.sums, found.alpha
        return found

    def _assign(self, concepts: Concepts) -> Partition:
        settings, observations, gaussians = self._settings, self._sample.observations, concepts.gaussians
        k, tokens, dim = len(concepts), observations.n_tokens, observations.dim
        at_once = _AT_ONCE.get(settings.device.type, len(self._sample.x) * k)
        size = min(settings.images_per_batch(tokens, 1, gaussians), max(1, at_once // (tokens * k)))
        reach = furthest_plausible(concepts.alpha, tokens)
        owners = []
        for _, batch in observations.batches(size, settings.device, settings.dtype):
            counted = Weights.of(batch.attention, "exact")
            x = gaussians.features(batch.embeddings.flatten(0, 1), concepts.offset)
            distances = gaussians.contrasts(x, reach).view(-1, tokens, k)
            says = counted.log_likelihood(distances, gaussians.log_det, dim)
            start = uniform_start(len(says), k, tokens, "exact", says.device)
            gamma = infer(
                says, counted, concepts.alpha, start,
                max_sweeps=settings.max_sweeps, tol=settings.sweep_tol, patches=False,
            ).gamma  # fmt: skip
            owners.append(says.add_(expected_log_theta(gamma)[:, None].to(says.dtype)).argmax(2).flatten())
        owner, weights = torch.cat(owners), self._sample.weights
        sums = self._evidence.held(self._sample.x, Grouping(owner, k), weights, gaussians)
        counts = self._counts(owner, torch.arange(len(owner), device=owner.device), weights, k)
        held, total = _Held.of(counts), counts.sum(0)
        alpha = held.fit_alpha(concepts.alpha, total, settings.smallest_alpha)
        bound = self._evidence.total(sums) + held.mixing(alpha).sum()
        bound = bound - (torch.lgamma(total + alpha.sum()) - torch.lgamma(alpha.sum())).sum()
        return Partition(alpha, owner, counts, sums, float(bound) - k * self._alpha_price)

    def _counts(self, group: Tensor, rows: Tensor, weights: Tensor, number: int) -> Tensor:
        """(number, M): weight of each group's patches, which are these rows of the sample, in an image."""
        observations = self._sample.observations
        # In whatever order they are added: float64 adds up a few float32 without rounding.
        counts = torch.zeros(number * len(observations), dtype=torch.float64, device=rows.device)
        counts.index_add_(0, group * len(observations) + rows // observations.n_tokens, weights.double())
        return counts.view(number, -1)

    def _means(self, sums: Sums) -> Tensor:
        return (sums["first"] / sums["weight"].clamp_min(1e-300)[:, None]).to(self._settings.dtype).contiguous()

    def _rest(self, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What concepts have beside their Gaussians; predictions and pairs have no part in the search."""
        return self._sample.offset, alpha, alpha.new_zeros(len(alpha), 0), torch.ones_like(alpha)

    def _note(self, kind: str, found: Partition) -> None:
        self.moves.append(Move(kind, len(found), found.bound))
        self._report(self.moves[-1])


class _Held(NamedTuple):
    """What concepts hold of images, where it is not nothing, which is nearly everywhere."""

    weight: Tensor  # (n,)
    concept: Tensor  # (n,) ascending
    starts: Tensor  # (K + 1,)

    @classmethod
    def of(cls, counts: Tensor) -> _Held:
        concept, image = counts.nonzero().T.contiguous()
        starts = torch.searchsorted(concept, torch.arange(len(counts) + 1, device=counts.device))
        return cls(counts[concept, image], concept, starts)

    def mixing(self, alpha: Tensor) -> Tensor:
        """What each concept adds to Σ_m log ∫ Π_k θ_mk^c_mk Dirichlet(θ_m | α) dθ_m, but for the images' totals (K,)."""
        change = torch.lgamma(self.weight + alpha[self.concept]) - torch.lgamma(alpha)[self.concept]
        return segment_sums(change, self.starts)

    def fit_alpha(self, alpha: Tensor, total: Tensor, smallest: float) -> Tensor:
        """Minka's fixed point, every step of which raises the bound; `total` (M,) of every image."""
        for _ in range(_ALPHA_STEPS):
            up = torch.digamma(self.weight + alpha[self.concept]) - torch.digamma(alpha)[self.concept]
            down = (torch.digamma(total + alpha.sum()) - torch.digamma(alpha.sum())).sum()
            alpha = (alpha * segment_sums(up, self.starts) / down).clamp_min(smallest)
        return alpha
