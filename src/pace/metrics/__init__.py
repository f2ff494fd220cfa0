"""Metrics: the paper's five desiderata, and those that expose an explanation that scores well and explains nothing.

Every metric is a function of arrays (θ, φ, ŷ) that declares its direction and range; its docstring begins with what the number
means. `bootstrap` adds an interval, and `evaluate` gives all scores of a model. Importing this needs only numpy; torch and
scipy are imported where they are used.
"""

from pace.metrics.agreement import (
    colour_accuracy,
    colour_purity,
    colour_recovery,
    part_consistency,
    reconstruction,
    seeds_alike,
)
from pace.metrics.declare import Measure, Metric, bootstrap, metric
from pace.metrics.evaluation import evaluate, score_explanations
from pace.metrics.faithful import (
    class_echo,
    faithfulness,
    faithfulness_given_prediction,
    majority_class,
    nonlinear_faithfulness,
)
from pace.metrics.hiding import deletion, evidence_gap, hide_patches, hide_tokens, insertion, patch_relevance
from pace.metrics.scores import Score, Scores
from pace.metrics.sparse import (
    cls_weight,
    concepts_per_image,
    effective_concepts,
    hoyer_sparsity,
    levels,
    live_concepts,
    n_concepts,
    patch_variety,
    sparsity,
)
from pace.metrics.stable import (
    between_images,
    prediction_survival,
    reidentification,
    stability,
    stability_ratio,
    stability_when_prediction_holds,
)

__all__ = [
    "Measure", "Metric", "Score", "Scores", "between_images", "bootstrap", "class_echo", "cls_weight",
    "colour_accuracy", "colour_purity", "colour_recovery", "concepts_per_image", "deletion", "effective_concepts",
    "evaluate", "evidence_gap", "faithfulness", "faithfulness_given_prediction", "hide_patches", "hide_tokens",
    "hoyer_sparsity", "insertion", "levels", "live_concepts", "majority_class", "metric", "n_concepts",
    "nonlinear_faithfulness", "part_consistency", "patch_relevance", "patch_variety", "prediction_survival",
    "reconstruction", "reidentification", "score_explanations", "seeds_alike", "sparsity", "stability",
    "stability_ratio", "stability_when_prediction_holds",
]  # fmt: skip
