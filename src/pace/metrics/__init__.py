"""Metrics: the paper's five desiderata, and those that expose an explanation that scores well and explains nothing.

Every metric is a function of arrays (θ, φ, ŷ) that declares its direction and range; its docstring begins with what the number
means. `bootstrap` adds an interval, and `evaluate` gives all scores of a model. Importing this needs only numpy; torch and
scipy are imported where they are used.
"""

from pace.metrics.agreement import (
    colour_accuracy,
    colour_purity,
    colour_recovery,
    kind_accuracy,
    part_ari,
    part_consistency,
    part_consistency_by_position,
    part_recovery,
    reconstruction,
    seeds_alike,
)
from pace.metrics.declare import Measure, Metric, bootstrap, metric
from pace.metrics.effects import (
    concept_effect,
    deletion,
    effect_by_attention,
    effect_by_lot,
    gain_over_attention,
    gain_over_lot,
    importance_agreement,
    insertion,
    main_concept_loss,
)
from pace.metrics.evaluation import evaluate, score_explanations
from pace.metrics.faithful import (
    class_echo,
    faithfulness,
    faithfulness_given_prediction,
    fidelity_over_random,
    logit_fidelity,
    majority_class,
    nonlinear_faithfulness,
)
from pace.metrics.hiding import Hiding, hide, hide_patches, hide_tokens
from pace.metrics.local import (
    information_over_attention,
    warp_agreement,
    warp_gain,
    warp_gain_over_attention,
    within_image_information,
)
from pace.metrics.scores import Score, Scores
from pace.metrics.sparse import (
    cls_weight,
    concepts_per_image,
    effective_concepts,
    hoyer_sparsity,
    leading_area,
    leading_attention,
    leading_share,
    levels,
    live_concepts,
    n_concepts,
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
    "Hiding", "Measure", "Metric", "Score", "Scores", "between_images", "bootstrap", "class_echo", "cls_weight",
    "colour_accuracy", "colour_purity", "colour_recovery", "concept_effect", "concepts_per_image", "deletion",
    "effect_by_attention", "effect_by_lot", "effective_concepts", "evaluate", "faithfulness",
    "faithfulness_given_prediction", "fidelity_over_random", "gain_over_attention", "gain_over_lot", "hide",
    "hide_patches", "hide_tokens", "hoyer_sparsity", "importance_agreement",
    "information_over_attention", "insertion", "kind_accuracy", "leading_area",
    "leading_attention", "leading_share", "levels", "live_concepts", "logit_fidelity", "main_concept_loss", "majority_class",
    "metric", "n_concepts", "nonlinear_faithfulness", "part_ari", "part_consistency",
    "part_consistency_by_position", "part_recovery", "prediction_survival", "reconstruction", "reidentification",
    "score_explanations", "seeds_alike", "sparsity", "stability", "stability_ratio",
    "stability_when_prediction_holds", "warp_agreement", "warp_gain", "warp_gain_over_attention",
    "within_image_information",
]  # fmt: skip
