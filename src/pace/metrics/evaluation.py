"""All scores of a model in one call, with warnings in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pace.metrics import agreement, declare, faithful, sparse, stable
from pace.metrics.collapse import collapses
from pace.metrics.inputs import labels_of
from pace.metrics.scores import Scores

if TYPE_CHECKING:
    from pace.explainer import PACE
    from pace.observations import Observations

# In reading order. A metric's parameters are named after what `score_explanations` passes it.
METRICS = [
    found
    for module in (faithful, stable, sparse, agreement)
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
    bootstrap: int = 200,
    seed: int = 0,
) -> Scores:
    """All scores of a fitted model on test images, each with its interval, and `warnings` where it has collapsed.

    ŷ is withheld when images are explained, except for `faithfulness_given_prediction`.

    Parameters
    ----------
    train
        Observations the regression from θ to ŷ is fitted on; usually those the model was fitted on.
    perturbed
        The test images perturbed, in the same order; without them stability is not scored.
    colours : (M, rows, columns), optional
        True colours of the test images' patches, on Color.
    parts : (M, n_parts), optional
        The patch that holds each part, −1 for none, on CUB.
    bootstrap, seed
        Number of resamples for the intervals (0 for none), and the seed for these, the folds and the network.
    """
    given = None
    if train.n_classes and test.n_classes and model.label_head_.shape[1]:
        given = [model.explain(some, use_predictions=True, patches=False).theta for some in (train, test)]
    return score_explanations(
        model.explain(train, patches=False),
        model.explain(test),
        None if perturbed is None else model.explain(perturbed, patches=False),
        yhat_train=_predictions(train),
        yhat_test=_predictions(test),
        yhat_perturbed=_predictions(perturbed),
        given_prediction=given,
        attention=test.attention[:],
        concepts=model.means_,
        offset=0.0,
        embeddings=test.embeddings,
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
    given_prediction: Sequence[Any] | None = None,
    attention: Any = None,
    concepts: Any = None,
    offset: Any = None,
    embeddings: Any = None,
    phi_other: Any = None,
    colours: Any = None,
    parts: Any = None,
    bootstrap: int = 200,
    seed: int = 0,
) -> Scores:
    """`evaluate` for explanations of any method: every score that can be computed from what is given.

    Parameters
    ----------
    train, test, perturbed : Explanation
        Or anything with `theta` and, for the patch level, `phi` and `prefix_tokens`.
    yhat_train, yhat_test, yhat_perturbed
        The transformer's predictions, as labels or distributions.
    given_prediction
        θ of train and test when the method was given ŷ.
    attention : (M, J)
        Weight of every token in θ of the test images.
    concepts : (K, …)
        What describes every concept at the dataset level, such as its mean.
    offset, embeddings : 0 or (d,), and (M, J, d)
        What φ · concepts is added to where that rebuilds a token, and the tokens of the images that φ is of.
    phi_other
        φ of the same images by a second fit, with another start.
    """
    notes = []
    if yhat_train is None or yhat_test is None:
        notes.append("There are no predictions, so faithfulness is not measured.")
    elif len(np.unique(labels_of(yhat_train, len(train.theta), "yhat_train"))) == 1:
        notes.append("The transformer predicts one class for all training images: there is nothing to be faithful to.")
        yhat_train = None
    theta_train_given, theta_test_given = given_prediction or (None, None)
    inputs = {
        "theta_train": train.theta,
        "yhat_train": yhat_train,
        "theta_test": test.theta,
        "yhat_test": yhat_test,
        "theta_train_given": theta_train_given,
        "theta_test_given": theta_test_given,
        "theta": test.theta,
        "yhat": yhat_test,
        "theta_perturbed": None if perturbed is None else perturbed.theta,
        "yhat_perturbed": yhat_perturbed,
        "explanation": test,
        "phi": getattr(test, "phi", None),
        "prefix_tokens": getattr(test, "prefix_tokens", 0),
        "attention": attention,
        "concepts": concepts,
        "offset": offset,
        "embeddings": embeddings,
        "phi_other": phi_other,
        "colours": colours,
        "parts": parts,
    }
    known = {name: value for name, value in inputs.items() if value is not None}
    scores = []
    for metric in METRICS:
        parameters = metric.__signature__.parameters
        if all(name in known or parameter.default is not parameter.empty for name, parameter in parameters.items()):
            arguments = {name: known[name] for name in parameters if name in known}
            scores.append(declare.bootstrap(metric, **arguments, resamples=bootstrap, seed=seed))
    scores = [score for score in scores if np.isfinite(score.value)]  # NaN: it does not apply to these images
    return Scores(scores, [*notes, *collapses({score.name: score for score in scores})])


def _predictions(observations: Observations | None) -> Any:
    return None if observations is None or observations.predictions is None else observations.predictions[:]
