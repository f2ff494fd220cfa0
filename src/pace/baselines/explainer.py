"""`Explainer`: the interface of every method, PACE included, and the template for writing one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import numpy as np
import torch

from pace.backbones import Backbone
from pace.baselines.head import predicted
from pace.explainer import PACE
from pace.explanation import Array, Explanation
from pace.observations import Observations


class Explainer(ABC):
    """A method that explains each image by a vector θ_m. A subclass writes `_explain` and, if it learns anything, `_fit`.

    name : as in the tables
    repeats : runs to average its scores over; 1 if the method is deterministic
    patch_level : whether `explain` can give φ
    through_model : whether it asks the rest of the model, into which only the last of two blocks goes on
    concepts_ : (K, d) the concepts in embedding space, the dataset level; None where there is none
    offset_ : what φ · concepts_ is added to where that rebuilds a token (0, or d numbers); None where it does not

    `explain` is one run: run r is ``explain(observations, seed=seed + r)``. With the same seed an image and its perturbed
    version get the same random draws.
    """

    name: str
    repeats: int = 1
    patch_level: bool = True
    through_model: bool = False
    concepts_: Array | None = None
    offset_: Array | float | None = None
    device_: torch.device

    def fit(
        self, backbone: Backbone, train: Observations, *, perturbed: Observations | None = None, seed: int = 0
    ) -> Self:
        """Learn whatever the method learns from the training images, on the model's device; labels are never given."""
        self.device_ = backbone.device
        with torch.inference_mode(False), torch.no_grad():  # some methods take gradients, whatever the caller's mode
            self._fit(backbone, train, perturbed, seed)
        return self

    def explain(self, observations: Observations, *, seed: int = 0, patches: bool = True) -> Explanation:
        """θ (M, K) and, with `patches` and where the method has a patch level, φ (M, J, K)."""
        if not hasattr(self, "device_"):
            raise ValueError(f"{self.name} is not fitted; call fit first")
        with torch.inference_mode(False), torch.no_grad():
            return self._explain(observations, seed, patches)

    def importance(self, observations: Observations, explanation: Explanation) -> Array:
        """How much each concept matters for the prediction of each image (M, K), by the method's own lights; by default θ."""
        return explanation.theta

    def _fit(self, backbone: Backbone, train: Observations, perturbed: Observations | None, seed: int) -> None:  # noqa: B027
        """Nothing, unless a method learns."""

    @abstractmethod
    def _explain(self, observations: Observations, seed: int, patches: bool) -> Explanation: ...


class PaceExplainer(Explainer):
    """PACE with any of its options, ŷ withheld; "pace-paper" with ``updates="paper"``, as printed in the paper."""

    offset_ = 0.0

    def __init__(self, n_concepts: int = 100, **options: Any) -> None:
        self.n_concepts, self.options = n_concepts, options
        self.name = "pace-paper" if options.get("updates") == "paper" else "pace"

    def _fit(self, backbone: Backbone, train: Observations, perturbed: Observations | None, seed: int) -> None:
        model = PACE(self.n_concepts, seed=seed, device=str(self.device_), **self.options)
        self.model_ = model.fit(train, perturbed=perturbed)
        self.concepts_ = self.model_.means_

    def _explain(self, observations: Observations, seed: int, patches: bool) -> Explanation:
        return self.model_.explain(observations, patches=patches)

    def importance(self, observations: Observations, explanation: Explanation) -> Array:
        if observations.predictions is None:
            return explanation.theta
        return self.model_.importance(explanation.theta, predicted(observations.predictions[:]).cpu().numpy())


@dataclass(frozen=True, eq=False, repr=False)
class PointExplanation(Explanation):
    """θ and φ of a method without uncertainty. Attributions are signed; rows need not sum to 1. `gamma` is `theta`."""

    def interval(self, level: float = 0.9) -> NoReturn:
        raise ValueError("this explanation has no uncertainty, hence no intervals; PACE's has")


def point(theta: Array, phi: Array | None, observations: Observations) -> PointExplanation:
    """θ and φ as an explanation."""
    theta = np.ascontiguousarray(theta, dtype=np.float32)
    return PointExplanation(theta, theta, phi, observations.grid, observations.prefix_tokens)


def check_counts(**counts: int | None) -> None:
    """Whole numbers of at least 1; None leaves the choice to the method."""
    for name, value in counts.items():
        if value is not None and (not isinstance(value, (int, np.integer)) or value < 1):
            raise ValueError(f"{name}: expected a whole number of at least 1; found {value!r}")
