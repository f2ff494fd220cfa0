"""Faithfulness: can the transformer's prediction ŷ be recovered from an explanation?

θ is used as the method returns it, signs and scale included; the classifiers standardise its columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pace.metrics.agreement import Contingency
from pace.metrics.declare import Array, Measure, metric
from pace.metrics.inputs import as_array, labels_of, theta_of

Fit = Callable[..., Callable[[Any], Array]]

_LEAST = 1e-6  # probability that a logit is taken of
_SHUFFLES = 10  # of ŷ, for the agreement expected by chance


@metric(title="Faithfulness", better="higher", range=(0, 1))
def faithfulness(theta_train: Any, yhat_train: Any, theta_test: Any, yhat_test: Any, *, seed: int = 0) -> Measure:
    """Share of test images whose predicted class a logistic regression recovers from the explanation.

    Test accuracy of a logistic regression from θ to ŷ that was fitted on the training images, as in the paper.
    ŷ as labels (M,) or distributions (M, N), of which the argmax counts. The penalty is chosen by three-fold cross-validation
    on the training images (`seed` draws the folds). A class that is never predicted in training cannot be recovered. With
    `theta_train` on a GPU the fit runs there. The bootstrap resamples test images; the regression is not fitted again.
    """
    from pace.classifiers import logistic_regression

    return _accuracy(logistic_regression, theta_train, yhat_train, theta_test, yhat_test, seed)


@metric(title="Faithfulness, prediction given", better=None, range=(0, 1))
def faithfulness_given_prediction(
    theta_train_given: Any, yhat_train: Any, theta_test_given: Any, yhat_test: Any, *, seed: int = 0
) -> Measure:
    """The same when ŷ was given to the explanation; far above faithfulness, the explanation only repeats it.

    `faithfulness` of θ inferred with ŷ given (``explain(…, use_predictions=True)``).
    """
    return faithfulness.measure(theta_train_given, yhat_train, theta_test_given, yhat_test, seed=seed)


@metric(title="Non-linear faithfulness", better="higher", range=(0, 1))
def nonlinear_faithfulness(
    theta_train: Any, yhat_train: Any, theta_test: Any, yhat_test: Any, *, seed: int = 0
) -> Measure:
    """Share of test images whose predicted class a small neural network recovers from the explanation.

    `faithfulness` with a two-layer network. Far above `faithfulness`, the concepts are there but entangled.
    Training stops when accuracy on a held-out fifth of the training images stops rising. `seed` draws these and the weights.
    """
    from pace.classifiers import two_layer_network

    return _accuracy(two_layer_network, theta_train, yhat_train, theta_test, yhat_test, seed)


@metric(title="Majority class", better=None, range=(0, 1))
def majority_class(yhat_train: Any, yhat_test: Any) -> Measure:
    """Faithfulness without any explanation: the share of test images in the most frequently predicted class.

    Test accuracy of always naming the class most often predicted in training: what a constant θ gets.
    """
    train, test = labels_of(yhat_train, None, "yhat_train"), labels_of(yhat_test, None, "yhat_test")
    classes, counts = np.unique(train, return_counts=True)
    return Measure.mean(test == classes[counts.argmax()])


@metric(title="Faithfulness over all classes", better="higher", range=(-math.inf, 1))
def logit_fidelity(theta_train: Any, yhat_train: Any, theta_test: Any, yhat_test: Any, *, seed: int = 0) -> Measure:
    """Share of the variation in the logits of all classes that a linear regression recovers from the explanation.

    R² on test images of a ridge regression from θ to the logits, log ŷ less its mean over classes, over all classes together:
    1 − Σ squared errors / Σ squared distances to the mean of the training images. Below 0 is worse than that mean.
    Probabilities below 1e-6 count as 1e-6. The penalty is chosen by three-fold cross-validation on the training images (`seed`
    draws the folds); the bootstrap resamples test images. NaN where ŷ are labels, which have no logits.
    """
    from pace.classifiers import ridge_regression

    train, test = _thetas(theta_train, theta_test)
    logits, answers = _logits(yhat_train, len(train), "yhat_train"), _logits(yhat_test, len(test), "yhat_test")
    if logits is None or answers is None:
        return Measure.mean(np.full(len(test), np.nan))
    if logits.shape[1] != answers.shape[1]:
        raise ValueError(f"yhat_test: expected {logits.shape[1]} classes as yhat_train; found {answers.shape[1]}")
    predict = ridge_regression(theta_train, logits, seed=seed)
    missed = np.square(answers - predict(test)).sum(1)
    varied = np.square(answers - logits.mean(0)).sum(1)

    def values(weights: Array) -> Array:
        total = weights @ varied
        share: Array = np.divide(weights @ missed, total, out=np.full(len(weights), np.nan), where=total > 0)
        return 1 - share

    return Measure(len(test), values)


@metric(title="Faithfulness over random concepts", better="higher", range=(-math.inf, math.inf))
def fidelity_over_random(
    theta_train: Any, theta_train_random: Any, yhat_train: Any, theta_test: Any, theta_test_random: Any, yhat_test: Any,
    *, seed: int = 0,
) -> Measure:  # fmt: skip
    """How much more of the logits is recovered than from concepts drawn by lot; at 0 nothing was learned about the prediction.

    `logit_fidelity` less that of random concepts (`pace.metrics.by_lot`), over the same images.
    """
    own = logit_fidelity.measure(theta_train, yhat_train, theta_test, yhat_test, seed=seed)
    lot = logit_fidelity.measure(theta_train_random, yhat_train, theta_test_random, yhat_test, seed=seed)
    return Measure(own.images, lambda weights: own.values(weights) - lot.values(weights))


@metric(title="Class echo", better=None, range=(0, 1))
def class_echo(theta: Any, yhat: Any, *, seed: int = 0) -> Measure:
    """Agreement of an image's leading concept with its predicted class; 0 is chance, at 1 concepts are classes under
    another name.

    Normalised mutual information v of argmax_k |θ_mk| with ŷ_m over images, corrected for chance.
    Few images in many concepts and classes agree by accident: with v₀ the mean over shuffled ŷ it is (v − v₀) / (1 − v₀).
    """
    leading, rng = np.abs(theta_of(theta)).argmax(1), np.random.default_rng(seed)
    images, classes = len(leading), labels_of(yhat, len(leading))

    def agreement(names: Array) -> Measure:
        return Contingency(images, np.arange(images), leading, names).mutual_information()

    found, chance = agreement(classes), np.mean([agreement(rng.permutation(classes)).value() for _ in range(_SHUFFLES)])
    beyond = max(1 - chance, 1e-9)
    return Measure(images, lambda weights: ((found.values(weights) - chance) / beyond).clip(0, 1))


def _accuracy(fit: Fit, theta_train: Any, yhat_train: Any, theta_test: Any, yhat_test: Any, seed: int) -> Measure:
    train, test = _thetas(theta_train, theta_test)
    labels, answers = labels_of(yhat_train, len(train), "yhat_train"), labels_of(yhat_test, len(test), "yhat_test")
    if (labels == labels[0]).all():
        raise ValueError(f"yhat_train: expected at least two predicted classes; found class {labels[0]} alone")
    classify = fit(theta_train, labels, seed=seed)
    return Measure.mean(classify(test) == answers)


def _thetas(theta_train: Any, theta_test: Any) -> tuple[Array, Array]:
    train, test = theta_of(theta_train, "theta_train"), theta_of(theta_test, "theta_test")
    if train.shape[1] != test.shape[1]:
        raise ValueError(f"theta_test: expected {train.shape[1]} concepts as theta_train has; found {test.shape[1]}")
    return train, test


def _logits(yhat: Any, images: int, name: str) -> Array | None:
    """log ŷ (M, N) less its mean over classes; None for labels."""
    labels_of(yhat, images, name)  # the checks
    shares = as_array(yhat)
    if shares.ndim == 1:
        return None
    logits = np.log(shares.astype(np.float64).clip(_LEAST))
    centred: Array = logits - logits.mean(1, keepdims=True)
    return centred
