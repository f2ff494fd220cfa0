"""How many concepts: the answer, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pace.model.selecting.evidence import EVIDENCE
from pace.model.selecting.sampling import Sample
from pace.model.selecting.search import Move, Partition, Search
from pace.model.selecting.sketching import sketch
from pace.model.settings import Settings
from pace.observations import Observations

_KINDS = ("start", "merge", "split")


@dataclass(frozen=True)
class Selection:
    """The concepts that were found, those with most evidence first, and the bound at other numbers of them.

    All bounds are in nats, of the images that were looked at, each of which counts as `worth` patches.
    """

    means: Tensor  # (K, d)
    evidence: Tensor  # (K,) what the bound loses when a concept becomes one with the neighbour that fits it best
    numbers: Tensor  # (P,) numbers of concepts that were tried, among them all below the one that was found
    bounds: Tensor  # (P,) the best bound found with so many
    moves: tuple[Move, ...]  # how it was found
    images: int  # that were looked at
    worth: float = math.nan  # as how many independent patches an image counts; not known in older files

    @property
    def n_concepts(self) -> int:
        return len(self.means)

    @property
    def posterior(self) -> Tensor:
        """How likely each of `numbers` is, if all are alike before and the bounds are the evidence itself.

        They lie below it and assume Gaussian patches, independent but for what `worth` takes off: on real embeddings this is
        far too sure of itself.
        """
        return self.bounds.softmax(0)

    def tensors(self) -> dict[str, Tensor]:
        """Flat, for files."""
        steps = [[_KINDS.index(move.kind), move.number, move.bound] for move in self.moves]
        return {
            "means": self.means,
            "evidence": self.evidence,
            "numbers": self.numbers,
            "bounds": self.bounds,
            "moves": torch.tensor(steps, dtype=torch.float64),
            "images": torch.tensor(self.images),
            "worth": torch.tensor(self.worth, dtype=torch.float64),
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Selection:
        moves = tuple(Move(_KINDS[int(kind)], int(number), bound) for kind, number, bound in tensors["moves"].tolist())
        names = ("means", "evidence", "numbers", "bounds")
        worth = float(tensors["worth"]) if "worth" in tensors else math.nan
        return cls(**{name: tensors[name] for name in names}, moves=moves, images=int(tensors["images"]), worth=worth)

    def __str__(self) -> str:
        best = self.bounds.max()
        near = (self.numbers - self.n_concepts).abs() <= 3
        many = "" if self.n_concepts == 1 else "s"
        rows = [
            f"{self.n_concepts} concept{many}, from {self.images} images",
            "concepts  bound below the best  probability",
        ]
        for number, bound, chance in zip(self.numbers[near], self.bounds[near], self.posterior[near], strict=True):
            rows.append(f"{int(number):8}  {float(best - bound):20.1f}  {float(chance):11.3f}")
        if self.n_concepts > 1:  # a single one has no neighbour to be compared with
            weakest = ", ".join(f"{value:.0f}" for value in self.evidence.flip(0)[:5].tolist())
            rows.append(f"evidence of the weakest concepts, nats: {weakest}")
        return "\n".join(rows)


def select(
    observations: Observations,
    settings: Settings,
    *,
    covariance: str = "tied",
    strength: float = 1.0,
    start: int = 100,
    most: int = 300,
    blur: float = 0.25,
    seed: int = 0,
    report: Callable[[Move], object] = lambda move: None,
) -> Selection:
    """How many concepts a sample of the images holds, and where they are.

    Parameters
    ----------
    settings
        How to infer; the exact rules.
    covariance
        Of a concept. "low_rank" is counted as "tied".
    strength
        Pseudo-patches with the pooled covariance in every Σ_k; with "tied", in Σ.
    start
        Cells of patches at first. The result hardly depends on it.
    most
        Concepts at most. If so many are found, the data would have more.
    blur
        Patches are known up to this share of the covariance of all patches: differences that are small beside it make no
        concepts, however many patches show them.
    report
        Called after every move.
    """
    if settings.updates != "exact":
        raise ValueError(f"n_concepts='auto' needs updates='exact'; found {settings.updates!r}")
    if min(start, most) < 1 or not 0 <= blur < 1:
        raise ValueError(f"expected start, most ≥ 1 and 0 ≤ blur < 1; found start={start}, most={most}, blur={blur}")
    rng = np.random.default_rng(seed)
    sample = Sample.draw(observations, settings, rng)
    kind, family = EVIDENCE[covariance]
    try:
        drawn = sketch(sample, start, most, blur, rng)
        evidence = kind(drawn.spread, blur, drawn.within)
        strength = strength / len(drawn.means) if family == "tied" else strength
        search = Search(drawn.sample, evidence, family, strength, most, settings, report)
        found = search.run(drawn.means)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise ValueError(
            f"{len(sample.x)} patches of {sample.x.shape[1]} dimensions do not tell how many concepts there are with "
            f"covariance={covariance!r}; look at more images, or set n_concepts by hand"
        ) from error
    losses, order = _evidence_of(search, found).sort(descending=True, stable=True)
    curve = _curve(search, found)
    return Selection(
        means=(found.means + sample.offset.double())[order].to("cpu", settings.dtype),
        evidence=losses.cpu(),
        numbers=torch.tensor(sorted(curve)),
        bounds=torch.tensor([curve[number] for number in sorted(curve)], dtype=torch.float64),
        moves=tuple(search.moves),
        images=len(sample.observations),
        worth=float(drawn.sample.weights.sum()) / len(sample.observations),
    )


def first_guess(observations: Observations, settings: Settings, most: int, seed: int = 0, blur: float = 0.25) -> Tensor:
    """Means (K, d) of a sketch of the patches, `most` at most. The search goes on from such a sketch, and takes long."""
    rng = np.random.default_rng(seed)
    sample = Sample.draw(observations, settings, rng)
    return sketch(sample, most, most, blur, rng).means + sample.offset


def _evidence_of(search: Search, found: Partition) -> Tensor:
    pairs, gains = search.merge_gains(found)
    lost = torch.full((len(found),), torch.inf, dtype=torch.float64, device=found.alpha.device)
    for concepts in pairs.T:
        lost = lost.scatter_reduce(0, concepts, -gains, "amin")
    return lost


def _curve(search: Search, found: Partition) -> dict[int, float]:
    """The bound against the number: after every move, kept or not, and after merges of what was found down to one."""
    curve: dict[int, float] = {}

    def add(number: int, bound: float) -> None:
        curve[number] = max(bound, curve.get(number, -np.inf))

    for move in (*search.moves, *search.rejected):
        add(move.number, move.bound)
    for number, bound in search.down(found).bounds.items():
        add(number, bound)
    return curve
