"""Dataset-level learning: a pass over images gives statistics, statistics give new concepts.

Everything here raises L = L_e + L_f + L_s or leaves it: the sweeps (docs/model.md, from J = 6 tokens up), μ and Σ in closed
form, α by a fixed point, and H and β by Adam on a quadratic that lies below the bound and touches it where they are now.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pace.model.feeding import Chunk, Feed, Images, Part, Visits
from pace.model.gaussians import FAMILIES, Gaussians, Prior
from pace.model.inference import (
    Posterior,
    Updates,
    Weights,
    furthest_plausible,
    infer,
    infer_alone,
    infer_gamma,
    uniform_start,
)
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

Report = Callable[[int], object]  # told how many images more are done

SMALLEST_ALPHA = 1e-3  # of a patch
SWEEPS_AN_EPOCH = 4  # over images that are remembered

_BESIDE_GAUSSIANS = ("offset", "alpha", "label_head", "pair_weights")  # of Concepts
_MEAN, _SQUARE = 0.9, 0.999  # Adam's β₁ and β₂
_COPIES = 8  # of the Gaussians that learning holds: their statistics in float64, those of a batch, the next Gaussians


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

    def tensors(self) -> dict[str, Tensor]:
        """Flat, for files and for communication."""
        gaussians = {f"gaussians.{name}": tensor for name, tensor in self.gaussians.tensors().items()}
        return gaussians | {name: getattr(self, name) for name in _BESIDE_GAUSSIANS}

    @classmethod
    def from_tensors(cls, family: str, tensors: dict[str, Tensor]) -> Concepts:
        """Concepts of that covariance family; tensors of other names are left alone."""
        gaussians = FAMILIES[family].from_tensors(under("gaussians.", tensors))
        return cls(gaussians, **{name: tensors[name] for name in _BESIDE_GAUSSIANS})

    def to(self, device: torch.device, dtype: torch.dtype) -> Concepts:
        before = self.gaussians.tensors()
        gaussians = {name: tensor.to(device, dtype) for name, tensor in before.items()}
        if all(gaussians[name] is tensor for name, tensor in before.items()):
            return self  # with what the Gaussians have worked out for their distances
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
    memory: int | None  # bytes on the device
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
        if self.batch_size:
            return self.batch_size
        tokens = gaussians.tokens_at_once()
        if self.memory is not None:
            tokens = min(tokens, self.working_memory(gaussians) // 2 // _bytes_per_token(gaussians))
        return max(1, tokens // (n_tokens * views))

    def working_memory(self, gaussians: Gaussians) -> int:
        """What the budget leaves beside the concepts and their statistics: half of it for a batch, half for embeddings."""
        assert self.memory is not None
        taken = _COPIES * sum(tensor.nbytes for tensor in gaussians.tensors().values())
        if taken >= self.memory:
            raise ValueError(
                f"memory: {len(gaussians.means)} {gaussians.name} concepts in {gaussians.means.shape[1]} dimensions take "
                f"about {taken / 1e9:.3g} GB to learn; found {self.memory / 1e9:.3g} GB"
            )
        return self.memory - taken

    def chunk(self, observations: Observations, perturbed: Observations | None, gaussians: Gaussians) -> Chunk:
        """As many units as there is room for, and no more than there are."""
        views, unit = (1, 1) if perturbed is None else (2, self.negatives)
        images = min(self.images_per_batch(observations.n_tokens, views, gaussians), len(observations) + unit - 1)
        return Chunk(max(1, images // unit))


class Memory:
    """Where inference left every image, so that the next pass starts there and the bound cannot fall."""

    def __init__(self, views: int, n_images: int, n_concepts: int, n_tokens: int, settings: Settings):
        counts, phi_bar = uniform_start(views * n_images, n_concepts, n_tokens, settings.updates, settings.device)
        self.state = torch.stack([counts, phi_bar]).to(settings.dtype).view(2, views, n_images, n_concepts)

    def recall(self, images: Images) -> tuple[Tensor, Tensor]:
        counts, phi_bar = self.state[:, :, images].flatten(1, 2).double()
        return counts, phi_bar

    def keep(self, images: Images, posterior: Posterior) -> None:
        for place, value in zip(self.state, (posterior.counts, posterior.phi_bar), strict=True):
            place[:, images] = value.view(len(place), -1, value.shape[1]).to(place.dtype)


class Expectation:
    """The E-step: φ and γ of images, and the statistics they leave. Holds the room it works in."""

    def __init__(self, feed: Feed, concepts: Concepts, settings: Settings, chunk: Chunk):
        self._feed, self._concepts, self._settings, self._chunk = feed, concepts, settings, chunk
        # Images that go on where they were need not settle in every epoch: with few sweeps learning is several times as
        # quick, and ends higher, since images commit themselves less to the concepts of the first epochs. The printed rules
        # sweep until all have settled.
        few = SWEEPS_AN_EPOCH if settings.updates == "exact" else settings.max_sweeps
        self._brief = replace(settings, max_sweeps=min(settings.max_sweeps, few))
        self._fresh = self.no_statistics()
        self._features: Tensor | None = None

    def no_statistics(self) -> Statistics:
        return Statistics.zeros(self._concepts.gaussians.empty_sums(), self._concepts.label_head.shape[1])

    def add(
        self,
        visits: Visits,
        done: int,
        until: int,
        total: Statistics,
        memory: Memory | None = None,
        report: Report = lambda images: None,
        chosen: npt.NDArray[np.int64] | None = None,  # the images that are visited, where these are not all
        upcoming: Images | None = None,  # those that will be visited next
    ) -> None:
        """Add units done … until - 1 to the total, chunk by chunk, each of them whole or, on an error, not at all."""

        def wanted(part: Part) -> Images:
            images = part.places if self._feed.local else part.images
            return images if chosen is None else chosen[images]

        def work(first: int, last: int) -> None:
            part, following = visits.part(first, last), upcoming
            if last < len(visits):
                following = wanted(visits.part(last, min(last + self._chunk.units, len(visits))))
            batches = self._feed.load(wanted(part), following)
            start = None if memory is None else memory.recall(part.places)
            groups = None if visits.negatives is None else Groups(part.sizes, self._settings.device)
            self._fresh.zero_()
            room, self._features = self._features, None
            settings = self._settings if memory is None else self._brief
            posterior, self._features = _expect(batches, groups, self._concepts, settings, start, self._fresh, room)
            if memory is not None:
                memory.keep(part.places, posterior)
            total.add_(self._fresh)
            report(sum(part.sizes))

        self._chunk.through(done, until, work)


def pass_over(
    observations: Observations,
    perturbed: Observations | None,
    concepts: Concepts,
    settings: Settings,
    memory: Memory | None = None,
    report: Report = lambda images: None,
) -> Statistics:
    """The E-step for all images, in one process."""
    visits = Visits(len(observations), None if perturbed is None else settings.negatives)
    views = [observations] if perturbed is None else [observations, perturbed]
    with Feed(views, settings.device, settings.dtype) as feed:
        expectation = Expectation(feed, concepts, settings, settings.chunk(observations, perturbed, concepts.gaussians))
        total = expectation.no_statistics()
        expectation.add(visits, 0, len(visits), total, memory, report)
    return total


def explain_batch(batch: Batch, concepts: Concepts, settings: Settings, *, use_predictions: bool = False) -> Posterior:
    """Image and patch level of new images, each on its own; ŷ is used only when asked for."""
    predictions = distributions(batch.predictions) if use_predictions and batch.predictions is not None else None
    log_likelihood, weights, _ = _evidence([batch], concepts, settings)

    def pull(phi_bar: Tensor) -> Tensor:
        assert predictions is not None
        return faithfulness_gradients(phi_bar, predictions, concepts.label_head)[0]

    return _infer(log_likelihood, weights, concepts, settings, None, None if predictions is None else pull)


def mixtures(batch: Batch, concepts: Concepts, settings: Settings) -> Tensor:
    """γ (B, K) of new images, each on its own and without ŷ, for those who do not look at patches."""
    log_likelihood, weights, _ = _evidence([batch], concepts, settings, relative=True)
    n_images, n_tokens, n_concepts = log_likelihood.shape
    start = uniform_start(n_images, n_concepts, n_tokens, settings.updates, log_likelihood.device)
    return infer_gamma(
        log_likelihood, weights, concepts.alpha, start, max_sweeps=settings.max_sweeps, tol=settings.sweep_tol
    )


def update(concepts: Concepts, statistics: Statistics, prior: Prior, settings: Settings) -> Concepts:
    """The M-step."""
    label_head, pair_weights = concepts.label_head, concepts.pair_weights
    if label_head.shape[1] > 1:
        label_head = _ascend(
            label_head, statistics.head_slope, statistics.head_curvature,
            (-1.0, 1.0), settings.head_steps, settings.head_rate,
        )  # fmt: skip
    if statistics.views > statistics.images:
        pair_weights = _ascend(
            pair_weights[:, None], statistics.pair_slope[:, None], statistics.pair_curvature,
            (0.0, 1.0), settings.head_steps, settings.head_rate,
        ).squeeze(1)  # fmt: skip
    alpha = concepts.alpha
    if settings.learn_alpha:
        alpha = fit_dirichlet(alpha, statistics.log_theta / statistics.views, settings.smallest_alpha)
    gaussians = concepts.gaussians.maximise(statistics.moments, prior)
    return replace(concepts, gaussians=gaussians, alpha=alpha, label_head=label_head, pair_weights=pair_weights)


def _evidence(
    batches: list[Batch],
    concepts: Concepts,
    settings: Settings,
    room: Tensor | None = None,
    *,
    relative: bool = False,
) -> tuple[Tensor, Weights, Tensor]:
    """Log-likelihood of every token under every concept (B, J, K), the tokens' weights, and their features.

    `relative` may leave out what a token's log-likelihoods have in common, which the bound feels but φ and γ do not.
    """
    embeddings = batches[0].embeddings if len(batches) == 1 else torch.cat([batch.embeddings for batch in batches])
    weights = Weights.of(torch.cat([batch.attention for batch in batches]), settings.updates)
    n_images, n_tokens, dim = embeddings.shape
    x = concepts.gaussians.features(embeddings.reshape(-1, dim), concepts.offset, room)
    if settings.updates == "exact":
        measure = concepts.gaussians.contrasts if relative else concepts.gaussians.near_distances
        distances = measure(x, furthest_plausible(concepts.alpha, n_tokens))
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
    work = infer_alone if pull is None else partial(infer, pull=pull)
    return work(
        log_likelihood,
        weights,
        concepts.alpha,
        start or uniform_start(n_images, n_concepts, n_tokens, settings.updates, log_likelihood.device),
        log_det=concepts.gaussians.log_det,
        dim=concepts.gaussians.means.shape[1],
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
        # ∂²log Σ_n exp s_n ≤ max_n p_n, and inside the boxes no p_n exceeds e² / (e² + N - 1); nor is it ever above ½.
        steepest = min(0.5, math.e**2 / (math.e**2 + head.shape[1] - 1))
        curvature = steepest * original.T @ original
        total.head_curvature += curvature
        total.head_slope += faithfulness_gradients(original, predictions, head)[1] + curvature @ head
    if groups is not None:
        other = posterior.phi_bar[images:]
        total.bound[2] += stability(original, other, beta, groups).sum()
        tidy = groups.padded(original)
        curvature = torch.zeros_like(total.pair_curvature)
        for size, outer in zip(groups.sizes, tidy.mT @ tidy, strict=True):
            if size > 1:  # likewise: scores lie in [0, 1], so no share exceeds e / (e + F - 1)
                curvature += math.e / (math.e + size - 2) * outer.square()
        total.pair_curvature += curvature
        gradient = stability_gradients(original, other, beta, groups, own_term_only=True)[2]
        total.pair_slope += gradient + curvature @ beta
    r = posterior.phi.mul_(weights.count[:, :, None])  # φ is not needed again
    concepts.gaussians.accumulate(x, r.view(len(x), -1), total.moments)
    return posterior, x


def _bytes_per_token(gaussians: Gaussians) -> int:
    """What a patch takes while it is worked on: about four times its embedding, five of its φ, and factors if there are any."""
    k, d = gaussians.means.shape
    rank = getattr(gaussians, "factors", gaussians.means[:, :, None][:, :, :0]).shape[2]
    return (4 * d + (5 + 2 * rank) * k) * gaussians.means.element_size()


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin so, without that beginning."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def distributions(predictions: Tensor) -> Tensor:
    """ŷ as float64 that sums to one to the last digit, which float16 probabilities do not."""
    wide = predictions.double()
    return wide / wide.sum(1, keepdim=True)


def _ascend(
    start: Tensor, slope_at_zero: Tensor, curvature: Tensor, box: tuple[float, float], steps: int, rate: float
) -> Tensor:
    """Adam, inside a box, on Q(x) = ⟨slope, x⟩ - ½⟨x, curvature x⟩.

    The bound never lies below Q, but for a constant, and touches it at the start, so the best point that Adam passes cannot
    lower the bound.
    """
    gradient = slope_at_zero - curvature @ start
    point, slope = start, gradient
    best, best_value = start, start.new_zeros(())
    # By hand: torch.optim is the same, and takes seconds to import what it needs.
    mean, square = torch.zeros_like(start), torch.zeros_like(start)
    for step in range(1, steps + 1):
        mean = _MEAN * mean + (1 - _MEAN) * slope
        square = _SQUARE * square + (1 - _SQUARE) * slope.square()
        size = (square / (1 - _SQUARE**step)).sqrt() + 1e-8
        point = (point + rate / (1 - _MEAN**step) * mean / size).clamp(*box)
        move = point - start
        slope = gradient - curvature @ move
        value = (move * (gradient + slope)).sum() / 2
        best = torch.where(value > best_value, point, best)  # no branch, for which a GPU would have to be waited for
        best_value = torch.maximum(value, best_value)
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
