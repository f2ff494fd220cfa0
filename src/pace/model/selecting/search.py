"""How many concepts: merges, splits and births of concepts, each kept only if the bound rises."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from pace.model.gaussians import Prior, TiedGaussians
from pace.model.gaussians.family import precision_cholesky
from pace.model.inference import Weights, infer, uniform_start
from pace.model.selecting.evidence import Clusters
from pace.model.selecting.grouping import Grouping, halves, segment_sums, summed
from pace.model.selecting.sketching import Sample, Sketch, sketch
from pace.model.settings import Settings
from pace.observations import Observations

Report = Callable[[int, float], object]  # told the number of concepts and the bound

_CELLS = 100  # of patches at first; the result hardly depends on it
_NEIGHBOURS = 4  # of every concept, that it may merge with
_EPOCHS = 3  # after a move, before it is judged
_ROUNDS = 30
_ALPHA_STEPS = 20
_PROMISING = 10  # one concept in so many is split even if no split gains at once
_SPLIT_PATCHES = 2000  # of a concept, from which its halves are found
_FEWEST = 4  # patches that could be two concepts
_ENTRIES_AT_ONCE = 1 << 19  # of φ, that stay in a CPU's cache; a GPU takes all images together


@dataclass(frozen=True)
class Selection:
    """The concepts that were found, those with most evidence first, and the bound with other numbers of concepts.

    Bounds are in nats, of all the images that were looked at.
    """

    means: Tensor  # (K, d)
    evidence: Tensor  # (K,) what the bound loses when a concept merges with the neighbour that fits it best
    numbers: Tensor  # (P,) numbers of concepts that were tried, among them all below the one found
    bounds: Tensor  # (P,) the best bound with each
    images: int  # that were looked at

    @property
    def n_concepts(self) -> int:
        return len(self.means)

    def tensors(self) -> dict[str, Tensor]:
        """For files."""
        return vars(self) | {"images": torch.tensor(self.images)}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Selection:
        return cls(**tensors | {"images": int(tensors["images"])})  # type: ignore[arg-type]

    def __str__(self) -> str:
        near = (self.numbers - self.n_concepts).abs() <= 3
        below = self.bounds.max() - self.bounds
        rows = [
            f"{self.n_concepts} concept{'' if self.n_concepts == 1 else 's'}, from {self.images} images",
            "concepts  bound below the best",
            *(f"{n:8}  {b:20.1f}" for n, b in zip(self.numbers[near].tolist(), below[near].tolist(), strict=True)),
        ]
        if self.n_concepts > 1:  # a single one has no neighbour to be compared with
            weakest = ", ".join(f"{value:.0f}" for value in self.evidence.flip(0)[:5].tolist())
            rows.append(f"evidence of the weakest concepts, nats: {weakest}")
        return "\n".join(rows)


def select(
    observations: Observations,
    settings: Settings,
    *,
    most: int = 300,
    start: int = _CELLS,
    seed: int = 0,
    report: Report = lambda number, bound: None,
) -> Selection:
    """How many concepts a sample of the images holds, and where they are: `most` at most.

    All concepts are counted as if they shared one covariance, whatever family the fit uses. `report` is called after every
    move.
    """
    rng = np.random.default_rng(seed)
    sample = Sample.draw(observations, settings, rng)
    search = Search(sketch(sample, start, most, rng), most, settings, report)
    found = search.run()
    pairs, gains = search.merge_gains(found)
    lost = found.alpha.new_full((len(found),), torch.inf)
    for concepts in pairs.T:
        lost = lost.scatter_reduce(0, concepts, -gains, "amin")
    evidence, order = lost.sort(descending=True, stable=True)
    numbers, bounds = zip(*sorted(search.bounds.items()), strict=True)
    return Selection(
        means=(found.clusters.means + sample.offset.double())[order].to("cpu", settings.dtype),
        evidence=evidence.cpu(),
        numbers=torch.tensor(numbers),
        bounds=torch.tensor(bounds, dtype=torch.float64),
        images=len(sample.observations),
    )


def first_guess(observations: Observations, settings: Settings, most: int, seed: int = 0) -> Tensor:
    """Means (K, d) of the sketch that a search with at most `most` concepts starts from; much quicker than the search."""
    rng = np.random.default_rng(seed)
    sample = Sample.draw(observations, settings, rng)
    return sketch(sample, most, most, rng).means + sample.offset


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


class Search:
    """Looks for the number of concepts with the best bound.

    The bound is that of the model with each patch given to one concept, and θ_m, μ_k and Σ integrated out:

        Σ_m log ∫ Π_k θ_mk^c_mk Dirichlet(θ_m | α) dθ_m  +  the evidence of the patches given who holds them

    c_mk: weight of concept k's patches in image m. It needs sums only, so the effect of a merge is known exactly. α is
    estimated; as in BIC, every α_k costs half the log of the number of images.
    """

    def __init__(self, drawn: Sketch, most: int, settings: Settings, report: Report = lambda number, bound: None):
        self._sample, self._spread = drawn.sample, drawn.spread
        self._most, self._settings, self._report = most, settings, report
        self._means = drawn.means
        self._prior = Prior(drawn.within, drawn.means.shape[1] / len(drawn.means))
        self._white = precision_cholesky(drawn.within).to(drawn.means.dtype)
        self._counted = (self._sample.weights > 0).nonzero().squeeze(1)
        self._alpha_price = math.log(len(self._sample.observations)) / 2
        self.bounds: dict[int, float] = {}  # the best with each number of concepts

    def run(self) -> Partition:
        """From the sketch to a partition that no move improves."""
        k = len(self._means)
        alpha = torch.full((k,), max(1.0, 0.1 * k) / k, dtype=torch.float64, device=self._means.device)
        start = self._assign(TiedGaussians(self._means, self._white), alpha)
        found = self._settle(start.clusters, start.alpha)
        for _ in range(_ROUNDS):
            self._record(found)
            self._report(len(found), found.bound)
            better = self._merge(found) or self._split(found) or self._merge_to_one(found)
            if better is None:
                return found
            found = better
        self._record(found)
        self._merge_to_one(found)  # for the bounds of smaller numbers
        return found

    def merge_gains(self, found: Partition) -> tuple[Tensor, Tensor]:
        """Pairs of neighbours (P, 2), and what the bound gains (P,) when the two become one and nothing else changes."""
        means = found.clusters.means @ self._white.double()
        distances = torch.cdist(means, means).fill_diagonal_(torch.inf)
        near = distances.topk(min(_NEIGHBOURS, len(found) - 1), largest=False).indices
        own = torch.arange(len(found), device=near.device)[:, None].expand_as(near)
        pairs = torch.unique(torch.stack([own, near], 2).flatten(0, 1).sort(1).values, dim=0)  # each once
        a, b = pairs.T
        alone = mixing(found.counts, found.alpha)
        together = mixing(found.counts[a] + found.counts[b], found.alpha[a] + found.alpha[b])
        return pairs, together - alone[a] - alone[b] + self._alpha_price + found.clusters.merge_gains(pairs)

    # -- moves --------------------------------------------------------------------------------------------------------

    def merged(self, found: Partition, pairs: list[tuple[int, int]], gain: float = 0.0) -> Partition:
        """Without a pass over the patches: sums, counts and α add up."""
        group = torch.arange(len(found))
        for a, b in pairs:
            group[b] = a
        group = torch.unique(group, return_inverse=True)[1].to(found.alpha.device)
        number = len(found) - len(pairs)
        alpha, counts = summed(found.alpha, group, number), summed(found.counts, group, number)
        return Partition(alpha, group[found.owner], counts, found.clusters.regrouped(group), found.bound + gain)

    def _merge(self, found: Partition) -> Partition | None:
        """All pairs that gain, then all pairs of the result that gain, and so on; failing that, the best pair alone."""
        pairs = first = self._gaining(found)
        after = found
        while pairs:
            after = self.merged(after, pairs)
            pairs = self._gaining(after)
        tried = [after] if first else []
        if len(after) < len(found) - 1:
            tried.append(self.merged(found, first[:1]))
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

    def _merge_to_one(self, found: Partition) -> Partition | None:
        """Merge the cheapest pair until one is left: several merges in a row may gain where the first alone does not."""
        best = after = found
        while len(after) > 1:
            pairs, gains = self.merge_gains(after)
            gain, cheapest = gains.max(0)
            after = self.merged(after, [tuple(pairs[cheapest].tolist())], float(gain))
            self._record(after)
            best = max(best, after, key=attrgetter("bound"))
        return None if best is found else max(best, self._settle(best.clusters, best.alpha), key=attrgetter("bound"))

    def _split(self, found: Partition) -> Partition | None:
        """All concepts that gain by it; failing that, the better half of them, and so on down to one.

        If none gains at once the most promising are tried all the same: a few odd patches may find others of their kind.
        """
        gains, concepts, parts = self._splits(found)
        gaining = int((gains > 0).sum())
        number = min(gaining or 1 + len(found) // _PROMISING, len(gains), self._most - len(found))
        while number > 0:
            concepts, parts = concepts[:number], parts[: 2 * number]
            alpha = _divided(found.alpha, concepts, _shared(found.alpha[concepts], parts))
            weight = _divided(found.clusters.weight, concepts, parts.weight)
            first = _divided(found.clusters.first, concepts, parts.first)
            after = self._settle(Clusters(weight, first, self._spread), alpha)
            if after.bound > found.bound:
                return after
            self._record(after)
            number //= 2
        return None

    def _splits(self, found: Partition) -> tuple[Tensor, Tensor, Clusters]:
        """The best way to cut each concept that has enough patches, the best first: gain (P,), concept (P,) and halves.

        The halves of concept p are clusters 2p and 2p + 1.
        """
        owners = Grouping(found.owner[self._counted], len(found))
        concept = owners.group[owners.order]
        place = torch.arange(len(concept), device=concept.device) - owners.starts[concept]
        looked_at = place % (owners.sizes // _SPLIT_PATCHES).clamp_min(1)[concept] == 0
        looked_at &= owners.sizes[concept] >= _FEWEST
        rows = self._counted[owners.order][looked_at]
        concepts, group = torch.unique_consecutive(concept[looked_at], return_inverse=True)
        number = len(concepts)
        gains = torch.full((number,), -torch.inf, dtype=torch.float64, device=rows.device)
        weight, first = gains.new_zeros(2 * number), gains.new_zeros(2 * number, self._means.shape[1])
        if number == 0:
            return gains, concepts, Clusters(weight, first, self._spread)
        x, by, weights = self._sample.x[rows], Grouping(group, number), self._sample.weights[rows]
        held = weights * (found.clusters.weight[concepts] / by.totals(weights)).to(weights.dtype)[group]
        whole = mixing(self._counts(group, rows, held, number), found.alpha[concepts])
        # Both whitened and as they are: what divides every concept alike is hidden where the pooled spread has unit length.
        for side in [*halves(x @ self._white, weights, by, white=True), *halves(x, weights, by)]:
            two = Grouping(2 * group + ~side, 2 * number)
            parts = Clusters.of(x, held, two, self._spread)
            counts = self._counts(two.group, rows, held, 2 * number)
            apart = mixing(counts, _shared(found.alpha[concepts], parts)).view(-1, 2).sum(1)
            gain = found.clusters.split_gains(concepts, parts) + apart - whole - self._alpha_price
            better = (two.sizes.view(-1, 2) > 0).all(1) & (gain > gains)
            gains = torch.where(better, gain, gains)
            which = better.repeat_interleave(2)
            weight, first = torch.where(which, parts.weight, weight), torch.where(which[:, None], parts.first, first)
        gains, order = gains.sort(descending=True, stable=True)
        order = order[gains > -torch.inf]
        both = torch.stack([2 * order, 2 * order + 1], 1).flatten()
        return gains[: len(order)], concepts[order], Clusters(weight, first, self._spread)[both]

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
        k, tokens = len(alpha), observations.n_tokens
        at_once = _ENTRIES_AT_ONCE if settings.device.type == "cpu" else len(self._sample.x) * k
        size = min(settings.images_per_batch(tokens, 1, gaussians), max(1, at_once // (tokens * k)))
        owners = []
        for _, batch in observations.batches(size, settings.device, settings.dtype):
            weights = Weights.of(batch.attention, "exact")
            x = gaussians.features(batch.embeddings.flatten(0, 1), self._sample.offset)
            distances = gaussians.mahalanobis(x, relative=True).view(-1, tokens, k)
            likelihood = weights.log_likelihood(distances, gaussians.log_det, observations.dim)
            start = uniform_start(len(likelihood), k, tokens, "exact", likelihood.device)
            settled = infer(
                likelihood, weights, alpha, start,
                max_sweeps=settings.max_sweeps, tol=settings.sweep_tol, patches=False,
            )  # fmt: skip
            # φ that goes with this γ.
            last = infer(likelihood, weights, alpha, (settled.counts, start[1]), max_sweeps=1)
            owners.append(last.phi.argmax(2).flatten())
        owner, weight = torch.cat(owners), self._sample.weights
        clusters = Clusters.of(self._sample.x, weight, Grouping(owner, k), self._spread)
        counts = self._counts(owner, torch.arange(len(owner), device=owner.device), weight, k)
        alpha, total = _fitted(alpha, counts, settings.smallest_alpha), counts.sum(0)
        bound = clusters.evidence() + mixing(counts, alpha).sum()
        bound = bound - (torch.lgamma(total + alpha.sum()) - torch.lgamma(alpha.sum())).sum()
        return Partition(alpha, owner, counts, clusters, float(bound) - k * self._alpha_price)

    def _counts(self, group: Tensor, rows: Tensor, weights: Tensor, number: int) -> Tensor:
        """(number, M): weight of each group's patches, which are these rows of the sample, in an image."""
        images, tokens = self._sample.observations.shape[:2]
        # The order does not matter: float64 adds up a few float32 without rounding.
        return summed(weights.double(), group * images + rows // tokens, number * images).view(number, images)

    def _record(self, found: Partition) -> None:
        self.bounds[len(found)] = max(found.bound, self.bounds.get(len(found), -math.inf))


def _shared(alpha: Tensor, parts: Clusters) -> Tensor:
    """α (P,) shared between the two halves of each concept by their weights (2P,)."""
    weight = parts.weight.view(-1, 2)
    return (alpha[:, None] * (weight / weight.sum(1, keepdim=True))).flatten()


def _divided(rows: Tensor, concepts: Tensor, both: Tensor) -> Tensor:
    """Each of these concepts' rows is replaced by rows 2p and 2p + 1 of `both`: one in its place, one at the end."""
    return torch.cat([rows, both[1::2]]).index_copy_(0, concepts, both[::2])


def _filled(counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The entries of (K, M) that are not zero, which few are, their concepts, and where each concept's start (K + 1,)."""
    concept, image = counts.nonzero().T.contiguous()
    starts = torch.searchsorted(concept, torch.arange(len(counts) + 1, device=counts.device))
    return counts[concept, image], concept, starts


def mixing(counts: Tensor, alpha: Tensor) -> Tensor:
    """What each concept adds to Σ_m log ∫ Π_k θ_mk^c_mk Dirichlet(θ_m | α) dθ_m, images' totals aside (K,)."""
    weight, concept, starts = _filled(counts)
    return segment_sums(torch.lgamma(weight + alpha[concept]) - torch.lgamma(alpha)[concept], starts)


def _fitted(alpha: Tensor, counts: Tensor, smallest: float) -> Tensor:
    """Minka's fixed point, every step of which raises the bound."""
    (weight, concept, starts), total = _filled(counts), counts.sum(0)
    for _ in range(_ALPHA_STEPS):
        up = torch.digamma(weight + alpha[concept]) - torch.digamma(alpha)[concept]
        down = (torch.digamma(total + alpha.sum()) - torch.digamma(alpha.sum())).sum()
        alpha = (alpha * segment_sums(up, starts) / down).clamp_min(smallest)
    return alpha
