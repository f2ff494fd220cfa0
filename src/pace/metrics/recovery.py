"""Can the transformer's prediction ŷ be recovered from an explanation?

Rows of θ are taken as the method returns them, signs and scale included; columns are standardised with the mean and the
deviation of the training images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pace.metrics.declare import Array, Measure, metric
from pace.metrics.inputs import labels_of, theta_of

if TYPE_CHECKING:
    from torch import Tensor

_ROUNDING = 1e-7  # a column that varies by less of its size than this does not vary


@metric(
    title="Faithfulness",
    better="higher",
    range=(0, 1),
    meaning="Share of test images whose predicted class a logistic regression reads off the explanation.",
)
def faithfulness(theta_train: Any, yhat_train: Any, theta_test: Any, yhat_test: Any, *, seed: int = 0) -> Measure:
    """Accuracy on test images of a logistic regression from θ to ŷ that was fitted on the training images, as in the paper.

    ŷ as labels (M,) or distributions (M, N), whose largest entry counts. The penalty is chosen by three-fold cross-validation
    on the training images (`seed` makes the folds). A class that is never predicted in training cannot be recovered. With
    `theta_train` on a GPU the fit runs there. The bootstrap draws test images; the regression is not fitted again.
    """
    return _linear(theta_train, yhat_train, theta_test, yhat_test, seed)


@metric(
    title="Faithfulness, prediction given",
    better=None,
    range=(0, 1),
    meaning="The same when the explanation was told the prediction; far above faithfulness, it repeats what it was told.",
)
def faithfulness_given_prediction(
    theta_train: Any, yhat_train: Any, theta_test: Any, yhat_test: Any, *, seed: int = 0
) -> Measure:
    """`faithfulness` of θ that were inferred with ŷ at hand (``explain(…, use_predictions=True)``)."""
    return _linear(theta_train, yhat_train, theta_test, yhat_test, seed)


@metric(
    title="Non-linear faithfulness",
    better="higher",
    range=(0, 1),
    meaning="Share of test images whose predicted class a small neural network reads off the explanation.",
)
def nonlinear_faithfulness(
    theta_train: Any, yhat_train: Any, theta_test: Any, yhat_test: Any, *, seed: int = 0
) -> Measure:
    """As `faithfulness`, with a network of two layers. Far above it, the concepts are there but entangled.

    Training stops when a fifth of the training images, held out, is recovered no better. `seed` draws these, and the weights.
    """
    from pace.metrics.classifiers import two_layer_network

    inputs = _inputs(theta_train, yhat_train, theta_test, yhat_test)
    return Measure.mean(inputs.correct(two_layer_network(inputs.train, inputs.targets, seed)))


@metric(
    title="Majority class",
    better=None,
    range=(0, 1),
    meaning="What faithfulness is worth without any explanation: always naming the most frequent predicted class.",
)
def majority_class(yhat_train: Any, yhat_test: Any) -> Measure:
    """Accuracy on test images of naming the class most often predicted in training: what a constant θ gets."""
    train, test = (
        labels_of(yhat_train, len(yhat_train), "yhat_train"),
        labels_of(yhat_test, len(yhat_test), "yhat_test"),
    )
    classes, counts = np.unique(train, return_counts=True)
    return Measure.mean((test == classes[counts.argmax()]).astype(np.float64))


def _linear(theta_train: Any, yhat_train: Any, theta_test: Any, yhat_test: Any, seed: int) -> Measure:
    from pace.metrics.classifiers import softmax_regression

    inputs = _inputs(theta_train, yhat_train, theta_test, yhat_test)
    return Measure.mean(inputs.correct(softmax_regression(inputs.train, inputs.targets, seed)))


class _Inputs(NamedTuple):
    """Standardised θ on one device, and ŷ as positions in `classes`."""

    train: Tensor
    targets: Tensor
    test: Tensor
    classes: Array
    answers: Array

    def correct(self, classify: Callable[[Tensor], Tensor]) -> Array:
        found: Array = self.classes[classify(self.test).cpu().numpy()] == self.answers
        return found.astype(np.float64)


def _inputs(theta_train: Any, yhat_train: Any, theta_test: Any, yhat_test: Any) -> _Inputs:
    import torch

    train, test = theta_of(theta_train, "theta_train"), theta_of(theta_test, "theta_test")
    if train.shape[1] != test.shape[1]:
        raise ValueError(f"theta_test: expected {train.shape[1]} concepts as theta_train has; found {test.shape[1]}")
    labels, answers = labels_of(yhat_train, len(train), "yhat_train"), labels_of(yhat_test, len(test), "yhat_test")
    classes, targets = np.unique(labels, return_inverse=True)
    if len(classes) == 1:
        raise ValueError(
            f"yhat_train has class {classes[0]} alone; expected at least two predicted classes to tell apart"
        )
    centre, spread = train.mean(0), train.std(0)
    varies = spread > _ROUNDING * np.abs(train).max(0)  # what does not vary is left at 0
    device = theta_train.device if isinstance(theta_train, torch.Tensor) else None

    def standardised(theta: Array) -> Tensor:
        rows = np.divide(theta - centre, spread, out=np.zeros_like(theta), where=varies)
        return torch.as_tensor(rows, dtype=torch.float32, device=device)

    return _Inputs(standardised(train), torch.as_tensor(targets, device=device), standardised(test), classes, answers)
