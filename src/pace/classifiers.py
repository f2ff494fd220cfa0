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
from torch import Tensor

Array = npt.NDArray[Any]
Fit = Callable[[Tensor, Tensor, int], Callable[[Tensor], Tensor]]  # features, classes 0 … N − 1, seed → logits of rows

_PENALTIES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # λ in mean loss + λ/2 ‖W‖², strongest first
_RIDGES = (1e3, 1e2, 1e1, *_PENALTIES)  # λ in mean squared error + λ ‖W‖²; the strongest leave only the mean
_FOLDS, _HELD_OUT = 3, 5  # of the cross-validation; one fifth of the images decides when to stop training the network
_ROUGH, _PRECISE = 40, 200  # L-BFGS iterations; a rough fit is enough to choose a penalty
_HISTORY, _AT_ONCE = 8, 1 << 23  # steps that L-BFGS remembers, and logits in memory
_HIDDEN, _DROP_INPUT, _DROP_HIDDEN = 512, 0.3, 0.5
_RATE, _BATCH, _EPOCHS, _PATIENCE = 3e-3, 256, 100, 10


def logistic_regression(features: Any, labels: Any, *, seed: int = 0) -> Callable[[Any], Array]:
    """Multinomial logistic regression, with the L2 penalty that has the best accuracy in three-fold cross-validation.

    Ties are broken by the likelihood. All penalties and folds are fitted together. `seed` draws the folds.
    """
    return _classifier(_fit_regression, features, labels, seed)


def penalised_regression(features: Tensor, targets: Tensor, penalty: float) -> Tensor:
    """Weights (K + 1, N), the last row the intercept, that minimise mean cross-entropy + penalty / 2 ‖W‖²."""
    everything = torch.ones(1, len(features), dtype=torch.bool, device=features.device)
    return _minimise(features, targets, everything, features.new_tensor([penalty]))[0]


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
    fold = _folds(targets, _FOLDS, seed)
    learns = torch.stack([fold != left_out for left_out in range(_FOLDS)])
    penalties = features.new_tensor(_PENALTIES)
    folds = _minimise(
        features, targets, learns.repeat(len(penalties), 1), penalties.repeat_interleave(_FOLDS), iterations=_ROUGH
    ).view(len(penalties), _FOLDS, features.shape[1] + 1, -1)
    reached = []
    for of_penalty in folds:
        logits = torch.stack([_logits(features, found) for found in of_penalty])
        reached.append(_quality(logits[fold, torch.arange(len(fold), device=fold.device)], targets))
    best = max(range(len(reached)), key=reached.__getitem__)
    everything = torch.ones_like(learns[:1])
    (final,) = _minimise(features, targets, everything, penalties[best, None], folds[best].mean(0)[None], _PRECISE)
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


def _logits(rows: Tensor, weights: Tensor) -> Tensor:
    return torch.addmm(weights[-1], rows, weights[:-1])


def _minimise(
    features: Tensor,
    targets: Tensor,
    learns: Tensor,
    penalties: Tensor,
    start: Tensor | None = None,
    iterations: int = _PRECISE,
) -> Tensor:
    """Weights (B, K + 1, N), the last row the intercept, of least mean cross-entropy + λ/2 ‖W‖² in B problems at once.

    Problem b has penalty λ_b (B,) and learns from the rows that `learns` (B, M) marks. Each goes its own way by L-BFGS, in
    coordinates in which the features are uncorrelated and with their variances for a first guess at the curvature; a product
    for all of them gives the slopes. Those that have settled leave.
    """
    classes = int(targets.max()) + 1
    counted = (learns / learns.sum(1, keepdim=True)).to(features)  # (B, M)
    sizes, turn = torch.linalg.eigh((features.double().T @ features.double()) / len(features))
    rows = F.pad(features @ turn.to(features), (0, 1), value=1.0)
    shrink = F.pad(penalties[:, None].expand(-1, len(turn)), (0, 1))[:, :, None]  # the intercept is free
    curved = F.pad(sizes.clamp_min(0).to(features), (0, 1), value=1.0)[:, None] / classes
    if start is None:
        shares = counted @ F.one_hot(targets, classes).to(features) + 0.5 / learns.sum(1, keepdim=True)
        x = F.pad(shares.log()[:, None], (0, 0, features.shape[1], 0))
    else:
        x = torch.cat([turn.to(features).T @ start[:, :-1], start[:, -1:]], 1)

    def slope(x: Tensor, counted: Tensor, shrink: Tensor) -> tuple[Tensor, Tensor]:
        """The costs (B,) and their slopes (B, K + 1, N)."""
        side_by_side = x.transpose(0, 1).flatten(1)
        costs, slopes = (shrink * x.square()).sum((1, 2)).double() / 2, torch.zeros_like(side_by_side)
        for some in torch.split(torch.arange(len(rows), device=rows.device), max(1, _AT_ONCE // side_by_side.shape[1])):
            shares = (rows[some] @ side_by_side).view(len(some), len(x), classes).log_softmax(2)
            answers, weight = targets[some][:, None, None].expand(-1, len(x), 1), counted[:, some].T
            costs -= (shares.gather(2, answers)[:, :, 0].double() * weight).sum(0)
            residual = (
                shares.exp_().scatter_add_(2, answers, shares.new_full(answers.shape, -1.0)).mul_(weight[:, :, None])
            )
            slopes.addmm_(rows[some].T, residual.flatten(1))
        return costs, slopes.view(-1, len(x), classes).transpose(0, 1) + shrink * x

    found, left = x.clone(), torch.arange(len(x), device=x.device)
    cost, gradient = slope(x, counted, shrink)
    move, step = -gradient / (curved + shrink), torch.ones_like(cost)
    steps: list[tuple[Tensor, Tensor, Tensor]] = []  # s, y and 1 / sᵀy, 0 where there was no step
    for _ in range(iterations):
        trial = x + step.to(x)[:, None, None] * move
        after, fresh = slope(trial, counted, shrink)
        expected = step * _dot(gradient, move)
        lower = after <= cost + 1e-4 * expected + 1e-7 * cost
        gain, s, y = cost - after, trial - x, fresh - gradient
        product = _dot(s, y)
        good = lower & (product > 0)
        steps = [*steps[1 - _HISTORY :], (s, y, torch.where(good, 1 / product, 0.0))]
        x, gradient = (torch.where(lower[:, None, None], new, old) for new, old in ((trial, x), (fresh, gradient)))
        cost = torch.where(lower, after, cost)
        settled = lower & ((gradient.abs().amax((1, 2)) <= 1e-5) | (gain <= 1e-8 * cost.clamp_min(1))) | (step < 1e-4)
        if bool(settled.any()):
            found[left] = x
            x, gradient, counted, shrink, cost, step, lower, move, left = (
                part[~settled] for part in (x, gradient, counted, shrink, cost, step, lower, move, left)
            )
            steps = [(s[~settled], y[~settled], inverse[~settled]) for s, y, inverse in steps]
            if len(left) == 0:
                break
        onward = _quasi_newton(gradient, steps, 1 / (curved + shrink))
        move = torch.where(lower[:, None, None], onward, move)
        step = torch.where(lower, 1.0, step / 4)
    found[left] = x
    return torch.cat([turn.to(found) @ found[:, :-1], found[:, -1:]], 1)


def _quasi_newton(gradient: Tensor, steps: list[tuple[Tensor, Tensor, Tensor]], first: Tensor) -> Tensor:
    """L-BFGS's direction for each problem (Nocedal & Wright, algorithm 7.4); `first` is the guess at the inverse Hessian."""
    weights = []
    for s, y, inverse in reversed(steps):
        weight = (inverse * _dot(s, gradient)).to(gradient)[:, None, None]
        gradient = gradient - weight * y
        weights.append(weight)
    _, y, inverse = steps[-1]  # sets the scale
    scale = torch.where(inverse > 0, 1 / (inverse * _dot(y, first * y)), 1.0).to(gradient)
    move = first * gradient * scale[:, None, None]
    for (s, y, inverse), weight in zip(steps, reversed(weights), strict=True):
        move = move + s * (weight - (inverse * _dot(y, move)).to(move)[:, None, None])
    return -move


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """Of each problem (B,), float64."""
    return (one * other).sum((1, 2)).double()
