"""The two classifiers behind faithfulness: from standardised features (n, K) to class positions (n,), on any device.

Both return a function that classifies further rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import Tensor

from pace.metrics.declare import Array

Classify = Callable[[Tensor], Tensor]

_PENALTIES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # λ in mean loss + λ/2 ‖W‖², strongest first
_FOLDS = 3
_ROUGH, _PRECISE = 40, 200  # L-BFGS iterations at most
_HIDDEN, _DROP_INPUT, _DROP_HIDDEN = 512, 0.3, 0.5
_RATE, _BATCH, _EPOCHS, _PATIENCE = 3e-3, 256, 100, 10
_HELD_OUT = 5  # every fifth image decides when the network has learned enough


def softmax_regression(features: Tensor, targets: Tensor, seed: int) -> Classify:
    """Multinomial logistic regression; of the penalties the one with the best cross-validated accuracy.

    Equal accuracies are settled by the likelihood. Along the penalties each fit starts where the stronger one ended, and the
    path ends once two weaker penalties in a row did no better. To choose a penalty a rough fit will do.
    """
    classes = int(targets.max()) + 1
    fold = _folds(targets, _FOLDS, seed)
    inside = [(features[fold != left_out], targets[fold != left_out]) for left_out in range(_FOLDS)]
    outside = [(features[fold == left_out], targets[fold == left_out]) for left_out in range(_FOLDS)]
    weights = [_start(part, classes) for part in inside]
    best, best_place = (-1.0, 0.0), 0
    for place, penalty in enumerate(_PENALTIES):
        weights = [_minimise(*part, start, penalty, _ROUGH) for part, start in zip(inside, weights, strict=True)]
        logits = torch.cat([_logits(part[0], found) for part, found in zip(outside, weights, strict=True)])
        answers = torch.cat([part[1] for part in outside])
        right = float((logits.argmax(1) == answers).sum())
        reached = (right, -float(F.cross_entropy(logits, answers)))
        if reached > best:
            best, best_place = reached, place
        elif place > best_place + 1:
            break
    final = _start((features, targets), classes)
    for penalty in _PENALTIES[max(0, best_place - 1) : best_place + 1]:
        final = _minimise(features, targets, final, penalty, _PRECISE)
    return lambda rows: _logits(rows, final).argmax(1)


def two_layer_network(features: Tensor, targets: Tensor, seed: int) -> Classify:
    """One hidden layer of rectified units with dropout, by AdamW; kept as it was when held-out images were recovered best."""
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

    def logits(rows: Tensor, parameters: list[Tensor], learning: bool = False) -> Tensor:
        inner, inner_bias, outer, outer_bias = parameters
        hidden = torch.addmm(inner_bias, drop(rows, _DROP_INPUT) if learning else rows, inner).relu()
        return torch.addmm(outer_bias, drop(hidden, _DROP_HIDDEN) if learning else hidden, outer)

    # Starting with small logits and dropping inputs is what keeps hundreds of noisy features from being learned by heart.
    parameters = [*layer(features.shape[1], _HIDDEN, 1.0), *layer(_HIDDEN, classes, 0.1)]
    optimizer = torch.optim.AdamW(parameters, lr=_RATE, weight_decay=1.0)
    best, kept, since = (-1.0, 0.0), parameters, 0
    for _ in range(_EPOCHS):
        order = torch.randperm(len(rows), generator=generator).to(device)
        for start in range(0, len(rows), _BATCH):
            batch = order[start : start + _BATCH]
            optimizer.zero_grad()
            with torch.enable_grad():
                F.cross_entropy(logits(rows[batch], parameters, learning=True), answers[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            found = logits(others, parameters)
        reached = (float((found.argmax(1) == expected).sum()), -float(F.cross_entropy(found, expected)))
        since += 1
        if reached > best:
            best, kept, since = reached, [parameter.detach().clone() for parameter in parameters], 0
        if since == _PATIENCE:
            break
    return lambda rows: logits(rows, kept).argmax(1)


def _folds(targets: Tensor, folds: int, seed: int) -> Tensor:
    """A fold for every image; the images of a class are spread as evenly as can be."""
    shuffled = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed)).to(targets.device)
    order = shuffled[torch.argsort(targets[shuffled], stable=True)]
    fold = torch.empty_like(targets)
    fold[order] = torch.arange(len(targets), device=targets.device) % folds
    return fold


def _start(examples: tuple[Tensor, Tensor], classes: int) -> Tensor:
    """Weights (K + 1, N) that say how frequent the classes are, and nothing else; the last row is the intercept."""
    features, targets = examples
    weights = features.new_zeros(features.shape[1] + 1, classes)
    weights[-1] = (torch.bincount(targets, minlength=classes) + 0.5).log()
    return weights


def _logits(rows: Tensor, weights: Tensor) -> Tensor:
    return torch.addmm(weights[-1], rows, weights[:-1])


def _minimise(features: Tensor, targets: Tensor, weights: Tensor, penalty: float, iterations: int) -> Tensor:
    """Mean cross-entropy + λ/2 ‖W‖², by L-BFGS. Products run where the features are, the rest is small."""
    one_hot = F.one_hot(targets, weights.shape[1]).to(features.dtype)

    def loss(point: Array) -> tuple[float, Array]:
        here = torch.as_tensor(point, dtype=features.dtype, device=features.device).view_as(weights)
        log_shares = _logits(features, here).log_softmax(1)
        cost = F.nll_loss(log_shares, targets) + penalty / 2 * here[:-1].square().sum()
        residual = log_shares.exp_().sub_(one_hot).div_(len(targets))
        gradient = torch.cat(
            [torch.addmm(here[:-1], features.T, residual, beta=penalty), residual.sum(0, keepdim=True)]
        )
        return float(cost), gradient.double().cpu().numpy().ravel()

    start = weights.double().cpu().numpy().ravel()
    found = minimize(
        loss, start, jac=True, method="L-BFGS-B", options={"maxiter": iterations, "gtol": 1e-5, "ftol": 1e-8}
    )
    return torch.as_tensor(found.x, dtype=features.dtype, device=features.device).view_as(weights)
