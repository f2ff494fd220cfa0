"""What can be read off features: the class, by a logistic regression or a small network, or numbers, by a ridge regression.

All take features (n, K) and class labels (n,) or numbers (n, N) as arrays or tensors, and return a function from further
features to those. A fit runs on the device of the features; scikit-learn's takes minutes for thousands of images on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import Tensor

Array = npt.NDArray[Any]
Fit = Callable[[Tensor, Tensor, int], Callable[[Tensor], Tensor]]  # features, classes 0 … N − 1, seed → logits of rows

_PENALTIES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # λ in mean loss + λ/2 ‖W‖², strongest first
_RIDGES = (1e3, 1e2, 1e1, *_PENALTIES)  # λ in mean squared error + λ ‖W‖²; the strongest leave only the mean
_FOLDS, _HELD_OUT = 3, 5  # of the cross-validation; one fifth of the images decides when to stop training the network
_ROUGH, _PRECISE = 40, 200  # L-BFGS iterations; a rough fit is enough to choose a penalty
_HIDDEN, _DROP_INPUT, _DROP_HIDDEN = 512, 0.3, 0.5
_RATE, _BATCH, _EPOCHS, _PATIENCE = 3e-3, 256, 100, 10


def logistic_regression(features: Any, labels: Any, *, seed: int = 0) -> Callable[[Any], Array]:
    """Multinomial logistic regression, with the L2 penalty that has the best accuracy in three-fold cross-validation.

    Ties are broken by the likelihood. The search stops after two weaker penalties that are no better. `seed` draws the folds.
    """
    return _classifier(_fit_regression, features, labels, seed)


def two_layer_network(features: Any, labels: Any, *, seed: int = 0) -> Callable[[Any], Array]:
    """One hidden layer with dropout, trained until accuracy on held-out images stops rising; `seed` draws these and weights."""
    return _classifier(_fit_network, features, labels, seed)


def ridge_regression(features: Any, targets: Any, *, seed: int = 0) -> Callable[[Any], Array]:
    """Linear regression to targets (n, N), with the L2 penalty that has the least error in three-fold cross-validation.

    One penalty for all targets, solved in closed form. `seed` draws the folds.
    """
    standardised = _standardiser(features, torch.float64)
    rows = standardised(features)
    wanted = torch.as_tensor(_as_float64(targets), device=rows.device)
    fold = _folds(torch.zeros(len(rows), dtype=torch.int64, device=rows.device), _FOLDS, seed)
    errors = [0.0] * len(_RIDGES)
    for left_out in range(_FOLDS):
        outside = fold == left_out
        for place, predict in enumerate(_ridges(rows[~outside], wanted[~outside], _RIDGES)):
            errors[place] += float((predict(rows[outside]) - wanted[outside]).square().sum())
    (best,) = _ridges(rows, wanted, [_RIDGES[int(np.argmin(errors))]])
    return lambda others: best(standardised(others)).cpu().numpy()


def _classifier(fit: Fit, features: Any, labels: Any, seed: int) -> Callable[[Any], Array]:
    standardised = _standardiser(features, torch.float32)
    classes, targets = np.unique(np.asarray(labels), return_inverse=True)
    rows = standardised(features)
    logits = fit(rows, torch.as_tensor(targets, device=rows.device), seed)
    return lambda others: classes[logits(standardised(others)).argmax(1).cpu().numpy()]


def _standardiser(features: Any, dtype: torch.dtype) -> Callable[[Any], Tensor]:
    """From rows to tensors on the device of the features, each column with their mean and deviation."""
    device = features.device if isinstance(features, Tensor) else None
    train = _as_float64(features)
    mean, scale = train.mean(0), train.std(0)
    scale[scale <= 1e-7 * np.abs(train).max(0)] = np.inf  # a column that is constant up to rounding becomes 0
    return lambda rows: torch.as_tensor((_as_float64(rows) - mean) / scale, dtype=dtype, device=device)


def _as_float64(features: Any) -> Array:
    return np.asarray(features.detach().cpu().double() if isinstance(features, Tensor) else features, dtype=np.float64)


def _fit_regression(features: Tensor, targets: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
    classes, fold = int(targets.max()) + 1, _folds(targets, _FOLDS, seed)
    inside = [(features[fold != left_out], targets[fold != left_out]) for left_out in range(_FOLDS)]
    outside = [(features[fold == left_out], targets[fold == left_out]) for left_out in range(_FOLDS)]
    weights = [_class_frequencies(*part, classes) for part in inside]
    best, best_place = (-1.0, 0.0), 0
    for place, penalty in enumerate(_PENALTIES):  # each fit starts from the one with the next stronger penalty
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


def _ridges(rows: Tensor, targets: Tensor, penalties: Sequence[float]) -> list[Callable[[Tensor], Tensor]]:
    """A prediction for each penalty, from one decomposition."""
    center, level = rows.mean(0), targets.mean(0)
    sizes, turn = torch.linalg.eigh((rows - center).T @ (rows - center) / len(rows))
    pull = turn.T @ (rows - center).T @ (targets - level) / len(rows)

    def regression(penalty: float) -> Callable[[Tensor], Tensor]:
        weights = turn @ (pull / (sizes.clamp_min(0) + penalty)[:, None])
        return lambda others: level + (others - center) @ weights

    return [regression(penalty) for penalty in penalties]


def _fit_network(features: Tensor, targets: Tensor, seed: int) -> Callable[[Tensor], Tensor]:
    device, fold = features.device, _folds(targets, _HELD_OUT, seed)
    generator = torch.Generator().manual_seed(seed)  # on the CPU, so that every device gets the same draws
    rows, answers = features[fold > 0], targets[fold > 0]

    def layer(inputs: int, outputs: int, scale: float) -> list[Tensor]:
        weight = torch.randn(inputs, outputs, generator=generator) * scale * (2 / inputs) ** 0.5
        return [weight.to(device).requires_grad_(), torch.zeros(outputs, device=device, requires_grad=True)]

    def drop(values: Tensor, share: float) -> Tensor:
        return values * (torch.rand(values.shape, generator=generator) >= share).to(device) / (1 - share)

    def logits(rows: Tensor, parameters: list[Tensor], training: bool = False) -> Tensor:
        inner, inner_bias, outer, outer_bias = parameters
        hidden = torch.addmm(inner_bias, drop(rows, _DROP_INPUT) if training else rows, inner).relu()
        return torch.addmm(outer_bias, drop(hidden, _DROP_HIDDEN) if training else hidden, outer)

    # Small initial logits and input dropout keep the network from memorising hundreds of noisy features.
    parameters = [*layer(features.shape[1], _HIDDEN, 1.0), *layer(_HIDDEN, int(targets.max()) + 1, 0.1)]
    optimizer = torch.optim.AdamW(parameters, lr=_RATE, weight_decay=1.0)
    best, kept, waited = (-1.0, 0.0), parameters, 0
    for _ in range(_EPOCHS):
        for batch in torch.split(torch.randperm(len(rows), generator=generator).to(device), _BATCH):
            optimizer.zero_grad()
            with torch.enable_grad():
                F.cross_entropy(logits(rows[batch], parameters, training=True), answers[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        reached = _quality(logits(features[fold == 0], parameters), targets[fold == 0])
        if reached > best:
            best, kept, waited = reached, [parameter.detach().clone() for parameter in parameters], 0
        elif (waited := waited + 1) == _PATIENCE:
            break
    return lambda rows: logits(rows, kept)


def _quality(logits: Tensor, answers: Tensor) -> tuple[float, float]:
    """Correct answers and, to break ties, the log-likelihood."""
    return float((logits.argmax(1) == answers).sum()), -F.cross_entropy(logits, answers).item()


def _folds(targets: Tensor, folds: int, seed: int) -> Tensor:
    """A fold for every image, stratified by class."""
    shuffled = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed)).to(targets.device)
    return shuffled[targets[shuffled].argsort(stable=True)].argsort() % folds


def _class_frequencies(features: Tensor, targets: Tensor, classes: int) -> Tensor:
    """Initial weights (K + 1, N) that predict how frequent the classes are; the last row is the intercept."""
    intercept = (torch.bincount(targets, minlength=classes) + 0.5).log().to(features)
    return F.pad(intercept[None], (0, 0, features.shape[1], 0))


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
