"""All scores of a model in one call: the five of the paper, what exposes them, and warnings in plain words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pace.metrics.agreement import class_echo
from pace.metrics.collapse import collapses
from pace.metrics.declare import Metric
from pace.metrics.declare import bootstrap as with_interval
from pace.metrics.economy import effective_concepts, hoyer_sparsity, n_concepts, sparsity
from pace.metrics.inputs import labels_of
from pace.metrics.patchwise import cls_weight, concepts_per_image, levels, patch_variety
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
from pace.metrics.truth import colour_accuracy, colour_purity, colour_recovery, part_consistency

if TYPE_CHECKING:
    from pace.explainer import PACE
    from pace.observations import Observations


def evaluate(
    model: PACE,
    train: Observations,
    test: Observations,
    perturbed: Observations | None = None,
    *,
    colours: Any = None,
    parts: Any = None,
    bootstrap: int = 200,
    seed: int = 0,
) -> Scores:
    """All scores of a fitted model on test images, each with its interval, and `warnings` where it has collapsed.

    ŷ is withheld when images are explained, but for `faithfulness_given_prediction`.

    Parameters
    ----------
    train
        Observations the regression from θ to ŷ is fitted on; as a rule what the model was fitted on.
    perturbed
        Perturbed views of the test images, in the same order; without them there are no scores of stability.
    colours : (M, rows, columns), optional
        True colours of the test images' patches, on Color.
    parts : (M, n_parts), optional
        The patch that holds each part, −1 for none, on CUB; see `part_patches`.
    bootstrap, seed
        Draws for the intervals (0 for none), and the seed of these, of the folds and of the network.
    """
    if perturbed is not None and perturbed.shape[:2] != test.shape[:2]:
        raise ValueError(
            f"perturbed: expected the {len(test)} test images with {test.n_tokens} tokens each; found {perturbed!r}"
        )
    told = None
    if train.n_classes and test.n_classes and model.label_head_.shape[1]:
        given = [model.explain(some, use_predictions=True, patches=False).theta for some in (train, test)]
        told = (given[0], given[1])
    views = (train, test, perturbed)
    yhat = [None if view is None or view.predictions is None else view.predictions[:] for view in views]
    return score_explanations(
        model.explain(train, patches=False),
        model.explain(test),
        None if perturbed is None else model.explain(perturbed, patches=False),
        yhat_train=yhat[0],
        yhat_test=yhat[1],
        yhat_perturbed=yhat[2],
        told=told,
        attention=test.attention[:],
        concepts=model.means_,
        colours=colours,
        parts=parts,
        bootstrap=bootstrap,
        seed=seed,
    )


def score_explanations(
    train: Any,
    test: Any,
    perturbed: Any = None,
    *,
    yhat_train: Any = None,
    yhat_test: Any = None,
    yhat_perturbed: Any = None,
    told: tuple[Any, Any] | None = None,
    attention: Any = None,
    concepts: Any = None,
    colours: Any = None,
    parts: Any = None,
    bootstrap: int = 200,
    seed: int = 0,
) -> Scores:
    """`evaluate` for explanations of any method: every score for which there is what it needs.

    Parameters
    ----------
    train, test, perturbed : Explanation
        Or anything with `theta` and, for the patch level, `phi` and `prefix_tokens`.
    yhat_train, yhat_test, yhat_perturbed
        The transformer's predictions, as labels or distributions.
    told
        θ of train and test when the method was given ŷ.
    attention : (M, J)
        Weight of every token in θ of the test images.
    concepts : (K, …)
        What describes every concept at the dataset level, such as its mean.
    """
    scores: list[Score] = []
    notes: list[str] = []

    def add(metric: Metric[Any], *args: Any) -> None:
        score = with_interval(metric, *args, resamples=bootstrap, seed=seed)
        if np.isfinite(score.value):  # stability when the prediction holds, where it never does
            scores.append(score)

    if yhat_train is None or yhat_test is None:
        notes.append("There are no predictions, so faithfulness is not measured.")
    elif len(np.unique(labels_of(yhat_train, len(train.theta), "yhat_train"))) == 1:
        notes.append("The transformer predicts one class for all training images: there is nothing to be faithful to.")
    else:
        add(faithfulness, train.theta, yhat_train, test.theta, yhat_test)
        if told is not None:
            add(faithfulness_given_prediction, told[0], yhat_train, told[1], yhat_test)
        add(nonlinear_faithfulness, train.theta, yhat_train, test.theta, yhat_test)
        add(majority_class, yhat_train, yhat_test)
        add(class_echo, test.theta, yhat_test)
    if perturbed is not None:
        add(stability, test.theta, perturbed.theta)
        if yhat_test is not None and yhat_perturbed is not None:
            add(stability_when_prediction_holds, test.theta, perturbed.theta, yhat_test, yhat_perturbed)
            add(prediction_survival, yhat_test, yhat_perturbed)
    if len(test.theta) > 1:
        add(between_images, test.theta)
        if perturbed is not None:
            add(stability_ratio, test.theta, perturbed.theta)
            add(reidentification, test.theta, perturbed.theta)
    add(sparsity, test.theta)
    add(hoyer_sparsity, test.theta)
    add(levels, test, concepts)
    phi, prefix_tokens = getattr(test, "phi", None), getattr(test, "prefix_tokens", 0)
    if phi is not None:
        add(concepts_per_image, phi, prefix_tokens)
        add(patch_variety, phi, prefix_tokens)
    if attention is not None:
        add(cls_weight, attention, prefix_tokens)
    add(n_concepts, test.theta)
    add(effective_concepts, test.theta)
    if phi is not None and colours is not None:
        add(colour_recovery, phi, colours, prefix_tokens)
        add(colour_accuracy, phi, colours, prefix_tokens)
        add(colour_purity, phi, colours, prefix_tokens)
    if phi is not None and parts is not None:
        add(part_consistency, phi, parts, prefix_tokens)
    return Scores(scores, [*notes, *collapses({score.name: score for score in scores})])
