"""Two classifiers that answer 'can the class be read off these features?': a logistic regression and a small network.

Both take features (n, K) and class labels (n,) as arrays or tensors and return a function from further features to labels.
Columns are standardised with the mean and deviation of the training features. A fit runs on the device of the features;
scikit-learn's logistic regression runs on a CPU only, where it takes minutes for thousands of images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import Tensor

Array = npt.NDArray[Any]
Classify = Callable[[Any], Array]
Fit = Callable[
    [Tensor, Tensor, int], Callable[[Tensor], Tensor]
]  # (features, classes 0 … N − 1, seed) → logits of rows

_ROUNDING = 1e-7  # a column that varies by less than this share of its size is constant
_PENALTIES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # λ in mean loss + λ/2 ‖W‖², strongest first
_FOLDS = 3
_ROUGH, _PRECISE = 40, 200  # maximum L-BFGS iterations; a rough fit is enough to choose a penalty
_HIDDEN, _DROP_INPUT, _DROP_HIDDEN = 512, 0.3, 0.5
_RATE, _BATCH, _EPOCHS, _PATIENCE = 3e-3, 256, 100, 10
_HELD_OUT = 5  # one fifth of the images decides when to stop training the network


def logistic_regression(features: Any, labels: Any, *, seed: int = 0) -> Classify:
    """Multinomial logistic regression, with the L2 penalty that has the best accuracy in three-fold cross-validation.

    Ties are broken by the likelihood. Each fit starts from the one with the next stronger penalty, and the search stops after
    two weaker penalties in a row that are no better. `seed` draws the folds.
    """
    return _classifier(_fit_regression, features, labels, seed)


def two_layer_network(features: Any, labels: Any, *, seed: int = 0) -> Classify:
    """One hidden layer of ReLUs with dropout, trained by AdamW until the accuracy on held-out images stops rising.

    `seed` draws the held-out images and the weights.
    """
    return _classifier(_fit_network, features, labels, seed)


def _classifier(fit: Fit, features: Any, labels: Any, seed: int) -> Classify:
    train = _as_float64(features)
    classes, targets = np.unique(np.asarray(labels), return_inverse=True)
    device = features.device if isinstance(features, Tensor) else None
    mean, deviation = train.mean(0), train.std(0)
    varies = deviation > _ROUNDING * np.abs(train).max(0)

    def standardised(rows: Array) -> Tensor:
        scaled = np.divide(rows - mean, deviation, out=np.zeros_like(rows), where=varies)
        return torch.as_tensor(scaled, dtype=torch.float32, device=device)

    logits = fit(standardised(train), torch.as_tensor(targets, device=device), seed)

    def classify(rows: Any) -> Array:
        found: Array = classes[logits(standardised(_as_float64(rows))).argmax(1).cpu().numpy()]
        return found

    return classify


def _as_float64(features: Any) -> Array:
    if isinstance(features, Tensor):
        features = features.detach().cpu().double()
    return np.asarray(features, dtype=np.float64)


def _fit_regression(features: Tensor, targets: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
    classes = int(targets.max()) + 1
    fold = _folds(targets, _FOLDS, seed)
    inside = [(features[fold != left_out], targets[fold != left_out]) for left_out in range(_FOLDS)]
    outside = [(features[fold == left_out], targets[fold == left_out]) for left_out in range(_FOLDS)]
    weights = [_class_frequencies(*part, classes) for part in inside]
    best, best_place = (-1.0, 0.0), 0
    for place, penalty in enumerate(_PENALTIES):
        weights = [_minimise(*part, start, penalty, _ROUGH) for part, start in zip(inside, weights, strict=True)]
        logits = torch.cat([_logits(part[0], found) for part, found in zip(outside, weights, strict=True)])
        reached = _quality(logits, torch.cat([part[1] for part in outside]))
        if reached > best:
            best, best_place = reached, place
        elif place > best_place + 1:
            break
    final = _class_frequencies(features, targets, classes)
    for penalty in _PENALTIES[max(0, best_place - 1) : best_place + 1]:
        final = _minimise(features, targets, final, penalty, _PRECISE)
    return lambda rows: _logits(rows, final)


def _fit_network(features: Tensor, targets: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
    classes, device = int(targets.max()) + 1, features.device
    generator = torch.Generator().manual_seed(seed)  # on the CPU, so that every device gets the same draws
    fold = _folds(targets, _HELD_OUT, seed)
    rows, answers = features[fold > 0], targets[fold > 0]
    others, expected = features[fold == 0], targets[fold == 0]

    def layer(inputs: int, outputs: int, scale: float) -> list[Tensor]:
        weight = torch.randn(inputs, outputs, generator=generator) * scale * (2 / inputs) ** 0.5
        return [weight.to(device).requires_grad_(), torch.zeros(outputs, device=device, requires_grad=True)]

    def drop(values: Tensor, share: float) -> Tensor:
        kept = torch.rand(values.shape, generator=generator) >= share
        return values * kept.to(device) / (1 - share)

    def logits(rows: Tensor, parameters: list[Tensor], training: bool = False) -> Tensor:
        inner, inner_bias, outer, outer_bias = parameters
        hidden = torch.addmm(inner_bias, drop(rows, _DROP_INPUT) if training else rows, inner).relu()
        return torch.addmm(outer_bias, drop(hidden, _DROP_HIDDEN) if training else hidden, outer)

    # Small initial logits and input dropout keep the network from memorising hundreds of noisy features.
    parameters = [*layer(features.shape[1], _HIDDEN, 1.0), *layer(_HIDDEN, classes, 0.1)]
    optimizer = torch.optim.AdamW(parameters, lr=_RATE, weight_decay=1.0)
    best, kept, waited = (-1.0, 0.0), parameters, 0
    for _ in range(_EPOCHS):
        for batch in torch.split(torch.randperm(len(rows), generator=generator).to(device), _BATCH):
            optimizer.zero_grad()
            with torch.enable_grad():
                F.cross_entropy(logits(rows[batch], parameters, training=True), answers[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            reached = _quality(logits(others, parameters), expected)
        waited += 1
        if reached > best:
            best, kept, waited = reached, [parameter.detach().clone() for parameter in parameters], 0
        if waited == _PATIENCE:
            break
    return lambda rows: logits(rows, kept)


def _quality(logits: Tensor, answers: Tensor) -> tuple[float, float]:
    """Correct answers and, to break ties, the log-likelihood."""
    return float((logits.argmax(1) == answers).sum()), -float(F.cross_entropy(logits, answers))


def _folds(targets: Tensor, folds: int, seed: int) -> Tensor:
    """A fold for every image, stratified by class."""
    shuffled = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed)).to(targets.device)
    order = shuffled[torch.argsort(targets[shuffled], stable=True)]
    fold = torch.empty_like(targets)
    fold[order] = torch.arange(len(targets), device=targets.device) % folds
    return fold


def _class_frequencies(features: Tensor, targets: Tensor, classes: int) -> Tensor:
    """Initial weights (K + 1, N) that predict how frequent the classes are; the last row is the intercept."""
    weights = features.new_zeros(features.shape[1] + 1, classes)
    weights[-1] = (torch.bincount(targets, minlength=classes) + 0.5).log()
    return weights


def _logits(rows: Tensor, weights: Tensor) -> Tensor:
    return torch.addmm(weights[-1], rows, weights[:-1])


def _minimise(features: Tensor, targets: Tensor, weights: Tensor, penalty: float, iterations: int) -> Tensor:
    """Mean cross-entropy + λ/2 ‖W‖² by L-BFGS; the matrix products run on the device of the features."""
    one_hot = F.one_hot(targets, weights.shape[1]).to(features.dtype)

    def loss(point: Array) -> tuple[float, Array]:
        here = torch.as_tensor(point, dtype=features.dtype, device=features.device).view_as(weights)
        log_shares = _logits(features, here).log_softmax(1)
        cost = F.nll_loss(log_shares, targets) + penalty / 2 * here[:-1].square().sum()
        residual = log_shares.exp_().sub_(one_hot).div_(len(targets))
        slopes = torch.addmm(here[:-1], features.T, residual, beta=penalty)
        gradient = torch.cat([slopes, residual.sum(0, keepdim=True)])
        return float(cost), gradient.double().cpu().numpy().ravel()

    options = {"maxiter": iterations, "gtol": 1e-5, "ftol": 1e-8}
    found = minimize(loss, weights.double().cpu().numpy().ravel(), jac=True, method="L-BFGS-B", options=options)
    return torch.as_tensor(found.x, dtype=features.dtype, device=features.device).view_as(weights)
