"""The E-step over many images: φ and γ of each, and the statistics from which the M-step learns.

The bound L = L_e + L_f + L_s rises from epoch to epoch (docs/model.md, from J = 6 tokens up): every image goes on where the
last epoch left it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pace.model import nesting
from pace.model.concepts import Concepts, head_curvature, pair_curvature, under
from pace.model.feeding import Feed, Images, Visits
from pace.model.gaussians import Sums
from pace.model.inference import Posterior, Weights, furthest_plausible, infer, uniform_start
from pace.model.nesting import Nest
from pace.model.objective import (
    Groups,
    expected_log_theta,
    faithfulness,
    faithfulness_gradients,
    stability,
    stability_gradients,
)
from pace.model.settings import SWEEPS_PER_EPOCH, Settings
from pace.model.statistics import Statistics
from pace.observations import Batch, Observations

Report = Callable[[int], object]  # told how many more images are done
Left = tuple[Tensor, Tensor]  # where inference left some images, as `Memory` keeps it


class Memory:
    """Where inference left every image, so that the next pass starts there and the bound cannot fall.

    Of an image: γ - α and φ̄, of parts where concepts are their kinds.
    """

    def __init__(self, views: int, n_images: int, n_tokens: int, concepts: Concepts, settings: Settings):
        self._split = len(concepts.alpha)
        shape = views * n_images, self._split, n_tokens, settings.updates, settings.device
        state = torch.cat(uniform_start(*shape), 1).to(settings.dtype)
        self.state = state.view(views, n_images, state.shape[1])
        self.fixed: Sums = {}  # sums that no epoch changes, once they are known

    def recall(self, images: Images) -> Left:
        known = self.state[:, images].flatten(0, 1).double()
        return known[:, : self._split], known[:, self._split :]

    def keep(self, images: Images, left: Left) -> None:
        value = torch.cat(left, 1)
        self.state[:, images] = value.view(len(self.state), -1, value.shape[1]).to(self.state.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """For checkpoints."""
        return {"memory": self.state} | {f"fixed.{name}": tensor for name, tensor in self.fixed.items()}


def expect(
    feed: Feed,
    visits: Visits,
    concepts: Concepts,
    settings: Settings,
    memory: Memory | None = None,
    report: Report = lambda images: None,
    chosen: npt.NDArray[np.int64] | None = None,
    upcoming: Images | None = None,
) -> Statistics:
    """The E-step: visit the images batch by batch and add up what they leave.

    `chosen` are the images visited, if not all; `upcoming` those that the next call will ask for first, which are read ahead.
    """
    # Images that go on where they were need not settle in every epoch: with few sweeps learning is several times as quick,
    # and ends higher, since images commit less to the concepts of the first epochs. The printed rules sweep until all settle.
    if memory is not None and settings.updates == "exact":
        settings = replace(settings, max_sweeps=min(settings.max_sweeps, SWEEPS_PER_EPOCH))
    total, room = concepts.no_statistics(), None
    known = {} if memory is None else memory.fixed
    for name in known:
        del total.moments[name]
    parts = visits.parts(feed.units_at_once(concepts, settings))
    wanted = [part.places if feed.local else part.images for part in parts]
    if chosen is not None:
        wanted = [chosen[images] for images in wanted]
    # Not strict: of many processes one may have no images in this step.
    for part, images, following in zip(parts, wanted, [*wanted[1:], upcoming], strict=False):
        batches = feed.load(images, following)
        groups = None if visits.negatives is None else Groups(part.sizes, settings.device)
        start = None if memory is None else memory.recall(part.places)
        left, room = expect_batch(batches, groups, concepts, settings, start, total, room)
        if memory is not None:
            memory.keep(part.places, left)
        report(sum(part.sizes))
    total.moments |= known
    total.bound[0] += concepts.left_out(total.moments)
    if memory is not None:
        memory.fixed = {name: total.moments[name] for name in concepts.fixed_sums}
    return total


def expect_all(
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
        return expect(feed, visits, concepts, settings, memory, report)


def expect_batch(
    batches: list[Batch],
    groups: Groups | None,
    concepts: Concepts,
    settings: Settings,
    start: Left | None,
    total: Statistics,
    room: Tensor | None = None,
) -> tuple[Left, Tensor | None]:
    """Infer one batch (original views first, then perturbed ones) and add it to the statistics, relative distances as such.

    `groups` are those of negatives, when there are perturbed views; `room` is memory to work in, given back for the next batch.
    """
    images = len(batches[0].attention)
    predictions = None
    if concepts.label_head.shape[1] > 0 and batches[0].predictions is not None:
        predictions = distributions(batches[0].predictions)
    if concepts.nest is None:
        posterior, room = _expect_flat(batches, images, predictions, groups, concepts, settings, start, total, room)
        phi_bar, held = posterior.phi_bar, posterior.counts
    else:
        posterior, psi = _expect_nested(batches, concepts, concepts.nest, settings, start, total)
        phi_bar, held = (some[:, concepts.nest.part_of] * psi for some in (posterior.phi_bar, posterior.counts))
    total.images += images
    total.views += len(posterior.gamma)
    total.bound[0] += posterior.bound.sum()
    total.held += held[:images].sum(0)
    if predictions is not None:
        total.said += phi_bar[:images].T @ predictions
    total.log_theta += expected_log_theta(posterior.gamma).sum(0)
    _add_heads(phi_bar[:images], phi_bar[images:], predictions, groups, concepts, total)
    return (posterior.counts, posterior.phi_bar), room


def _expect_flat(
    batches: list[Batch],
    images: int,
    predictions: Tensor | None,
    groups: Groups | None,
    concepts: Concepts,
    settings: Settings,
    start: Left | None,
    total: Statistics,
    room: Tensor | None,
) -> tuple[Posterior, Tensor]:
    """φ and γ of the paper's model, pulled by L_f and L_s; adds the patches to the moments."""
    head, beta = concepts.label_head, concepts.pair_weights
    own_term_only = settings.updates == "paper"

    def pull(phi_bar: Tensor) -> Tensor:
        """g_m = ∂(L_f + L_s)/∂φ̄_m for both views."""
        gradient, (one, two) = torch.zeros_like(phi_bar), (phi_bar[:images], phi_bar[images:])
        if predictions is not None:
            gradient[:images] += faithfulness_gradients(one, predictions, head)[0]
        if groups is not None:
            ours, theirs, _ = stability_gradients(one, two, beta, groups, own_term_only=own_term_only)
            gradient[:images] += ours
            gradient[images:] += theirs
        return gradient

    log_likelihood, weights, x = evidence(batches, concepts, settings, room)
    pulled = groups is not None or predictions is not None
    posterior = _infer(log_likelihood, weights, concepts, settings, start, pull if pulled else None)
    log_det, dim = concepts.gaussians.log_det, concepts.gaussians.means.shape[1]
    posterior.bound = posterior.bound + weights.correction(posterior.phi_bar, posterior.counts, log_det, dim)
    r = posterior.phi.mul_(weights.count[:, :, None])  # φ is not needed again
    concepts.gaussians.accumulate(x, r.view(len(x), -1), total.moments)
    return posterior, x


def _expect_nested(
    batches: list[Batch], concepts: Concepts, nest: Nest, settings: Settings, start: Left | None, total: Statistics
) -> tuple[Posterior, Tensor]:
    """φ and γ of parts, and ψ of kinds; adds the patches to the moments of both. H and β follow, they do not pull."""
    x = torch.cat([batch.embeddings for batch in batches]) - concepts.offset
    posterior, weights, u = infer_parts(x, torch.cat([b.attention for b in batches]), concepts, nest, settings, start)
    kinds = nesting.infer_kinds(posterior, x, weights.count, nest, concepts.gaussians)
    nesting.add_kinds(kinds, nest, concepts.gaussians, total.moments)
    held = posterior.phi.mul_(weights.count[:, :, None])  # φ is not needed again
    nest.parts.accumulate(u, held.flatten(0, 1), under(nesting.PARTS, total.moments))
    return posterior, kinds.psi


def infer_parts(
    x: Tensor, attention: Tensor, concepts: Concepts, nest: Nest, settings: Settings, start: Left | None = None
) -> tuple[Posterior, Weights, Tensor]:
    """φ and γ of parts from x = e - offset, what the tokens count, and their features u (B J, r)."""
    weights = Weights.of(attention, settings.updates)
    u = nest.features(x, attention).flatten(0, 1)
    distances = nest.parts.mahalanobis(u, relative=True).view(*attention.shape, len(nest))
    likelihood = weights.log_likelihood(distances, nest.parts.log_det, u.shape[1])
    return _infer(likelihood, weights, concepts, settings, start, None), weights, u


def _add_heads(
    one: Tensor, two: Tensor, predictions: Tensor | None, groups: Groups | None, concepts: Concepts, total: Statistics
) -> None:
    """L_f and L_s of images with these φ̄, and the quadratics that H and β climb."""
    head, beta = concepts.label_head, concepts.pair_weights
    if predictions is not None:
        total.bound[1] += faithfulness(one, predictions, head).sum()
        curvature = head_curvature(one, head.shape[1])
        total.head_curvature += curvature
        total.head_slope += faithfulness_gradients(one, predictions, head)[1] + curvature @ head
    if groups is not None:
        total.bound[2] += stability(one, two, beta, groups).sum()
        curvature = pair_curvature(groups.padded(one), groups.sizes)
        total.pair_curvature += curvature
        total.pair_slope += stability_gradients(one, two, beta, groups, own_term_only=True)[2] + curvature @ beta


def explain_batch(
    batch: Batch, concepts: Concepts, settings: Settings, *, use_predictions: bool = False, patches: bool = True
) -> Posterior:
    """Image and patch level of new images, each on its own; ŷ is used only when asked for."""
    if concepts.nest is not None:
        return _explain_nested(batch, concepts, concepts.nest, settings, patches)
    predictions = distributions(batch.predictions) if use_predictions and batch.predictions is not None else None
    log_likelihood, weights, _ = evidence([batch], concepts, settings)

    def pull(phi_bar: Tensor) -> Tensor:
        assert predictions is not None
        return faithfulness_gradients(phi_bar, predictions, concepts.label_head)[0]

    return _infer(log_likelihood, weights, concepts, settings, None, None if predictions is None else pull, patches)


def _explain_nested(batch: Batch, concepts: Concepts, nest: Nest, settings: Settings, patches: bool) -> Posterior:
    """γ and φ of concepts: those of their parts, shared out among the kinds."""
    x = batch.embeddings - concepts.offset
    found, weights, _ = infer_parts(x, batch.attention, concepts, nest, settings)
    psi = nesting.infer_kinds(found, x, weights.count, nest, concepts.gaussians).psi
    gamma = found.gamma[:, nest.part_of] * psi
    phi = found.phi[:, :, nest.part_of] * psi[:, None].to(found.phi.dtype) if patches else found.phi.new_empty(0)
    return replace(found, gamma=gamma, phi=phi)


def evidence(
    batches: list[Batch], concepts: Concepts, settings: Settings, room: Tensor | None = None
) -> tuple[Tensor, Weights, Tensor]:
    """Log-likelihood of every token under every concept (B, J, K), the tokens' weights, and their features.

    What a token's log-likelihoods have in common may be left out: the bound needs its sum, φ and γ do not.
    """
    embeddings = batches[0].embeddings if len(batches) == 1 else torch.cat([batch.embeddings for batch in batches])
    weights = Weights.of(torch.cat([batch.attention for batch in batches]), settings.updates)
    n_images, n_tokens, dim = embeddings.shape
    x = concepts.gaussians.features(embeddings.reshape(-1, dim), concepts.offset, room)
    # Of tempered ones the nearest concept need not be the likeliest.
    within = furthest_plausible(concepts.alpha, n_tokens) if settings.updates == "exact" else math.inf
    distances = concepts.gaussians.mahalanobis(x, within, relative=True).view(n_images, n_tokens, len(concepts))
    return weights.log_likelihood(distances, concepts.gaussians.log_det, dim), weights, x


def _infer(
    log_likelihood: Tensor,
    weights: Weights,
    concepts: Concepts,
    settings: Settings,
    start: tuple[Tensor, Tensor] | None,
    pull: Callable[[Tensor], Tensor] | None,
    patches: bool = True,
) -> Posterior:
    n_images, n_tokens, n_concepts = log_likelihood.shape
    return infer(
        log_likelihood,
        weights,
        concepts.alpha,
        start or uniform_start(n_images, n_concepts, n_tokens, settings.updates, log_likelihood.device),
        pull=pull,
        max_sweeps=settings.max_sweeps,
        tol=settings.sweep_tol,
        patches=patches,
    )


def distributions(predictions: Tensor) -> Tensor:
    """ŷ as float64 that sums to one to the last digit, which float16 probabilities do not."""
    wide = predictions.double()
    return wide / wide.sum(1, keepdim=True)
