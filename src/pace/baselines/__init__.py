"""Explainers to compare PACE with, and PACE itself, behind one interface.

``explainer("shap").fit(backbone, train).explain(test)`` gives an `Explanation`, whatever the name. docs/baselines.md says what
each computes, from which paper, and at which cost. A new method is a subclass of `Explainer`, and a line here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pace.baselines.channels import LIME, SHAP
from pace.baselines.craft import CRAFT
from pace.baselines.explainer import Explainer, PaceExplainer, PointExplanation
from pace.baselines.gradients import AGI, Saliency
from pace.baselines.head import EveryToken, SplitObservations, last_block, reads_uncounted
from pace.baselines.references import (
    AttentionRank,
    ByLot,
    GaussianMixture,
    KMeans,
    Majority,
    MeanEmbedding,
    Position,
    RandomCentres,
    SemiNMF,
    TrueColors,
)
from pace.baselines.sae import SparseAutoencoder

EXPLAINERS: dict[str, Callable[..., Explainer]] = {
    "pace": PaceExplainer,
    "pace-paper": partial(PaceExplainer, updates="paper", covariance="full", alpha=None),
    "shap": SHAP,
    "shap-kernel": partial(SHAP, "kernel"),
    "lime": LIME,
    "saliency": Saliency,
    "agi": AGI,
    "craft": CRAFT,
    "craft-sobol": partial(CRAFT, explains="importance"),
    "craft-per-class": partial(CRAFT, per_class=True),
    "kmeans": KMeans,
    "gmm": GaussianMixture,
    "semi-nmf": SemiNMF,
    "sae": SparseAutoencoder,
    "sae-8x": partial(SparseAutoencoder, expansion=8),
    "sae-matryoshka": partial(SparseAutoencoder, nested=True),
    "position": Position,
    "attention-rank": AttentionRank,
    "lot": ByLot,
    "random": RandomCentres,
    "embedding": MeanEmbedding,
    "majority": Majority,
}


def explainer(name: str, **options: Any) -> Explainer:
    """The explainer of that name, with options of its class. `TrueColors` needs the true colours, so it has no name."""
    if name not in EXPLAINERS:
        raise ValueError(f"method: expected one of {', '.join(EXPLAINERS)}; found {name!r}")
    return EXPLAINERS[name](**options)


__all__ = [
    "AGI", "CRAFT", "EXPLAINERS", "LIME", "SHAP", "AttentionRank", "ByLot", "EveryToken", "Explainer",
    "GaussianMixture", "KMeans", "Majority", "MeanEmbedding", "PaceExplainer", "PointExplanation", "Position",
    "RandomCentres", "Saliency", "SemiNMF", "SparseAutoencoder", "SplitObservations", "TrueColors", "explainer",
    "last_block", "reads_uncounted",
]  # fmt: skip
