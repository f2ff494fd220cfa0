"""Dataset-level learning: a pass over images gives statistics, statistics give new concepts.

Everything here raises L = L_e + L_f + L_s or leaves it: the sweeps (docs/model.md, from J = 6 tokens up), μ and Σ in closed
form, α by a fixed point, and H and β by Adam on a quadratic that lies below the bound and touches it where they are now.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pace.model.gaussians import Gaussians, Prior
from pace.model.inference import Posterior, Updates, Weights, furthest_plausible, infer, uniform_start
from pace.model.objective import (
    Groups,
    expected_log_theta,
    faithfulness,
    faithfulness_gradients,
    stability,
    stability_gradients,
)
from pace.model.statistics import Statistics
from pace.observations import Batch, Observations

Images = slice | npt.NDArray[np.int64]

SMALLEST_ALPHA = 1e-3  # of a patch


@dataclass(frozen=True)
class Concepts:
    """The dataset level: everything that is learned."""

    gaussians: Gaussians  # μ_k - offset, Σ_k
    offset: Tensor  # (d,) subtracted from every embedding, so that float32 keeps its digits
    alpha: Tensor  # (K,) float64
    label_head: Tensor  # H (K, N) float64
    pair_weights: Tensor  # β (K,) float64

    def __len__(self) -> int:
        return len(self.alpha)

    def to(self, device: torch.device, dtype: torch.dtype) -> Concepts:
        gaussians = {name: tensor.to(device, dtype) for name, tensor in self.gaussians.tensors().items()}
        return Concepts(
            type(self.gaussians).from_tensors(gaussians),
            self.offset.to(device, dtype),
            self.alpha.to(device),
            self.label_head.to(device),
            self.pair_weights.to(device),
        )


@dataclass(frozen=True)
class Settings:
    """How to learn and infer; nothing here is learned."""

    updates: Updates
    max_sweeps: int
    sweep_tol: float
    negatives: int
    batch_size: int | None
    learn_alpha: bool
    smallest_alpha: float
    head_steps: int
    head_rate: float
    device: torch.device
    dtype: torch.dtype

    def image_weight(self, n_tokens: int) -> int:
        """Σ_j w_mj: an image weighs as much as its tokens or, by the printed rules, as one."""
        return n_tokens if self.updates == "exact" else 1

    def images_per_batch(self, n_tokens: int, views: int, gaussians: Gaussians) -> int:
        return self.batch_size or max(1, gaussians.tokens_at_once() // (n_tokens * views))


class Memory:
    """Where inference left every image, so that the next pass starts there and the bound cannot fall."""

    def __init__(self, views: int, n_images: int, n_concepts: int, n_tokens: int, settings: Settings):
        counts, phi_bar = uniform_start(views * n_images, n_concepts, n_tokens, settings.updates, settings.device)
        self._state = torch.stack([counts, phi_bar]).to(settings.dtype).view(2, views, n_images, n_concepts)

    def recall(self, images: Images) -> tuple[Tensor, Tensor]:
        counts, phi_bar = self._state[:, :, images].flatten(1, 2).double()
        return counts, phi_bar

    def keep(self, images: Images, posterior: Posterior) -> None:
        for place, value in zip(self._state, (posterior.counts, posterior.phi_bar), strict=True):
            place[:, images] = value.view(len(place), -1, value.shape[1]).to(place.dtype)


def pass_over(
    observations: Observations,
    perturbed: Observations | None,
    concepts: Concepts,
    settings: Settings,
    memory: Memory | None = None,
    report: Callable[[int], object] = lambda images: None,
) -> Statistics:
    """The E-step for all images: φ and γ of each, and the statistics they leave."""
    views = [observations] if perturbed is None else [observations, perturbed]
    total = Statistics.zeros(concepts.gaussians.empty_sums(), concepts.label_head.shape[1])
    at_once = settings.images_per_batch(observations.n_tokens, len(views), concepts.gaussians)
    plan = plain_batches(len(observations), at_once)
    if perturbed is not None:
        plan = grouped_batches(len(observations), settings.negatives, at_once)
    features = None
    for images, sizes in plan:
        batches = [view.batch(images, settings.device, settings.dtype) for view in views]
        start = None if memory is None else memory.recall(images)
        groups = None if perturbed is None else Groups(sizes, settings.device)
        posterior, features = _expect(batches, groups, concepts, settings, start, total, features)
        if memory is not None:
            memory.keep(images, posterior)
        report(sum(sizes))
    return total


def explain_batch(batch: Batch, concepts: Concepts, settings: Settings, *, use_predictions: bool = False) -> Posterior:
    """Image and patch level of new images, each on its own; ŷ is used only when asked for."""
    predictions = distributions(batch.predictions) if use_predictions and batch.predictions is not None else None
    log_likelihood, weights, _ = _evidence([batch], concepts, settings)

    def pull(phi_bar: Tensor) -> Tensor:
        assert predictions is not None
        return faithfulness_gradients(phi_bar, predictions, concepts.label_head)[0]

    return _infer(log_likelihood, weights, concepts, settings, None, None if predictions is None else pull)


def update(
    concepts: Concepts, statistics: Statistics, prior: Prior, settings: Settings, local: Statistics | None = None
) -> Concepts:
    """The M-step. `local` gives the heads' gradients when they should come from fewer images than the rest."""
    heads = local or statistics
    label_head, pair_weights = concepts.label_head, concepts.pair_weights
    if label_head.shape[1] > 1:
        label_head = _ascend(
            label_head, heads.head_gradient, heads.head_curvature, (-1.0, 1.0), settings.head_steps, settings.head_rate
        )
    if heads.views > heads.images:
        pair_weights = _ascend(
            pair_weights[:, None], heads.pair_gradient[:, None], heads.pair_curvature,
            (0.0, 1.0), settings.head_steps, settings.head_rate,
        ).squeeze(1)  # fmt: skip
    alpha = concepts.alpha
    if settings.learn_alpha:
        alpha = fit_dirichlet(alpha, statistics.log_theta / statistics.views, settings.smallest_alpha)
    gaussians = concepts.gaussians.maximise(statistics.moments, prior)
    return replace(concepts, gaussians=gaussians, alpha=alpha, label_head=label_head, pair_weights=pair_weights)


def plain_batches(n_images: int, at_once: int) -> Iterator[tuple[Images, list[int]]]:
    """All images in order; without pairs there are no negatives, and an image needs no company."""
    for start in range(0, n_images, at_once):
        stop = min(start + at_once, n_images)
        yield slice(start, stop), [stop - start]


def grouped_batches(n_images: int, negatives: int, at_once: int) -> Iterator[tuple[Images, list[int]]]:
    """Whole groups of mutual negatives, as many at once as fit, and their sizes.

    Group g of G holds images g, g + G, g + 2G, …: datasets come sorted by class, and negatives should not all be of one.
    Which images share a group depends on their order and on `negatives`, not on what is worked on at once.
    """
    n_groups = -(-n_images // negatives)
    together = max(1, at_once // negatives)
    for first in range(0, n_groups, together):
        members = [np.arange(g, n_images, n_groups) for g in range(first, min(first + together, n_groups))]
        yield np.concatenate(members), [len(m) for m in members]


def _evidence(
    batches: list[Batch], concepts: Concepts, settings: Settings, room: Tensor | None = None
) -> tuple[Tensor, Weights, Tensor]:
    """Log-likelihood of every token under every concept (B, J, K), the tokens' weights, and their features."""
    embeddings = batches[0].embeddings if len(batches) == 1 else torch.cat([batch.embeddings for batch in batches])
    weights = Weights.of(torch.cat([batch.attention for batch in batches]), settings.updates)
    n_images, n_tokens, dim = embeddings.shape
    x = concepts.gaussians.features(embeddings.reshape(-1, dim), concepts.offset, room)
    if settings.updates == "exact":
        distances = concepts.gaussians.near_distances(x, furthest_plausible(concepts.alpha, n_tokens))
    else:  # tempered, so the nearest concept need not be the likeliest
        distances = concepts.gaussians.mahalanobis(x)
    distances = distances.view(n_images, n_tokens, len(concepts))
    return weights.log_likelihood(distances, concepts.gaussians.log_det, dim), weights, x


def _infer(
    log_likelihood: Tensor,
    weights: Weights,
    concepts: Concepts,
    settings: Settings,
    start: tuple[Tensor, Tensor] | None,
    pull: Callable[[Tensor], Tensor] | None,
) -> Posterior:
    n_images, n_tokens, n_concepts = log_likelihood.shape
    return infer(
        log_likelihood,
        weights,
        concepts.alpha,
        start or uniform_start(n_images, n_concepts, n_tokens, settings.updates, log_likelihood.device),
        log_det=concepts.gaussians.log_det,
        dim=concepts.gaussians.means.shape[1],
        pull=pull,
        max_sweeps=settings.max_sweeps,
        tol=settings.sweep_tol,
    )


def _expect(
    batches: list[Batch],
    groups: Groups | None,  # of negatives, when there are perturbed views
    concepts: Concepts,
    settings: Settings,
    start: tuple[Tensor, Tensor] | None,
    total: Statistics,
    room: Tensor | None,
) -> tuple[Posterior, Tensor]:
    """Infer one batch (original views first, then perturbed ones) and add it to the statistics."""
    images = len(batches[0].attention)
    head, beta = concepts.label_head, concepts.pair_weights
    predictions = None
    if head.shape[1] > 0 and batches[0].predictions is not None:
        predictions = distributions(batches[0].predictions)
    own_term_only = settings.updates == "paper"

    def pull(phi_bar: Tensor) -> Tensor:
        """g_m = ∂(L_f + L_s)/∂φ̄_m for both views."""
        gradient = torch.zeros_like(phi_bar)
        if predictions is not None:
            gradient[:images] += faithfulness_gradients(phi_bar[:images], predictions, head)[0]
        if groups is not None:
            ours, theirs, _ = stability_gradients(
                phi_bar[:images], phi_bar[images:], beta, groups, own_term_only=own_term_only
            )
            gradient[:images] += ours
            gradient[images:] += theirs
        return gradient

    log_likelihood, weights, x = _evidence(batches, concepts, settings, room)
    has_pull = groups is not None or predictions is not None
    posterior = _infer(log_likelihood, weights, concepts, settings, start, pull if has_pull else None)

    total.images += images
    total.views += len(posterior.gamma)
    total.bound[0] += posterior.bound.sum()
    total.log_theta += expected_log_theta(posterior.gamma).sum(0)
    original = posterior.phi_bar[:images]
    if predictions is not None:
        total.bound[1] += faithfulness(original, predictions, head).sum()
        total.head_gradient += faithfulness_gradients(original, predictions, head)[1]
        # ∂²log Σ_n exp s_n ≤ max_n p_n, and inside the boxes no p_n exceeds e² / (e² + N - 1); nor is it ever above ½.
        steepest = min(0.5, math.e**2 / (math.e**2 + head.shape[1] - 1))
        total.head_curvature += steepest * original.T @ original
    if groups is not None:
        other = posterior.phi_bar[images:]
        total.bound[2] += stability(original, other, beta, groups).sum()
        total.pair_gradient += stability_gradients(original, other, beta, groups, own_term_only=True)[2]
        tidy = groups.padded(original)
        for size, outer in zip(groups.sizes, tidy.mT @ tidy, strict=True):
            if size > 1:  # likewise: scores lie in [0, 1], so no share exceeds e / (e + F - 1)
                total.pair_curvature += math.e / (math.e + size - 2) * outer.square()
    r = posterior.phi.mul_(weights.count[:, :, None])  # φ is not needed again
    concepts.gaussians.accumulate(x, r.view(len(x), -1), total.moments)
    return posterior, x


def distributions(predictions: Tensor) -> Tensor:
    """ŷ as float64 that sums to one to the last digit, which float16 probabilities do not."""
    wide = predictions.double()
    return wide / wide.sum(1, keepdim=True)


def _ascend(
    start: Tensor, gradient: Tensor, curvature: Tensor, box: tuple[float, float], steps: int, rate: float
) -> Tensor:
    """Adam, inside a box, on Q(x) = ⟨gradient, x - start⟩ - ½⟨x - start, curvature (x - start)⟩.

    The bound never lies below Q and equals it at the start, so the best point that Adam passes cannot lower the bound.
    """
    point = start.clone().requires_grad_(True)
    optimiser = torch.optim.Adam([point], lr=rate, maximize=True)
    slope = gradient
    best, best_value = start, 0.0
    for _ in range(steps):
        point.grad = slope
        optimiser.step()
        point.data.clamp_(*box)
        move = point.detach() - start
        slope = gradient - curvature @ move
        value = float((move * (gradient + slope)).sum()) / 2
        if value > best_value:
            best, best_value = point.detach().clone(), value
    return best


def fit_dirichlet(alpha: Tensor, mean_log: Tensor, smallest: float, steps: int = 20) -> Tensor:
    """Minka's fixed point Ψ(α_k) = Ψ(Σα) + mean E[log θ_k]: every step raises Σ_m E log Dirichlet(θ_m | α)."""
    for _ in range(steps):
        target = torch.digamma(alpha.sum()) + mean_log
        # Inverse digamma: Minka's starting point, then Newton.
        alpha = torch.where(target >= -2.22, target.exp() + 0.5, -1 / (target - torch.digamma(torch.ones_like(target))))
        for _ in range(5):
            alpha = alpha - (torch.digamma(alpha) - target) / torch.polygamma(1, alpha)
        alpha = alpha.clamp_min(smallest)
    return alpha
