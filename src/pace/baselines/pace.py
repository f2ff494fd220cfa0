"""PACE behind the same interface."""

from __future__ import annotations

from typing import Any

from pace.baselines.explainer import Explainer, SplitModel
from pace.explainer import PACE
from pace.explanation import Explanation
from pace.observations import Observations


class PaceExplainer(Explainer):
    """PACE with any of its options; "pace-paper" with ``updates="paper"``, the updates as printed in the paper.

    `use_predictions` gives ŷ to inference, which is withheld otherwise.
    """

    model_: PACE

    def __init__(self, n_concepts: int = 100, *, use_predictions: bool = False, **options: Any) -> None:
        self.n_concepts, self.use_predictions, self.options = n_concepts, use_predictions, options
        self.name = "pace-paper" if options.get("updates") == "paper" else "pace"
        self.name += "-given-predictions" if use_predictions else ""

    def _fit(self, backbone: SplitModel, train: Observations, perturbed: Observations | None, seed: int) -> None:
        model = PACE(self.n_concepts, seed=seed, device=str(self.device_), **self.options)
        self.model_ = model.fit(train, perturbed=perturbed)
        self.concepts_ = self.model_.means_

    def _explain(self, observations: Observations, seed: int, patches: bool) -> Explanation:
        return self.model_.explain(observations, use_predictions=self.use_predictions, patches=patches)
