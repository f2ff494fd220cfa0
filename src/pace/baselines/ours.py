"""PACE behind the same interface."""

from __future__ import annotations

from typing import Any, Self

from pace.baselines.explainer import SplitModel
from pace.explainer import PACE
from pace.explanation import Array, Explanation
from pace.observations import Observations


class PaceExplainer:
    """PACE with any of its options; "pace-paper" when `updates` are the printed ones.

    `use_predictions` lets inference see ŷ, which is withheld otherwise.
    """

    repeats = 1
    concepts_: Array | None = None
    model_: PACE

    def __init__(self, n_concepts: int = 100, *, use_predictions: bool = False, **options: Any) -> None:
        self.n_concepts, self.use_predictions, self.options = n_concepts, use_predictions, options
        self.name = "pace-paper" if options.get("updates") == "paper" else "pace"
        self.name += "-given-predictions" if use_predictions else ""

    def fit(
        self,
        backbone: SplitModel,
        train: Observations,
        *,
        perturbed: Observations | None = None,
        seed: int = 0,
        device: Any = None,
    ) -> Self:
        where = str(backbone.device if device is None else device)
        self.model_ = PACE(self.n_concepts, seed=seed, device=where, **self.options).fit(train, perturbed=perturbed)
        self.concepts_ = self.model_.means_
        return self

    def explain(self, observations: Observations, *, seed: int = 0, patches: bool = True) -> Explanation:
        return self.model_.explain(observations, use_predictions=self.use_predictions, patches=patches)
