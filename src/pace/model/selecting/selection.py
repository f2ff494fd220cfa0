"""How many concepts: the search and its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pace.model.selecting.sampling import Sample
from pace.model.selecting.search import Move, Partition, Search
from pace.model.selecting.sketching import sketch
from pace.model.settings import Settings
from pace.observations import Observations

_BLUR = 0.25  # patches are known up to this share of their covariance; smaller differences make no concepts
_CELLS = 100  # of patches at first; the result hardly depends on it


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
    blur: float = _BLUR,
    seed: int = 0,
    report: Callable[[Move], object] = lambda move: None,
) -> Selection:
    """How many concepts a sample of the images holds, and where they are: `most` at most.

    All concepts are counted as if they shared one covariance, whatever family the fit uses. `report` is called after every
    move.
    """
    rng = np.random.default_rng(seed)
    sample = Sample.draw(observations, settings, rng)
    search = Search(sketch(sample, start, most, blur, rng), blur, most, settings, report)
    found = search.run()
    evidence, order = _evidence_of(search, found).sort(descending=True, stable=True)
    numbers = sorted(search.bounds)
    return Selection(
        means=(found.clusters.means + sample.offset.double())[order].to("cpu", settings.dtype),
        evidence=evidence.cpu(),
        numbers=torch.tensor(numbers),
        bounds=torch.tensor([search.bounds[number] for number in numbers], dtype=torch.float64),
        images=len(sample.observations),
    )


def first_guess(observations: Observations, settings: Settings, most: int, seed: int = 0) -> Tensor:
    """Means (K, d) of the sketch that a search with at most `most` concepts starts from; much quicker than the search."""
    rng = np.random.default_rng(seed)
    sample = Sample.draw(observations, settings, rng)
    return sketch(sample, most, most, _BLUR, rng).means + sample.offset


def _evidence_of(search: Search, found: Partition) -> Tensor:
    pairs, gains = search.merge_gains(found)
    lost = torch.full((len(found),), torch.inf, dtype=torch.float64, device=found.alpha.device)
    for concepts in pairs.T:
        lost = lost.scatter_reduce(0, concepts, -gains, "amin")
    return lost
