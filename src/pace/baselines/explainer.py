"""What the benchmark asks of a method, PACE and all others alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from pace.explanation import Array, Explanation
from pace.observations import Observations

if TYPE_CHECKING:
    from pace.images import PreprocessingLike


class SplitModel(Protocol):
    """The model f = h ∘ g, cut at PACE's layer. Every `Backbone` over a model with known blocks is one."""

    @property
    def device(self) -> torch.device: ...
    @property
    def preprocessing(self) -> PreprocessingLike: ...
    def grid(self, height: int, width: int) -> tuple[int, int]: ...
    def split(self, images: Tensor) -> Tensor: ...
    def forward_from(self, tokens: Tensor, size: tuple[int, int] | None = None) -> Tensor: ...


class Explainer(Protocol):
    """A method that explains images by a vector θ_m each.

    name : what tables call it
    repeats : how many runs its scores are to be averaged over; 1 where a run has no chance in it
    concepts_ : (K, d) what the entries of θ stand for in embedding space, the dataset level; None where there is none

    `explain` is one run: run r of an explainer is ``explain(observations, seed=seed + r)``. With the same seed an image and
    its perturbed view get the same random draws.
    """

    name: str
    repeats: int
    concepts_: Array | None

    def fit(
        self,
        backbone: SplitModel,
        train: Observations,
        *,
        perturbed: Observations | None = None,
        seed: int = 0,
        device: Any = None,
    ) -> Self:
        """Learn whatever the method learns from the training images; labels are never given.

        `device` is where patches are worked on, by default where the model is. The model stays where it is.
        """
        ...

    def explain(self, observations: Observations, *, seed: int = 0, patches: bool = True) -> Explanation:
        """θ (M, K) and, with `patches` and where the method has a patch level, φ (M, J, K)."""
        ...


@dataclass(frozen=True, eq=False, repr=False)
class PointExplanation(Explanation):
    """θ and φ of a method that knows no uncertainty. Attributions are signed; no row need sum to 1. `gamma` is `theta`."""

    def interval(self, level: float = 0.9) -> NoReturn:
        raise ValueError("this explanation has no uncertainty, hence no intervals; PACE's has")


def check_counts(**counts: int | None) -> None:
    """Whole numbers of at least 1; None is for the method to choose."""
    for name, value in counts.items():
        if value is not None and (not isinstance(value, (int, np.integer)) or value < 1):
            raise ValueError(f"{name}: expected a whole number of at least 1; found {value!r}")


def point(theta: Array, phi: Array | None, observations: Observations) -> PointExplanation:
    theta = np.ascontiguousarray(theta, dtype=np.float32)
    return PointExplanation(theta, theta, phi, observations.grid, observations.prefix_tokens)
