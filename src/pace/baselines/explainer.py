"""`Explainer`: the interface of every method, PACE included, and the template for writing one."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
    """The model f = h ∘ g, split at PACE's layer. Every `Backbone` over a model with known blocks is one."""

    @property
    def device(self) -> torch.device: ...
    @property
    def preprocessing(self) -> PreprocessingLike: ...
    def grid(self, height: int, width: int) -> tuple[int, int]: ...
    def split(self, images: Tensor) -> Tensor: ...
    def forward_from(self, tokens: Tensor, size: tuple[int, int] | None = None) -> Tensor: ...


class Explainer(ABC):
    """A method that explains each image by a vector θ_m. A subclass writes `_explain` and, if it learns anything, `_fit`.

    name : as in the tables
    repeats : runs to average its scores over; 1 if the method is deterministic
    concepts_ : (K, d) the concepts in embedding space, the dataset level; None where there is none

    `explain` is one run: run r is ``explain(observations, seed=seed + r)``. With the same seed an image and its perturbed
    version get the same random draws.
    """

    name: str
    repeats: int = 1
    concepts_: Array | None = None
    device_: torch.device

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

        `device` is where patches are processed, by default the model's device. The model stays where it is.
        """
        self.device_ = backbone.device if device is None else torch.device(device)
        with torch.no_grad():
            self._fit(backbone, train, perturbed, seed)
        return self

    def explain(self, observations: Observations, *, seed: int = 0, patches: bool = True) -> Explanation:
        """θ (M, K) and, with `patches` and where the method has a patch level, φ (M, J, K)."""
        if not hasattr(self, "device_"):
            raise ValueError(f"{self.name} is not fitted; call fit first")
        with torch.no_grad():
            return self._explain(observations, seed, patches)

    def _fit(self, backbone: SplitModel, train: Observations, perturbed: Observations | None, seed: int) -> None:  # noqa: B027
        """Nothing, unless a method learns."""

    @abstractmethod
    def _explain(self, observations: Observations, seed: int, patches: bool) -> Explanation: ...


@dataclass(frozen=True, eq=False, repr=False)
class PointExplanation(Explanation):
    """θ and φ of a method without uncertainty. Attributions are signed; rows need not sum to 1. `gamma` is `theta`."""

    def interval(self, level: float = 0.9) -> NoReturn:
        raise ValueError("this explanation has no uncertainty, hence no intervals; PACE's has")


def point(
    theta: Array, phi: Array | None, observations: Observations, prefix_tokens: int | None = None
) -> PointExplanation:
    """θ and φ as an explanation; `prefix_tokens` of φ are those of the observations unless given."""
    theta = np.ascontiguousarray(theta, dtype=np.float32)
    prefix = observations.prefix_tokens if prefix_tokens is None else prefix_tokens
    return PointExplanation(theta, theta, phi, observations.grid, prefix)


def check_counts(**counts: int | None) -> None:
    """Whole numbers of at least 1; None leaves the choice to the method."""
    for name, value in counts.items():
        if value is not None and (not isinstance(value, (int, np.integer)) or value < 1):
            raise ValueError(f"{name}: expected a whole number of at least 1; found {value!r}")
