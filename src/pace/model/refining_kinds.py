"""Refining kinds: what the prediction follows from and what a change of view keeps shapes the kinds of parts.

Which kind a part is of depends on the mean of its patches alone, so that images are looked at once, and then steps of Adam over
these means are nearly free. The kinds' means and metric R climb the sum of three terms, each of which counts as much as one
dimension:

      1/q [log |R| - ½ Σ_k θ_mk ‖v_mp F R - μ_k‖²]                a part stays near its kind
    + Σ_n ŷ_mn log softmax_n(τ η_nᵀθ_m)                           the prediction follows from the image's concepts
    - ‖θ_m - θ'_m‖₁ / ‖θ_m - θ'_i‖₁                               a perturbed view has the same ones, another image others

A fifth of the images is held out, and the kinds stay as they were when these were explained best by the last two terms: a
few images would soon be known by heart. Parts stay what they are, to the last digit: no kind pulls on them.
"""

from __future__ import annotations

import math
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
from pace.model.learning import distributions, infer_parts
from pace.model.nesting import Nest, infer_kinds
from pace.model.precision import full_precision
from pace.model.settings import Settings
from pace.observations import Observations

_MOST_IMAGES = 20_000  # that are pooled: 16 parts of 64 numbers take 160 MB for the two views
_STEP = 192  # images
_ALONE = 1 / 4  # of the steps are for η, before the kinds move
_HELD, _LOOK = 5, 10  # one image in so many is held out, and looked at every so many steps
_TEMPERATURE = 20.0  # τ: with it, η within ±1 suffices for a sure prediction
_RATES = (0.02, 0.002, 0.05)  # of the means, R and η, in units of a kind's own standard deviation
_LEAST_APART = 1e-3  # smallest distance between images, so that a few that are alike do not outweigh all else


class Pooled(NamedTuple):
    """Some views of images: shares of parts (M, P), their mean features v (M, P, q), ŷ (M, N)."""

    parts: Tensor
    features: Tensor
    predictions: Tensor

    def of(self, images: Tensor) -> Pooled:
        return Pooled(*(values[images] for values in self))


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
) -> tuple[Concepts, npt.NDArray[np.float64]]:
    """The concepts with refined kinds, and the terms of every step (steps, 3).

    Every process looks at its share of the images; then all of them make the same steps.
    """
    nest, kinds = concepts.nest, concepts.gaussians
    assert nest is not None
    assert isinstance(kinds, TiedGaussians)
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.permutation(len(observations))[:_MOST_IMAGES])
    views = [
        _pool(view, rows, concepts, nest, settings, share, report)
        for view in (observations, perturbed)
        if view is not None
    ]
    whiten = kinds.precision_cholesky
    means = (kinds.means @ whiten).detach().clone().requires_grad_()
    metric = torch.eye(len(whiten), dtype=settings.dtype, device=settings.device).requires_grad_()
    head = torch.zeros(len(concepts), observations.n_classes, dtype=settings.dtype, device=settings.device)
    learned = [means, metric, head.requires_grad_()]
    adam = torch.optim.Adam([{"params": [p], "lr": r} for p, r in zip(learned, _RATES, strict=True)], maximize=True)
    warm_up = max(0.1, 2 / steps) if steps > 2 else 0.1
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, list(_RATES), total_steps=steps, pct_start=warm_up)
    history = torch.zeros(steps, 3, device=settings.device)
    order = torch.from_numpy(rng.permutation(len(rows))).to(settings.device)
    held, own = (
        [view.of(some) for view in views] for some in (order[: len(order) // _HELD], order[len(order) // _HELD :])
    )
    best, kept = -math.inf, [means.detach().clone(), metric.detach().clone()]
    for step in range(steps):
        alone = step < steps * _ALONE
        if not alone and (step % _LOOK == 0 or step == steps - 1):
            with torch.no_grad():
                gain = float(_terms(held, nest, whiten, *learned)[1])
            if gain > best:
                best, kept = gain, [means.detach().clone(), metric.detach().clone()]
        some = torch.from_numpy(rng.permutation(len(own[0].parts))[:_STEP]).to(settings.device)
        terms = _terms([view.of(some) for view in own], nest, whiten, *learned)
        slopes = torch.autograd.grad(terms.sum(), learned, materialize_grads=True)
        for parameter, slope in zip(learned, slopes, strict=True):
            parameter.grad = slope if parameter is head or not alone else None
        adam.step()
        schedule.step()
        history[step] = terms.detach()
    means, metric = kept
    refined = replace(concepts, gaussians=folded(whiten @ metric, means))
    return refined, history.double().cpu().numpy()


def _terms(views: list[Pooled], nest: Nest, whiten: Tensor, means: Tensor, metric: Tensor, head: Tensor) -> Tensor:
    thetas = []
    near, faithful, steady = (means.new_zeros(()) for _ in range(3))
    log_shares = nest.kind_shares.log().to(means.dtype)
    for view in views:
        white = view.features @ whiten @ metric
        apart = white.square().sum(2, keepdim=True) - 2 * white @ means.T + means.square().sum(1)  # (M, P, K)
        apart = apart.gather(1, nest.part_of.expand(len(apart), 1, -1)).squeeze(1)
        theta = view.parts[:, nest.part_of] * nest.choose(log_shares - apart / 2)
        thetas.append(theta)
        near = near - (theta * apart).sum(1).mean() / 2 / len(views)
        if head.shape[1]:
            scores = (_TEMPERATURE * theta @ head).log_softmax(1)
            faithful = faithful + (view.predictions * scores).sum(1).mean() / len(views)
    if len(thetas) == 2:
        one, two = thetas
        pairs, others = ((one - view).abs().sum(1).mean() for view in (two, two.roll(1, 0)))
        steady = -pairs / others.clamp_min(_LEAST_APART)
    return torch.stack([(torch.linalg.slogdet(metric)[1] + near) / len(metric), faithful, steady])


@torch.no_grad()
def _pool(
    view: Observations,
    rows: npt.NDArray[np.int64],
    concepts: Concepts,
    nest: Nest,
    settings: Settings,
    share: Share,
    report: Callable[[int], object],
) -> Pooled:
    """What tells the kinds of these images of a view."""
    n_parts = len(nest)
    shapes = (n_parts,), (n_parts, nest.to_kinds.shape[1]), (view.n_classes,)
    found = Pooled(*(torch.zeros(len(rows), *s, dtype=settings.dtype, device=settings.device) for s in shapes))
    at_once = settings.images_per_batch(view.n_tokens, 1, concepts.gaussians)
    own = np.arange(len(rows))[share.rank :: share.processes]
    for start in range(0, len(own), at_once):
        some = own[start : start + at_once]
        batch = view.batch(rows[some], settings.device, settings.dtype)
        x = batch.embeddings - concepts.offset
        posterior, weights, _ = infer_parts(x, batch.attention, concepts, nest, settings)
        found.parts[some] = (posterior.gamma / posterior.gamma.sum(1, keepdim=True)).to(settings.dtype)
        found.features[some] = infer_kinds(posterior, x, weights.count, nest, concepts.gaussians).features
        if batch.predictions is not None:
            found.predictions[some] = distributions(batch.predictions).to(settings.dtype)
        report(len(some))
    return Pooled(*share.added(*found))


def folded(factor: Tensor, means: Tensor) -> TiedGaussians:
    """The Gaussians for which v ↦ v F whitens, with these means behind it: Σ⁻¹ = F Fᵀ."""
    wide = factor.double()
    centres = torch.linalg.solve(wide, means.double(), left=False)
    return TiedGaussians.seed(centres.to(means.dtype), torch.linalg.inv(wide @ wide.mT), 0)
