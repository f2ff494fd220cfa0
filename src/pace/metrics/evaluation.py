"""All scores of a model in one call, with warnings in plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pace.metrics import agreement, declare, faithful, hiding, local, sparse, stable
from pace.metrics.collapse import signs_of_collapse, verdict
from pace.metrics.hiding import Hiding
from pace.metrics.inputs import labels_of
from pace.metrics.scores import Score, Scores

if TYPE_CHECKING:
    from pace.explainer import PACE
    from pace.observations import Observations

# In reading order. A metric's parameters are named after what `score_explanations` passes it.
METRICS = [
    found
    for module in (faithful, stable, sparse, local, hiding, agreement)
    for found in vars(module).values()
    if isinstance(found, declare.Metric)
]


def evaluate(
    model: PACE,
    train: Observations,
    test: Observations,
    perturbed: Observations | None = None,
    *,
    colours: Any = None,
    parts: Any = None,
    hiding: Hiding | None = None,
    bootstrap: int = 200,
    seed: int = 0,
) -> Scores:
    """All scores of a fitted model on test images, each with its interval, `warnings` where it has collapsed, and a `verdict`.

    ŷ is withheld when images are explained, except for `faithfulness_given_prediction`.

    Parameters
    ----------
    train
        Observations the regression from θ to ŷ is fitted on; usually those the model was fitted on.
    perturbed
        The test images perturbed, in the same order; without them stability is not scored, and without their `crops` not
        whether patches follow the picture.
    colours : (M, rows, columns), optional
        True colours of the test images' patches, on Color.
    parts : (M, n_parts), optional
        The patch that holds each part, −1 for none, on CUB.
    hiding
        Some of the test images, whose concepts are removed and added to see what the prediction depends on; see `hide`.
    bootstrap, seed
        Number of resamples for the intervals (0 for none), and the seed for these, the folds and the network.
    """
    given = random = importance = None
    if train.n_classes and test.n_classes:
        from pace.metrics.by_lot import random_mixtures

        used = max(1, len(model.means_) - len(model.empty_concepts_))
        random = random_mixtures(train, test, used, seed=seed, device=model.device)
        if model.label_head_.shape[1]:
            given = [model.explain(some, use_predictions=True, patches=False).theta for some in (train, test)]
    found, attention = model.explain(test), test.attention[:]
    if hiding is not None and test.n_classes:
        importance = model.importance(found.theta, labels_of(test.predictions, len(test)))[hiding.rows]
    return score_explanations(
        model.explain(train, patches=False),
        found,
        None if perturbed is None else model.explain(perturbed),
        yhat_train=_whole(train, "predictions"),
        yhat_test=_whole(test, "predictions"),
        yhat_perturbed=_whole(perturbed, "predictions"),
        given_prediction=given,
        random=random,
        embeddings=test.embeddings,
        attention=attention,
        attention_perturbed=_whole(perturbed, "attention"),
        token_weights=attention,
        crops=_whole(perturbed, "crops"),
        concepts=model.means_,
        colours=colours,
        parts=parts,
        hiding=hiding,
        importance=importance,
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
    given_prediction: Sequence[Any] | None = None,
    random: Sequence[Any] | None = None,
    embeddings: Any = None,
    attention: Any = None,
    attention_perturbed: Any = None,
    token_weights: Any = None,
    crops: Any = None,
    concepts: Any = None,
    colours: Any = None,
    parts: Any = None,
    hiding: Hiding | None = None,
    importance: Any = None,
    bootstrap: int = 200,
    seed: int = 0,
) -> Scores:
    """`evaluate` for explanations of any method: every score that can be computed from what is given.

    Parameters
    ----------
    train, test, perturbed : Explanation
        Or anything with `theta` and, for the patch level, `phi`, `grid` and `prefix_tokens`.
    yhat_train, yhat_test, yhat_perturbed
        The transformer's predictions, as labels or distributions.
    given_prediction
        θ of train and test when the method was given ŷ.
    random
        θ of train and test for concepts drawn by lot, as many as the method uses (`pace.metrics.by_lot`).
    embeddings : (M, J, d)
        Of the test images' tokens: anything with `shape` and slicing.
    attention, attention_perturbed : (M, J)
        Of CLS to every token of the test images and of their perturbed versions.
    token_weights : (M, J)
        Weight of every token in θ of the test images; in PACE its attention.
    crops : (M, 4)
        What the perturbed images show of the images (`Observations.crops`).
    concepts : (K, …)
        What describes every concept at the dataset level, such as its mean.
    importance : (n, K)
        How much each concept matters for the prediction in the images of `hiding`; by default their θ.
    """
    notes = []
    if yhat_train is None or yhat_test is None:
        notes.append("There are no predictions, so faithfulness is not measured.")
    elif len(np.unique(labels_of(yhat_train, len(train.theta), "yhat_train"))) == 1:
        notes.append("The transformer predicts one class for all training images: there is nothing to be faithful to.")
        yhat_train = None
    if hiding is not None and importance is None:
        importance = test.theta[hiding.rows]
    theta_train_given, theta_test_given = given_prediction or (None, None)
    theta_train_random, theta_test_random = random or (None, None)
    inputs = {
        "theta_train": train.theta,
        "yhat_train": yhat_train,
        "theta_test": test.theta,
        "yhat_test": yhat_test,
        "theta_train_given": theta_train_given,
        "theta_test_given": theta_test_given,
        "theta_train_random": theta_train_random,
        "theta_test_random": theta_test_random,
        "theta": test.theta,
        "yhat": yhat_test,
        "theta_perturbed": getattr(perturbed, "theta", None),
        "yhat_perturbed": yhat_perturbed,
        "explanation": test,
        "phi": getattr(test, "phi", None),
        "phi_perturbed": getattr(perturbed, "phi", None),
        "grid": getattr(test, "grid", None),
        "prefix_tokens": getattr(test, "prefix_tokens", 0),
        "embeddings": embeddings,
        "attention": attention,
        "attention_perturbed": attention_perturbed,
        "token_weights": token_weights,
        "crops": crops,
        "concepts": concepts,
        "colours": colours,
        "parts": parts,
        "hiding": hiding,
        "importance": importance,
    }
    scores = _every_score({name: value for name, value in inputs.items() if value is not None}, bootstrap, seed)
    signs = signs_of_collapse(scores)
    return Scores(scores.values(), [*notes, *(sign.sentence for sign in signs)], verdict(scores, signs))


def _every_score(known: Mapping[str, Any], bootstrap: int, seed: int) -> dict[str, Score]:
    """The metrics whose parameters are known."""
    scores = {}
    for metric in METRICS:
        parameters = metric.__signature__.parameters
        if all(name in known or parameter.default is not parameter.empty for name, parameter in parameters.items()):
            arguments = {name: known[name] for name in parameters if name in known}
            score = declare.bootstrap(metric, **arguments, resamples=bootstrap, seed=seed)
            if np.isfinite(score.value):  # NaN: it does not apply to these images
                scores[score.name] = score
    return scores


def _whole(observations: Observations | None, field: str) -> Any:
    array = getattr(observations, field, None)
    return None if array is None else array[:]
