"""Merges, splits and births, each kept only if the bound rises."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pace.model.gaussians import FAMILIES, Gaussians, Prior, Sums
from pace.model.learning import Concepts, Settings, explain_batch
from pace.model.selecting.evidence import Evidence, whitening
from pace.model.selecting.sampling import Sample

_NEIGHBOURS = 4  # of every concept, with which it could be one
_EPOCHS = 2  # after a move, before it is judged
_ROUNDS = 30
_ALPHA_STEPS = 20
_POWER_STEPS = 10  # towards the principal axis
_PROMISING = 10  # one concept in so many
_SPLIT_PATCHES = 2000  # of a concept, from which its halves are found
_FEWEST = 4  # patches that could be two concepts
_ODD = 4.5  # median deviations beyond which a patch is badly explained


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
    counts: Tensor  # (M, K) weight of a concept's patches in an image
    sums: Sums  # blurred
    bound: float

    def __len__(self) -> int:
        return len(self.alpha)

    @property
    def means(self) -> Tensor:
        return self.sums["first"] / self.sums["weight"].clamp_min(1e-300)[:, None]


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
        self._alpha_price = math.log(len(sample.observations)) / 2
        self.moves: list[Move] = []
        self.rejected: list[Move] = []

    def run(self, means: Tensor) -> Partition:
        """From some means to a partition that no move improves."""
        k = len(means)
        dim = means.shape[1]
        alpha = torch.full((k,), max(1.0, 0.1 * k) / k, dtype=torch.float64, device=means.device)
        found = self._assign(Concepts(self._family.seed(means, self._evidence.within, dim), *self._rest(alpha)))
        found = self._settle(found.sums, found.alpha)
        self._note("start", found)
        for _ in range(_ROUNDS):
            better = self._merge(found) or self._split(found)
            if better is None:
                break
            self._note("merge" if len(better) < len(found) else "split", better)
            found = better
        return found

    def merge_gains(self, found: Partition) -> tuple[Tensor, Tensor]:
        """Pairs of neighbours (P, 2), and what the bound gains (P,) when the two are one and nothing else changes."""
        pairs = self._neighbours(found)
        if not len(pairs):
            return pairs, pairs.new_zeros(0, dtype=torch.float64)
        (a, b), counts, alpha = pairs.T, found.counts, found.alpha
        apart = _mixing(counts, alpha).sum(0)
        mixing = _mixing(counts[:, a] + counts[:, b], alpha[a] + alpha[b]).sum(0) - apart[a] - apart[b]
        return pairs, mixing + self._alpha_price + self._evidence.merge_gains(found.sums, pairs)

    def merged(self, found: Partition, pairs: list[tuple[int, int]], gain: float) -> Partition:
        """Without a pass over the patches: sums, counts and α add up."""
        group = torch.arange(len(found), device=found.alpha.device)
        for a, b in pairs:
            group[b] = a
        _, group = torch.unique(group, return_inverse=True)
        number = len(found) - len(pairs)
        counts = found.counts.new_zeros(len(found.counts), number).index_add_(1, group, found.counts)
        alpha = found.alpha.new_zeros(number).index_add_(0, group, found.alpha)
        sums = self._evidence.regrouped(found.sums, group, number)
        return Partition(alpha, group[found.owner], counts, sums, found.bound + gain)

    # -- moves --------------------------------------------------------------------------------------------------------

    def _merge(self, found: Partition) -> Partition | None:
        """All pairs that gain by it, none of which share a concept; failing that, the best of them."""
        pairs, gains = self.merge_gains(found)
        chosen: list[tuple[int, int]] = []
        for index in gains.argsort(descending=True).tolist():
            a, b = pairs[index].tolist()
            if gains[index] > 0 and not {a, b} & {concept for pair in chosen for concept in pair}:
                chosen.append((a, b))
        for pairs_tried in (chosen, chosen[:1]):
            if pairs_tried:
                after = self.merged(found, pairs_tried, 0.0)
                after = self._settle(after.sums, after.alpha)
                if after.bound > found.bound:
                    return after
        return None

    def _split(self, found: Partition) -> Partition | None:
        """All concepts that gain by it; failing that, the better half of them, and so on down to one.

        If none gains at once, the most promising are tried all the same: a few strange patches may find others of their kind.
        """
        proposals = self._split_proposals(found)
        gaining = sum(gain > 0 for gain, *_ in proposals)
        proposals = proposals[: min(gaining or 1 + len(found) // _PROMISING, self._most - len(found))]
        while proposals:
            after = self._after_splits(found, proposals)
            if after.bound > found.bound:
                return after
            self.rejected.append(Move("split", len(after), after.bound))
            proposals = proposals[: len(proposals) // 2]
        return None

    def _after_splits(self, found: Partition, proposals: list[tuple[float, int, Sums]]) -> Partition:
        sums, alpha = found.sums, found.alpha
        for _, concept, parts in proposals:
            sums = self._evidence.divided(sums, concept, parts)
            share = parts["weight"] / parts["weight"].sum()
            alpha = torch.cat([alpha, alpha[concept, None] * share[1]])
            alpha[concept] *= share[0]
        return self._settle(sums, alpha)

    def _split_proposals(self, found: Partition) -> list[tuple[float, int, Sums]]:
        """(gain, concept, sums of its two parts), the best first."""
        tokens, m = self._sample.observations.n_tokens, len(found.counts)
        empty = self._family.seed(self._sample.x[:2] * 0, self._evidence.within, self._sample.x.shape[1])
        ways: dict[int, list[Sums]] = {}
        mixing: dict[int, list[float]] = {}
        for concept in range(len(found)):
            rows = ((found.owner == concept) & (self._sample.weights > 0)).nonzero().squeeze(1)
            rows = rows[:: max(1, len(rows) // _SPLIT_PATCHES)]
            if len(rows) < _FEWEST:
                continue
            x, weights = self._sample.x[rows], self._sample.weights[rows]
            scale = found.sums["weight"][concept] / weights.sum()
            ways[concept], mixing[concept] = [], []
            # As they are, too: what divides every concept alike is hidden where the pooled spread has unit length.
            for side in (*_sides(x @ self._white, weights), *_sides(x, weights)):
                held = scale * torch.stack([weights * side, weights * ~side], 1)
                parts = self._evidence.halves(x, held, empty)
                counts = scale.new_zeros(m, 2).index_add_(0, rows // tokens, held.double())
                alpha = found.alpha[concept] * parts["weight"] / parts["weight"].sum()
                change = _mixing(counts, alpha).sum() - _mixing(counts.sum(1), alpha.sum()).sum()
                ways[concept].append(parts)
                mixing[concept].append(float(change))
        proposals = []
        for concept, gains in self._evidence.split_gains(found.sums, ways).items():
            scored = [(gain + mixing[concept][i] - self._alpha_price, i) for i, gain in enumerate(gains)]
            if scored:
                gain, best = max(scored)
                proposals.append((gain, concept, ways[concept][best]))
        return sorted(proposals, key=lambda proposal: -proposal[0])

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
        k = len(concepts)
        moments, owners, counts = gaussians.empty_sums(), [], []
        size = settings.images_per_batch(observations.n_tokens, 1, gaussians)
        weights = self._sample.weights.view(-1, observations.n_tokens, 1)
        for part, batch in observations.batches(size, settings.device, settings.dtype):
            phi = explain_batch(batch, concepts, settings).phi
            owner = phi.argmax(2)
            held = torch.zeros_like(phi).scatter_(2, owner[:, :, None], weights[part])
            owners.append(owner.flatten())
            counts.append(held.sum(1, dtype=torch.float64))
            features = gaussians.features(batch.embeddings.flatten(0, 1), concepts.offset)
            gaussians.accumulate(features, held.view(-1, k), moments)
        sums, held_by_image = self._evidence.blurred(moments), torch.cat(counts)
        alpha = _fit_alpha(concepts.alpha, held_by_image, settings.smallest_alpha)
        bound = self._evidence.total(sums) + float(_mixing(held_by_image, alpha).sum())
        total = held_by_image.sum(1)
        bound -= float((torch.lgamma(total + alpha.sum()) - torch.lgamma(alpha.sum())).sum()) + k * self._alpha_price
        return Partition(alpha, torch.cat(owners), held_by_image, sums, bound)

    def _means(self, sums: Sums) -> Tensor:
        return (sums["first"] / sums["weight"].clamp_min(1e-300)[:, None]).to(self._settings.dtype).contiguous()

    def _rest(self, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What concepts have beside their Gaussians; predictions and pairs have no part in the search."""
        return self._sample.offset, alpha, alpha.new_zeros(len(alpha), 0), torch.ones_like(alpha)

    def _note(self, kind: str, found: Partition) -> None:
        self.moves.append(Move(kind, len(found), found.bound))
        self._report(self.moves[-1])


def _mixing(counts: Tensor, alpha: Tensor) -> Tensor:
    """What each image and concept adds to Σ_m log ∫ Π_k θ_mk^c_mk Dirichlet(θ_m | α) dθ_m, but for the images' totals."""
    return torch.lgamma(counts + alpha) - torch.lgamma(alpha)


def _fit_alpha(alpha: Tensor, counts: Tensor, smallest: float) -> Tensor:
    """Minka's fixed point for counts (M, K), every step of which raises the bound."""
    total = counts.sum(1)
    for _ in range(_ALPHA_STEPS):
        up = (torch.digamma(counts + alpha) - torch.digamma(alpha)).sum(0)
        down = (torch.digamma(total + alpha.sum()) - torch.digamma(alpha.sum())).sum()
        alpha = (alpha * up / down).clamp_min(smallest)
    return alpha


def _sides(x: Tensor, weights: Tensor) -> list[Tensor]:
    """Ways to cut patches (n, d) in two: boolean (n,).

    Two means started along the principal axis (a split), from the farthest patch, and from the mean of all badly explained
    patches (births: a small concept within a large one hardly turns its axis).
    """
    x = x - torch.mv(x.T, weights) / weights.sum()
    radius = x.square().sum(1)
    middle = radius.median()
    odd = radius >= torch.minimum(middle + _ODD * (radius - middle).abs().median(), radius.max())
    strange = torch.mv(x[odd].T, weights[odd]) / weights[odd].sum()
    axis = x[radius.argmax()]
    for _ in range(_POWER_STEPS):
        axis = torch.nn.functional.normalize(torch.mv(x.T, weights * torch.mv(x, axis)), dim=0)
    starts = [x @ axis > 0, (x - x[radius.argmax()]).square().sum(1) < radius, (x - strange).square().sum(1) < radius]
    sides = []
    for side in starts:
        for _ in range(5):
            if side.all() or not side.any():
                break
            one, other = (torch.mv(x[s].T, weights[s]) / weights[s].sum() for s in (side, ~side))
            side = (x - one).square().sum(1) < (x - other).square().sum(1)
        if side.any() and not side.all():
            sides.append(side)
    return sides
