"""Metrics: the paper's five desiderata, and what exposes an explanation that meets them and explains nothing.

Every metric is a function of arrays (θ, φ, ŷ) that declares its direction, range and meaning; `bootstrap` adds an interval, and
`evaluate` gives all scores of a model. Importing this needs numpy alone; torch and scipy are imported where they are used.
"""

from pace.metrics.agreement import class_echo
from pace.metrics.declare import Metric, bootstrap, metric
from pace.metrics.economy import effective_concepts, hoyer_sparsity, n_concepts, sparsity
from pace.metrics.evaluation import evaluate, score_explanations
from pace.metrics.hiding import deletion, evidence_gap, hide_patches, hide_tokens, insertion, patch_relevance
from pace.metrics.patchwise import Levels, cls_weight, concepts_per_image, find_levels, levels, patch_variety
from pace.metrics.recovery import faithfulness, faithfulness_given_prediction, majority_class, nonlinear_faithfulness
from pace.metrics.scores import Score, Scores
from pace.metrics.steadiness import (
    between_images,
    prediction_survival,
    reidentification,
    stability,
    stability_ratio,
    stability_when_prediction_holds,
)
from pace.metrics.truth import (
    colour_accuracy,
    colour_purity,
    colour_recovery,
    part_consistency,
    part_patches,
)

__all__ = [
    "Levels",
    "Metric",
    "Score",
    "Scores",
    "between_images",
    "bootstrap",
    "class_echo",
    "cls_weight",
    "colour_accuracy",
    "colour_purity",
    "colour_recovery",
    "concepts_per_image",
    "deletion",
    "effective_concepts",
    "evaluate",
    "evidence_gap",
    "faithfulness",
    "faithfulness_given_prediction",
    "find_levels",
    "hide_patches",
    "hide_tokens",
    "hoyer_sparsity",
    "insertion",
    "levels",
    "majority_class",
    "metric",
    "n_concepts",
    "nonlinear_faithfulness",
    "part_consistency",
    "part_patches",
    "patch_relevance",
    "patch_variety",
    "prediction_survival",
    "reidentification",
    "score_explanations",
    "sparsity",
    "stability",
    "stability_ratio",
    "stability_when_prediction_holds",
]
