"""Known answers: linear heads, small games, and captum on the same draws."""

import math
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toys import GRID, Toy, linear, read_by_all, read_by_cls

from pace import Observations
from pace.baselines import AGI, LIME, SHAP, Saliency
from pace.baselines.channels import draw_coalitions, lasso


@pytest.fixture(scope="module")
def line():
    """A linear model with its weights for every image's predicted class (M, J, d), and each channel's Shapley value."""
    toy, weights = linear(d=6, classes=3, tokens=7)
    train, test = toy.observe(20, 0), toy.observe(5, 1)
    own = weights[test.predictions.argmax(1)]
    shapley = (own * (test.embeddings - train.embeddings.mean(0))).sum(1)
    return SimpleNamespace(toy=toy, train=train, test=test, own=own.numpy(), shapley=shapley.numpy())


def test_saliency_of_a_linear_model_is_the_mean_size_of_its_weights(line):
    found = Saliency().fit(line.toy, line.train).explain(line.test)
    np.testing.assert_allclose(found.theta, np.abs(line.own).mean(1), rtol=1e-5)
    np.testing.assert_allclose(found.phi, np.abs(line.own), rtol=1e-5)


def test_where_the_head_is_linear_and_reads_cls_saliency_knows_the_prediction_and_nothing_else():
    weights = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    toy = Toy(lambda e: e[:, 0] @ weights.T, 4)
    train, test = toy.observe(20, 0), toy.observe(8, 1)
    own = weights[test.predictions.argmax(1)]
    np.testing.assert_allclose(Saliency().fit(toy, train).explain(test).theta, own.abs() / 7, rtol=1e-5)
    shap = SHAP().fit(toy, train)
    first, second = (shap.explain(test, seed=seed).theta for seed in (0, 1))
    np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-6)
    expected = own * (test.embeddings[:, 0] - train.embeddings[:, 0].mean(0))
    np.testing.assert_allclose(first, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"samples": 1}, {"estimator": "kernel", "samples": 30}])
def test_shap_of_a_linear_model_is_exact_by_either_estimator(line, options):
    found = SHAP(**options).fit(line.toy, line.train).explain(line.test, seed=4)
    np.testing.assert_allclose(found.theta, line.shapley, rtol=1e-3, atol=1e-3)


def test_lime_of_a_linear_model_comes_to_the_same_with_no_penalty(line):
    found = LIME(samples=200, alpha=0.0).fit(line.toy, line.train).explain(line.test)
    np.testing.assert_allclose(found.theta, line.shapley, rtol=1e-3, atol=1e-3)


def test_kernel_shap_comes_to_the_shapley_values_of_a_curved_game():
    toy = read_by_all(4, 3)
    train, test = toy.observe(20, 0), toy.observe(3, 1)
    mean, targets = train.embeddings.mean(0), test.predictions.argmax(1)

    def value(players: tuple[int, ...]) -> np.ndarray:
        tokens = mean.repeat(len(test), 1, 1)
        tokens[:, :, list(players)] = test.embeddings[:, :, list(players)]
        return toy.h(tokens).gather(1, targets[:, None]).squeeze(1).numpy()

    exact = np.zeros((len(test), 4))
    for player in range(4):
        others = [other for other in range(4) if other != player]
        for size in range(4):
            weight = math.factorial(size) * math.factorial(3 - size) / math.factorial(4)
            for some in combinations(others, size):
                exact[:, player] += weight * (value((*some, player)) - value(some))
    found = SHAP("kernel", samples=20_000).fit(toy, train).explain(test).theta
    np.testing.assert_allclose(found, exact, atol=0.02 * np.abs(exact).max())
    np.testing.assert_allclose(found.sum(1), value((0, 1, 2, 3)) - value(()), rtol=5e-3)


# captum, given the same draws


@pytest.fixture(scope="module", params=[read_by_cls, read_by_all])
def curved(request):
    toy = request.param(6, 3)
    return toy, toy.observe(20, 0), toy.observe(4, 1)


def captums_terms(method, toy, test):
    """The tokens that h reads, the mean, and one feature for every channel."""
    (part,) = method.head_.parts(test, len(test))
    mask = torch.arange(test.dim).expand(1, part.tokens.shape[1], -1)
    return part, method.mean_[None], mask


def test_gradient_shap_is_captums(curved, monkeypatch):
    from captum.attr import GradientShap

    toy, train, test = curved
    method = SHAP(samples=5).fit(toy, train)
    found = method.explain(test, seed=7)
    positions = np.random.default_rng(7).random((len(test), 5), dtype=np.float32)
    monkeypatch.setattr("numpy.random.uniform", lambda low, high, size: positions.reshape(size))
    part, mean, _ = captums_terms(method, toy, test)
    captums = GradientShap(method.head_).attribute(part.tokens, mean, n_samples=5, target=part.targets).sum(1)
    np.testing.assert_allclose(found.theta, captums.detach(), rtol=1e-4, atol=1e-5)


def test_kernel_shap_is_captums(curved, monkeypatch):
    from captum.attr import KernelShap

    samples = 30
    toy, train, test = curved
    method = SHAP("kernel", samples=samples).fit(toy, train)
    found = method.explain(test, seed=7).theta
    coalitions = torch.from_numpy(draw_coalitions(test.dim, samples, np.random.default_rng(7))).long()

    def generator(self, original, **options):
        yield from coalitions[:, None]

    monkeypatch.setattr(KernelShap, "kernel_shap_perturb_generator", generator)
    part, mean, mask = captums_terms(method, toy, test)
    for image, theta in enumerate(found):
        captums = KernelShap(method.head_).attribute(
            part.tokens[image : image + 1], mean, target=int(part.targets[image]), feature_mask=mask, n_samples=samples
        )
        np.testing.assert_allclose(theta, captums[0, 0], rtol=1e-2, atol=1e-3)


def test_lime_is_captums(curved):
    from captum.attr import Lime

    toy, train, test = curved
    method = LIME(samples=80).fit(toy, train)
    found = method.explain(test, seed=7).theta
    coins = np.random.default_rng(7).random((80, test.dim), dtype=np.float32) < 0.5

    def generator(original, **options):
        yield from torch.from_numpy(coins).long()[:, None]

    part, mean, mask = captums_terms(method, toy, test)
    for image, theta in enumerate(found):
        captums = Lime(method.head_, perturb_func=generator).attribute(
            part.tokens[image : image + 1], mean, target=int(part.targets[image]), feature_mask=mask, n_samples=80
        )
        np.testing.assert_allclose(theta, captums[0, 0], rtol=1e-2, atol=1e-3)


# the regressions


def test_the_lasso_is_scikit_learns():
    from sklearn.linear_model import Lasso

    rng = np.random.default_rng(0)
    design, outputs = (rng.random((60, 20)) < 0.5).astype(np.float32), rng.normal(size=(3, 60)).astype(np.float32)
    weights = rng.random((3, 60)).astype(np.float32) + 0.1
    found = lasso(*map(torch.from_numpy, (design, outputs, weights)), alpha=0.02)
    for row, y, w in zip(found, outputs, weights, strict=True):
        expected = Lasso(alpha=0.02, tol=1e-10, max_iter=100_000).fit(design.astype(float), y, sample_weight=w)
        np.testing.assert_allclose(row, expected.coef_, atol=1e-4)


# AGI


def test_agi_of_two_linear_classes_is_known_step_by_step():
    toy, weights = linear(d=5, classes=2, tokens=7)
    train, test = toy.observe(20, 0), toy.observe(6, 1, spread=0.2)
    method = AGI(step=0.02, max_steps=7).fit(toy, train)
    found = method.explain(test)
    assert method.scale_ == pytest.approx(float((train.embeddings - train.embeddings.mean(0)).square().mean().sqrt()))
    step = 0.02 * method.scale_
    for image, label in enumerate(test.predictions.argmax(1).tolist()):
        slope = (weights[label] - weights[1 - label]).numpy()
        margin = float((slope * test.embeddings[image].numpy()).sum())
        total = 0.0  # Σ p (1 − p): the gradient's size on the way; each step takes ε ‖slope‖₁ off the margin
        for _ in range(7):
            if margin < 0:
                break
            p = 1 / (1 + math.exp(-margin))
            total += p * (1 - p)
            margin -= step * np.abs(slope).sum()
        np.testing.assert_allclose(found.phi[image], step * np.abs(slope) * total, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(found.theta, found.phi.mean(1), rtol=1e-4)


def test_agi_walks_to_each_of_its_classes_and_to_no_more_than_there_are():
    toy = read_by_all(4, 3)
    train, test = toy.observe(20, 0), toy.observe(5, 1)
    both = AGI(classes=2).fit(toy, train).explain(test, seed=0).theta
    np.testing.assert_array_equal(AGI(classes=20).fit(toy, train).explain(test, seed=0).theta, both)
    one = AGI(classes=1).fit(toy, train)
    runs = {tuple(one.explain(test, seed=seed).theta[0].tolist()): seed for seed in range(12)}
    assert len(runs) == 2  # two false classes, each drawn first by some seed
    first, second = (one.explain(test, seed=seed).theta[0] for seed in runs.values())
    np.testing.assert_allclose(first + second, both[0], rtol=1e-4, atol=1e-7)


def test_a_model_in_half_precision_is_explained():
    weights = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    toy = Toy(lambda e: e[:, 0].bfloat16() @ weights, 4)
    toy.split = lambda images: torch.zeros(len(images), 7, 4, dtype=torch.bfloat16)
    tokens = torch.randn(5, 7, 4, generator=torch.Generator().manual_seed(1)).half()
    test = Observations(tokens, torch.ones(5, 7), grid=GRID, prefix_tokens=1)
    found = SHAP(samples=2).fit(toy, test).explain(test).theta
    cls = tokens[:, 0].float()
    own = weights.float().T[toy.h(tokens).argmax(1)]
    np.testing.assert_allclose(found, own * (cls - cls.mean(0)), rtol=0.05, atol=0.02)
