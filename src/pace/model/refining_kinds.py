"""Refining kinds: what the prediction follows from and what a change of view keeps shapes the kinds of parts. Parts stay.

Which kind an image's part is of depends on the mean v̄_mp of its patches alone, so that images are looked at once, and then
steps of Adam over these means are nearly free. The kinds' means and metric R climb the sum of three terms, each of which counts
as much as one dimension of a patch:

      1/q [log |R| - ½ tr R Rᵀ W - ½ Σ_k θ_mk ‖v̄_mp F R - μ_k‖²]   the patches stay near their kind; W: their spread around v̄
    + Σ_n ŷ_mn log softmax_n(τ η_nᵀθ_m)                             the prediction follows from the image's concepts
    - ‖θ_m - θ'_m‖₁ / ‖θ_m - θ'_i‖₁                                 a perturbed view has the same ones, another image others

Then it is tested how many patches have changed their part, and how far the bound has fallen. Of a move that is too large,
half is taken, or a quarter, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pace.model.concepts import Concepts
from pace.model.feeding import Share
from pace.model.gaussians import TiedGaussians
from pace.model.learning import distributions
from pace.model.nesting import Nest, evidence, infer_nested
from pace.model.precision import full_precision
from pace.model.settings import Settings
from pace.observations import Batch, Observations

_MOST_IMAGES = 20_000  # that are pooled: 16 parts of 64 numbers take 160 MB for the two views
_STEP, _TESTED = 192, 200  # images of a step, and of the test
_TEMPERATURE = 20.0  # τ: with it, η within ±1 suffices for a sure prediction
_RATES = (0.02, 0.002, 0.05)  # of the means, R and η, in units of a kind's own standard deviation
_LEAST_APART = 1e-3  # smallest distance between images, so that a few that are alike do not outweigh all else
_SHARES = (1.0, 0.5, 0.25)  # of the move

MOST_DRIFT = 0.05  # share of the patches that may change their part
MOST_FALL = 1.0  # nats by which the bound may fall, per patch


class Drift(NamedTuple):
    """What refining cost."""

    patches: float  # share whose part is another now
    bound: float  # fall of the bound, in nats per patch


class Pooled(NamedTuple):
    """Some views of images: shares of parts (M, P), how many patches each has, their mean features (M, P, q), ŷ (M, N)."""

    parts: Tensor
    size: Tensor
    mean: Tensor
    predictions: Tensor


@full_precision()
@torch.enable_grad()
def refine_kinds(
    observations: Observations,
    perturbed: Observations | None,
    concepts: Concepts,
    settings: Settings,
    steps: int,
    seed: int,
    report: Callable[[int], object] = lambda images: None,
    share: Share = Share(),  # noqa: B008
) -> tuple[Concepts, npt.NDArray[np.float64], Drift]:
    """The concepts with refined kinds, the terms of every step (steps, 3), and the drift.

    Every process looks at its share of the images; then all of them make the same steps.
    """
    nest, kinds = concepts.nest, concepts.gaussians
    assert nest is not None
    assert isinstance(kinds, TiedGaussians)
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.permutation(len(observations))[:_MOST_IMAGES])
    views, spread = [], torch.zeros_like(kinds.precision_cholesky, dtype=torch.float64)
    for view in (observations, perturbed):
        if view is not None:
            found, around = _pool(view, rows, concepts, nest, settings, share, report)
            views.append(found)
            spread = spread + around
    whiten = kinds.precision_cholesky
    spread = (whiten.double().mT @ spread @ whiten.double()).to(settings.dtype) / len(views)
    start = (kinds.means @ whiten).detach()
    means, metric = start.clone().requires_grad_(), torch.eye(len(whiten), dtype=settings.dtype, device=settings.device)
    head = torch.zeros(len(concepts), observations.n_classes, dtype=settings.dtype, device=settings.device)
    learned = [means, metric.requires_grad_(), head.requires_grad_()]
    adam = torch.optim.Adam([{"params": [p], "lr": r} for p, r in zip(learned, _RATES, strict=True)], maximize=True)
    warm_up = max(0.1, 2 / steps) if steps > 2 else 0.1
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, list(_RATES), total_steps=steps, pct_start=warm_up)
    history = torch.zeros(steps, 3, device=settings.device)
    for step in range(steps):
        some = torch.from_numpy(rng.permutation(len(rows))[:_STEP]).to(settings.device)
        chosen = [Pooled(*(values[some] for values in view)) for view in views]
        terms = _terms(chosen, nest, spread, whiten @ metric, metric, means, head)
        slopes = torch.autograd.grad(terms.sum(), learned, materialize_grads=True)
        for parameter, slope in zip(learned, slopes, strict=True):
            parameter.grad = slope
        adam.step()
        schedule.step()
        history[step] = terms.detach()
    moved = means.detach() - start, metric.detach() - torch.eye(len(whiten), dtype=whiten.dtype, device=whiten.device)
    refined, drift = _within_limits(concepts, observations, start, whiten, moved, settings)
    return refined, history.double().cpu().numpy(), drift


def _terms(
    views: list[Pooled], nest: Nest, spread: Tensor, factor: Tensor, metric: Tensor, means: Tensor, head: Tensor
) -> Tensor:
    thetas = []
    embedding, faithful = means.new_zeros(()), means.new_zeros(())
    dim, rho = len(metric), float(nest.patch_weight)
    log_shares = nest.kind_shares.log().to(means.dtype)
    for view in views:
        white = view.mean @ factor
        apart = white.square().sum(2, keepdim=True) - 2 * white @ means.T + means.square().sum(1)  # (M, P, K)
        apart = apart.gather(1, nest.part_of.expand(len(apart), 1, -1)).squeeze(1)
        psi = nest.choose(log_shares - rho / 2 * view.size[:, nest.part_of] * apart)
        theta = view.parts[:, nest.part_of] * psi
        thetas.append(theta)
        embedding = embedding - (theta * apart).sum(1).mean() / 2 / len(views)
        if head.shape[1]:
            scores = (_TEMPERATURE * theta @ head).log_softmax(1)
            faithful = faithful + (view.predictions * scores).sum(1).mean() / len(views)
    embedding = torch.linalg.slogdet(metric)[1] - (metric * (spread @ metric)).sum() / 2 + embedding
    steady = means.new_zeros(())
    if len(thetas) == 2:
        one, two = thetas
        pairs, others = ((one - view).abs().sum(1).mean() for view in (two, two.roll(1, 0)))
        steady = -pairs / others.clamp_min(_LEAST_APART)
    return torch.stack([embedding / dim, faithful, steady])


@torch.no_grad()
def _pool(
    view: Observations,
    rows: npt.NDArray[np.int64],
    concepts: Concepts,
    nest: Nest,
    settings: Settings,
    share: Share,
    report: Callable[[int], object],
) -> tuple[Pooled, Tensor]:
    """Means of parts for these images of a view, and the covariance of the patches around them."""
    dim, n_parts = nest.to_kinds.shape[1], len(nest)
    shapes = (n_parts,), (n_parts,), (n_parts, dim), (view.n_classes,)
    found = Pooled(*(torch.zeros(len(rows), *s, dtype=settings.dtype, device=settings.device) for s in shapes))
    second = torch.zeros(dim, dim, dtype=torch.float64, device=settings.device)
    at_once = settings.images_per_batch(view.n_tokens, 1, concepts.gaussians)
    own = np.arange(len(rows))[share.rank :: share.processes]
    for start in range(0, len(own), at_once):
        some = own[start : start + at_once]
        batch = view.batch(rows[some], settings.device, settings.dtype)
        given = evidence(batch.embeddings, batch.attention, nest, concepts.gaussians, concepts.offset)
        posterior, _ = infer_nested(given, nest, concepts.alpha, None, tol=settings.sweep_tol)
        held = posterior.phi * given.weights.count[:, :, None]
        size = held.sum(1)
        mean = torch.bmm(held.mT, given.v.view(*held.shape[:2], dim)) / size[:, :, None].clamp_min(1e-9)
        weighted = given.v * given.weights.count.reshape(-1, 1)
        second += (weighted.T @ given.v).double() - (
            (mean * size[:, :, None]).flatten(0, 1).T @ mean.flatten(0, 1)
        ).double()
        found.parts[some] = (posterior.gamma / posterior.gamma.sum(1, keepdim=True)).to(settings.dtype)
        found.size[some], found.mean[some] = size, mean
        if batch.predictions is not None:
            found.predictions[some] = distributions(batch.predictions).to(settings.dtype)
        report(len(some))
    *parts, second = share.added(*found, second)
    return Pooled(*parts), second / (len(rows) * view.n_tokens)


def _within_limits(
    concepts: Concepts,
    observations: Observations,
    means: Tensor,
    whiten: Tensor,
    moved: tuple[Tensor, Tensor],
    settings: Settings,
) -> tuple[Concepts, Drift]:
    """As much of the move as the limits allow."""
    rows = np.unique(np.linspace(0, len(observations) - 1, _TESTED).astype(np.int64))
    batch = observations.batch(rows, settings.device, settings.dtype)
    bound, leading = _seen(batch, concepts, settings)
    identity = torch.eye(len(whiten), dtype=whiten.dtype, device=whiten.device)
    for some in _SHARES:
        refined = replace(concepts, gaussians=folded(whiten @ (identity + some * moved[1]), means + some * moved[0]))
        after, now = _seen(batch, refined, settings)
        drift = Drift(float((leading != now).double().mean()), bound - after)
        if drift.patches <= MOST_DRIFT and drift.bound <= MOST_FALL:
            return refined, drift
    return concepts, Drift(0.0, 0.0)


@torch.no_grad()
def _seen(batch: Batch, concepts: Concepts, settings: Settings) -> tuple[float, Tensor]:
    """The bound per patch, and the leading part of every patch."""
    assert concepts.nest is not None
    given = evidence(batch.embeddings, batch.attention, concepts.nest, concepts.gaussians, concepts.offset)
    found, _ = infer_nested(given, concepts.nest, concepts.alpha, None, tol=settings.sweep_tol)
    return float(found.bound.mean()) / batch.attention.shape[1], found.phi.argmax(2)


def folded(factor: Tensor, means: Tensor) -> TiedGaussians:
    """The Gaussians for which v ↦ v F whitens, with these means behind it: Σ⁻¹ = F Fᵀ."""
    wide = factor.double()
    centres = torch.linalg.solve(wide, means.double(), left=False)
    return TiedGaussians.seed(centres.to(means.dtype), torch.linalg.inv(wide @ wide.mT), 0)
