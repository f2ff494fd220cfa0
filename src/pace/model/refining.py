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

from pace.fitting.distributed import Team
from pace.model.feeding import Chunk, Visits
from pace.model.gaussians import TiedGaussians
from pace.model.inference import Weights
from pace.model.learning import Concepts, Settings, distributions, fit_dirichlet
from pace.model.objective import expected_log_theta
from pace.model.precision import full_precision
from pace.observations import Batch, Observations

_SHARE, _FEWEST, _MOST = 32, 64, 192  # of the images, and images, that a step looks at
_TEMPERATURE = 20.0  # τ: η within ±1 then suffices for a sure prediction
_SWEEPS, _MORE_SWEEPS = 4, 2  # before the one that is differentiated; from all patches to half of them
_RATES = (0.02, 0.001, 0.05)  # of the means, R and η, in units of a concept's own standard deviation
_WARM_UP = 0.1
_ADAM = ("step", "exp_avg", "exp_avg_sq")  # what Adam remembers of a parameter
_LEAST_APART = 1e-3  # that images are taken to lie: a few that are alike must not outweigh all else
_SETTLE = 6400  # images after which α is learned anew
_EMBEDDINGS, _PHIS = 4, 8  # copies of its embedding and of its φ that a patch takes room for, measured
_ALONE = Team()


@dataclass(frozen=True)
class Refinement:
    """How long to climb, and how much the terms beside the embeddings' weigh."""

    steps: int
    faithfulness: float  # w_f
    stability: float  # w_s


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
    earlier: dict[str, Tensor] | None = None,
    after: Callable[[Callable[[], dict[str, Tensor]]], object] = lambda state: None,
    team: Team = _ALONE,
) -> tuple[Concepts, npt.NDArray[np.float64]]:
    """The concepts with refined means, covariance and α, and the terms of every step (steps, 3). H and β stay.

    After every step `after` can ask for the state, from which a later call goes on when it gets it as `earlier`. All processes
    of a team make the same steps.
    """
    gaussians = concepts.gaussians
    assert isinstance(gaussians, TiedGaussians)
    whiten, dim = gaussians.precision_cholesky, observations.dim
    means = (gaussians.means @ whiten).requires_grad_()
    metric = torch.eye(dim, dtype=settings.dtype, device=settings.device).requires_grad_()
    head = torch.zeros(len(concepts), observations.n_classes, dtype=settings.dtype, device=settings.device)
    head.requires_grad_()
    learned = {"means": means, "metric": metric, "head": head}
    groups = [{"params": [p], "lr": lr} for p, lr in zip(learned.values(), _RATES, strict=True)]
    adam = torch.optim.Adam(groups, maximize=True)
    warm_up = max(_WARM_UP, 2 / refinement.steps) if refinement.steps > 2 else _WARM_UP  # a step up, and steps down
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, list(_RATES), total_steps=refinement.steps, pct_start=warm_up)
    alpha = concepts.alpha
    history = torch.zeros(refinement.steps, 3, device=settings.device)
    log_theta, seen, begin = torch.zeros_like(alpha), 0, 0
    if earlier is not None:
        begin, seen = int(earlier["step"]), int(earlier["seen"])
        alpha, log_theta = earlier["alpha"].to(alpha), earlier["log_theta"].to(alpha)
        history.copy_(earlier["history"])
        for name, parameter in learned.items():
            parameter.data.copy_(earlier[name])
            adam.state[parameter] = {
                key: earlier[f"{name}.{key}"].to("cpu" if key == "step" else settings.device) for key in _ADAM
            }
        schedule.load_state_dict({**schedule.state_dict(), "last_epoch": begin - 1, "_step_count": begin + 1})
        schedule.step()  # sets the rates, which depend on nothing but the step

    def state() -> dict[str, Tensor]:
        now = {"step": torch.tensor(step + 1), "seen": torch.tensor(seen), "alpha": alpha, "log_theta": log_theta}
        moments = {f"{name}.{key}": adam.state[p][key] for name, p in learned.items() for key in _ADAM}
        return {**now, "history": history, **learned, **moments}

    views = [view for view in (observations, perturbed) if view is not None]
    chunk = _chunk(views, gaussians, settings)

    def look(halves: Tensor, images: npt.NDArray[np.int64]) -> Seen:
        batches = [view.batch(images, settings.device, settings.dtype) for view in views]
        centred = [batch.embeddings - concepts.offset for batch in batches]
        return _look(batches, centred, halves, whiten @ metric, means, head, alpha)

    draws = _draws(len(observations), observations.n_tokens, seed)
    for step, (images, halves) in islice(enumerate(draws), begin, refinement.steps):
        at = partial(look, torch.from_numpy(halves).to(settings.device))
        terms, field, slopes = _climb(at, images, len(views), list(learned.values()), refinement, chunk, team)
        volume = torch.linalg.slogdet(metric)[1] / dim
        terms[0] += volume.detach()
        slopes[1] += torch.autograd.grad(volume, metric)[0]
        for parameter, slope in zip(learned.values(), slopes, strict=True):
            parameter.grad = slope
        adam.step()
        schedule.step()
        history[step] = terms
        log_theta, seen = log_theta + field, seen + len(images) * len(views)
        if settings.learn_alpha and seen >= _SETTLE:
            alpha = fit_dirichlet(alpha, log_theta / seen, settings.smallest_alpha)
            log_theta, seen = torch.zeros_like(alpha), 0
        report(len(images))
        after(state)
    refined = replace(concepts, gaussians=_folded(whiten @ metric.detach(), means.detach()), alpha=alpha)
    return refined, history.double().cpu().numpy()


def _draws(n_images: int, n_tokens: int, seed: int) -> Iterator[Draw]:
    """What to look at, for ever; each image once before any comes twice."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(n_images)
        for start in range(0, n_images, images_in_step(n_images)):
            halves = np.stack([rng.permutation(n_tokens)[: max(1, n_tokens // 2)] for _ in range(2)])
            yield Draw(np.sort(order[start : start + images_in_step(n_images)]), np.sort(halves))


def _chunk(views: list[Observations], gaussians: TiedGaussians, settings: Settings) -> Chunk:
    """As many images as there is room for, and no more than a step has."""
    most = settings.batch_size or images_in_step(len(views[0]))
    if settings.memory is None or settings.batch_size:
        return Chunk(most)
    concepts, dim = gaussians.means.shape
    image = len(views) * views[0].n_tokens * (_EMBEDDINGS * dim + _PHIS * concepts) * settings.dtype.itemsize
    return Chunk(min(most, max(1, settings.working_memory(gaussians) // 2 // image)))


def _climb(
    look: Callable[[npt.NDArray[np.int64]], Seen],
    images: npt.NDArray[np.int64],
    views: int,
    learned: list[Tensor],
    refinement: Refinement,
    chunk: Chunk,
    team: Team,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The three terms of a step's images, Σ E[log θ], and the slope of the weighted sum; terms and slope lack log |R|."""
    visits = Visits(len(images), None, team.rank, team.size)
    means = learned[0]
    phi_bars, terms = means.new_zeros(views, len(images), len(means)), means.new_zeros(2)
    log_theta = means.new_zeros(len(means), dtype=torch.float64)
    slopes = [torch.zeros_like(parameter) for parameter in learned]
    whole: list[Seen] = []  # all images with their way back, where they are one chunk; else a chunk is looked at again

    def there(first: int, last: int) -> None:
        own = visits.part(first, last).images
        with torch.set_grad_enabled(last - first == len(visits)):
            seen = look(images[own])
        phi_bars[:, own] = seen.phi_bars.detach()
        log_theta.add_(seen.log_theta)
        if seen.terms.requires_grad:
            whole.append(seen)

    def back(first: int, last: int) -> None:
        own = visits.part(first, last).images
        seen = whole.pop() if whole else look(images[own])
        embedding, faithfulness = ours = (last - first) / len(images) * seen.terms
        rise = embedding + refinement.faithfulness * faithfulness + (pull[:, own] * seen.phi_bars).sum()
        for slope, more in zip(slopes, torch.autograd.grad(rise, learned, materialize_grads=True), strict=True):
            slope += more
        terms.add_(ours.detach())

    chunk.through(0, len(visits), there)
    phi_bars, log_theta = team.added(phi_bars, log_theta)
    stability, pull = means.new_zeros(()), torch.zeros_like(phi_bars)
    if views == 2:
        stability = -_unsteadiness(*phi_bars.requires_grad_())
        (pull,) = torch.autograd.grad(refinement.stability * stability, phi_bars)
    chunk.through(0, len(visits), back)
    terms, *slopes = team.added(terms, *slopes)
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
        counts = _settled(evidence, weights, alpha, weights.count.sum(1, keepdim=True) / len(means), _SWEEPS)
        phi_bar = _counts(evidence, alpha + counts, weights) / patches.shape[1]
        if len(views) == 2:
            some, seen = evidence[:, half], _weights_of(view.attention[:, half])
            fewer = _settled(some, seen, alpha, counts * (len(half) / patches.shape[1]), _MORE_SWEEPS)
            phi_bars.append(_counts(some, alpha + fewer, seen) / len(half))
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


@torch.no_grad()
def _settled(evidence: Tensor, weights: Weights, alpha: Tensor, counts: Tensor, sweeps: int) -> Tensor:
    """γ - α, so many sweeps on."""
    for _ in range(sweeps):
        counts = _counts(evidence, alpha + counts, weights)
    return counts


def _counts(evidence: Tensor, gamma: Tensor, weights: Weights) -> Tensor:
    """Σ_j w_mj φ_mj, one sweep on from γ."""
    phi = (evidence + expected_log_theta(gamma)[:, None].to(evidence.dtype)).softmax(2)
    return torch.bmm(weights.count[:, None], phi).squeeze(1)


def _folded(factor: Tensor, means: Tensor) -> TiedGaussians:
    """The Gaussians for which e ↦ e F whitens, with these means behind it: Σ⁻¹ = F Fᵀ."""
    wide = factor.double()
    covariance = torch.linalg.inv(wide @ wide.mT)
    centres = torch.linalg.solve(wide, means.double(), left=False)
    return TiedGaussians.seed(centres.to(means.dtype), covariance, 0)
