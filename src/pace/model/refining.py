"""Refining: faithfulness and stability shape the concepts themselves, and not only φ, where their pull is 1/J.

After EM the means and the shared covariance climb a sum in which each term counts as much as one dimension of a patch:

      1/d Σ_j a_mj log Σ_k φ̄_mk N(e_mj | μ_k, Σ)   what the embeddings say, so that patches keep their concepts
    + w_f Σ_n ŷ_mn log softmax_n(τ η_nᵀφ̄_m)       the prediction follows from the image's concepts (as in L_f)
    - w_s ‖φ̄_m - φ̄'_m‖₁ / ‖φ̄_m - φ̄'_i‖₁            and a perturbed view has the same ones, another image i others (as in L_s)

with φ̄_m = Σ_j a_mj φ_mj by the exact rules; in the third term over a random half of each view's patches, since the concepts of
an image should not depend on which of its patches are seen. It happens in the space that EM's own covariance whitens,
x = e P R, where R starts as the identity: P R is the metric in which it is told which concept a patch shows.

The first two terms are sums over images, and the third ties the images of a step together by their φ̄ alone. So a step goes
there, for the φ̄ of all images, and back, for the slope: both chunk by chunk, as memory allows, each process with its share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pace.model.concepts import Concepts, fit_dirichlet
from pace.model.feeding import Images, Share, Visits
from pace.model.gaussians import TiedGaussians
from pace.model.inference import Weights, infer
from pace.model.learning import distributions
from pace.model.objective import expected_log_theta
from pace.model.precision import full_precision
from pace.model.refining_kinds import folded
from pace.model.settings import Settings
from pace.observations import Batch, Observations

_SHARE, _FEWEST, _MOST = 32, 64, 192  # a step looks at 1/32 of the images, but at 64 to 192 of them
_TEMPERATURE = 20.0  # τ: with it, η within ±1 suffices for a sure prediction
_SWEEPS, _MORE_SWEEPS = 4, 2  # before the one that is differentiated; from all patches to half of them
_RATES = (0.02, 0.001, 0.05)  # learning rates of the means, R and η, in units of a concept's own standard deviation
_WARM_UP = 0.1
_LEAST_APART = 1e-3  # smallest distance between images, so that a few that are alike do not outweigh all else
_SETTLE = 6400  # images after which α is learned anew
_EMBEDDINGS, _PHIS = 4, 8  # copies of its embedding and of its φ that a patch takes room for, measured


@dataclass(frozen=True)
class Refinement:
    """How long to climb, and how much the two terms weigh beside the embeddings'."""

    steps: int
    faithfulness: float = 1.0  # w_f
    stability: float = 1.0  # w_s


class Draw(NamedTuple):
    """What a step looks at."""

    images: npt.NDArray[np.int64]
    patches: npt.NDArray[np.int64]  # (2, J // 2): half of those of the images, and of their perturbed views


class Seen(NamedTuple):
    """What some images of a step come to."""

    phi_bars: Tensor  # (views, images, K), of two views by half of their patches
    terms: Tensor  # (2,) averages of what the embeddings say, but for log |R|, and of how the prediction follows
    log_theta: Tensor  # (K,) Σ E[log θ] over images and views


def images_in_step(n_images: int) -> int:
    """Many classes need many images to say which way is up; few images would only be seen more often."""
    return min(_MOST, max(_FEWEST, n_images // _SHARE))


@full_precision()  # what a patch weighs beside its distance from a mean is a difference of large numbers
@torch.enable_grad()
def refine(
    observations: Observations,
    perturbed: Observations | None,
    concepts: Concepts,
    settings: Settings,
    refinement: Refinement,
    seed: int,
    report: Callable[[int], object] = lambda images: None,
    share: Share = Share(),  # noqa: B008
) -> tuple[Concepts, npt.NDArray[np.float64]]:
    """The concepts with refined means, covariance and α, and the terms of every step (steps, 3). H and β stay.

    All processes make the same steps, each with its share of the images.
    """
    gaussians = concepts.gaussians
    assert isinstance(gaussians, TiedGaussians)
    whiten, dim = gaussians.precision_cholesky, observations.dim
    means = (gaussians.means @ whiten).requires_grad_()
    metric = torch.eye(dim, dtype=settings.dtype, device=settings.device).requires_grad_()
    head = torch.zeros(len(concepts), observations.n_classes, dtype=settings.dtype, device=settings.device)
    learned = [means, metric, head.requires_grad_()]
    adam = torch.optim.Adam([{"params": [p], "lr": r} for p, r in zip(learned, _RATES, strict=True)], maximize=True)
    warm_up = max(_WARM_UP, 2 / refinement.steps) if refinement.steps > 2 else _WARM_UP  # a step up, and steps down
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, list(_RATES), total_steps=refinement.steps, pct_start=warm_up)
    alpha, log_theta, seen = concepts.alpha, torch.zeros_like(concepts.alpha), 0
    history = torch.zeros(refinement.steps, 3, device=settings.device)
    views = [view for view in (observations, perturbed) if view is not None]
    at_once = _images_at_once(views, gaussians, settings)

    def look(halves: Tensor, images: npt.NDArray[np.int64]) -> Seen:
        batches = [view.batch(images, settings.device, settings.dtype) for view in views]
        centred = [batch.embeddings - concepts.offset for batch in batches]
        return _look(batches, centred, halves, whiten @ metric, means, head, alpha)

    draws = _draws(len(observations), observations.n_tokens, seed)
    for step, (images, halves) in enumerate(islice(draws, refinement.steps)):
        at = partial(look, torch.from_numpy(halves).to(settings.device))
        terms, field, slopes = _climb(at, images, len(views), learned, refinement, at_once, share)
        volume = torch.linalg.slogdet(metric)[1] / dim
        terms[0] += volume.detach()
        slopes[1] += torch.autograd.grad(volume, metric)[0]
        for parameter, slope in zip(learned, slopes, strict=True):
            parameter.grad = slope
        adam.step()
        schedule.step()
        history[step] = terms
        log_theta, seen = log_theta + field, seen + len(images) * len(views)
        if settings.learn_alpha and seen >= _SETTLE:
            alpha = fit_dirichlet(alpha, log_theta / seen, settings.smallest_alpha)
            log_theta, seen = torch.zeros_like(alpha), 0
        report(len(images))
    refined = replace(concepts, gaussians=folded(whiten @ metric.detach(), means.detach()), alpha=alpha)
    return refined, history.double().cpu().numpy()


def _draws(n_images: int, n_tokens: int, seed: int) -> Iterator[Draw]:
    """What to look at, for ever; each image once before any comes twice."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(n_images)
        for start in range(0, n_images, images_in_step(n_images)):
            halves = np.stack([rng.permutation(n_tokens)[: max(1, n_tokens // 2)] for _ in range(2)])
            yield Draw(np.sort(order[start : start + images_in_step(n_images)]), np.sort(halves))


def _images_at_once(views: list[Observations], gaussians: TiedGaussians, settings: Settings) -> int:
    """As many images as there is room for, and no more than a step has."""
    most = settings.batch_size or images_in_step(len(views[0]))
    if settings.memory is None or settings.batch_size:
        return most
    concepts, dim = gaussians.means.shape
    image = len(views) * views[0].n_tokens * (_EMBEDDINGS * dim + _PHIS * concepts) * settings.dtype.itemsize
    return min(most, max(1, settings.working_memory(gaussians) // 2 // image))


def _climb(
    look: Callable[[npt.NDArray[np.int64]], Seen],
    images: npt.NDArray[np.int64],
    views: int,
    learned: list[Tensor],
    refinement: Refinement,
    at_once: int,
    share: Share,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The three terms of a step's images, Σ E[log θ], and the slope of the weighted sum; terms and slope lack log |R|."""
    parts: list[Images] = [
        part.images for part in Visits(len(images), None, share.rank, share.processes).parts(at_once)
    ]
    means = learned[0]
    phi_bars, terms = means.new_zeros(views, len(images), len(means)), means.new_zeros(2)
    log_theta = means.new_zeros(len(means), dtype=torch.float64)
    slopes = [torch.zeros_like(parameter) for parameter in learned]
    for own in parts:
        with torch.set_grad_enabled(len(parts) == 1):  # of several parts each is looked at again for its slope
            seen = look(images[own])
        phi_bars[:, own] = seen.phi_bars.detach()
        log_theta.add_(seen.log_theta)
    phi_bars, log_theta = share.added(phi_bars, log_theta)
    stability, pull = means.new_zeros(()), torch.zeros_like(phi_bars)
    if views == 2:
        stability = -_unsteadiness(*phi_bars.requires_grad_())
        (pull,) = torch.autograd.grad(refinement.stability * stability, phi_bars)
    for own in parts:
        if len(parts) > 1:
            seen = look(images[own])
        embedding, faithfulness = ours = seen.phi_bars.shape[1] / len(images) * seen.terms
        rise = embedding + refinement.faithfulness * faithfulness + (pull[:, own] * seen.phi_bars).sum()
        for slope, more in zip(slopes, torch.autograd.grad(rise, learned, materialize_grads=True), strict=True):
            slope += more
        terms.add_(ours.detach())
    terms, *slopes = share.added(terms, *slopes)
    return torch.cat([terms, stability.detach()[None]]), log_theta, slopes


def _look(
    views: list[Batch],
    embeddings: list[Tensor],
    halves: Tensor,
    factor: Tensor,
    means: Tensor,
    head: Tensor,
    alpha: Tensor,
) -> Seen:
    """Some images in every view, their embeddings centred; e ↦ e F whitens, and the means are those behind it.

    Where no slope is asked for, on the way there, the terms are left out.
    """
    zero = means.new_zeros(())
    embedding, faithfulness, log_theta = zero, zero, torch.zeros_like(alpha)
    phi_bars = []
    towards = factor @ means.T  # ‖eF - μ‖² is e F Fᵀ eᵀ - 2 e F μᵀ + ‖μ‖²: no patch is whitened itself
    for view, patches, half in zip(views, embeddings, halves, strict=False):
        evidence = torch.addmm(means.square().sum(1) / -2, patches.flatten(0, 1), towards).view(*patches.shape[:2], -1)
        weights = Weights.of(view.attention, "exact")
        start = (weights.count.sum(1, keepdim=True) / len(means)).expand(-1, len(means)).double()
        counts, phi_bar = _settled(evidence, weights, alpha, start, _SWEEPS)
        if len(views) == 2:
            some, seen = evidence[:, half], _weights_of(view.attention[:, half])
            fewer = counts * (len(half) / patches.shape[1])
            phi_bars.append(_settled(some, seen, alpha, fewer, _MORE_SWEEPS)[1])
        else:
            phi_bars.append(phi_bar)
        log_theta += expected_log_theta(alpha + counts).sum(0)
        if not torch.is_grad_enabled():
            continue
        mixture = (evidence + phi_bar.detach().clamp_min(1e-6).log()[:, None]).logsumexp(2)
        length = (factor * (_scatter(patches, weights.count) @ factor)).sum()
        density = (mixture * weights.count).mean() - length / weights.count.numel() / 2
        embedding = embedding + density / patches.shape[2] / len(views)
        if view.predictions is not None:
            scores = (_TEMPERATURE * phi_bar @ head).log_softmax(1)
            predictions = distributions(view.predictions).to(scores.dtype)
            faithfulness = faithfulness + (predictions * scores).sum(1).mean() / len(views)
    return Seen(torch.stack(phi_bars), torch.stack([embedding, faithfulness]), log_theta)


def _weights_of(attention: Tensor) -> Weights:
    """Of some patches of each image; alike where the image's attention is all on others."""
    return Weights.of(torch.where(attention.sum(1, keepdim=True) > 0, attention, 1), "exact")


def _unsteadiness(phi_bar: Tensor, perturbed: Tensor) -> Tensor:
    """How far a perturbed view is, over how far other images are: the distance alone would be least for one concept."""
    pairs, others = ((phi_bar - view).abs().sum(1).mean() for view in (perturbed, perturbed.roll(1, 0)))
    return pairs / others.clamp_min(_LEAST_APART)


@torch.no_grad()
def _scatter(patches: Tensor, weights: Tensor) -> Tensor:
    """Σ w eᵀe: all that the patches' lengths need, whichever way they are measured."""
    flat = patches.flatten(0, 1)
    return (flat * weights.reshape(-1, 1)).T @ flat


def _settled(evidence: Tensor, weights: Weights, alpha: Tensor, counts: Tensor, sweeps: int) -> tuple[Tensor, Tensor]:
    """γ - α so many sweeps on, and φ̄ one sweep later; the slope goes through that last sweep alone."""
    with torch.no_grad():
        start = (counts, counts)
        counts = infer(evidence.detach(), weights, alpha, start, max_sweeps=sweeps, tol=0.0, patches=False).counts
    last = infer(evidence, weights, alpha, (counts, counts), max_sweeps=1, tol=0.0, patches=False).counts
    return counts, last.to(evidence.dtype) / evidence.shape[1]
