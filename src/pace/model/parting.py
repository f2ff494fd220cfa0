"""Where parts and kinds start: the features that tell them, parts by EM on a sample of images, kinds by splitting parts.

What tells parts: the directions in which patches of one image differ most, beside what a change of view does to the same
place. What tells kinds: those in which a part differs most from image to image, beside what a change of view does to it. Of
two blocks side by side, the first tells parts and the second kinds. A part gets as many kinds as it has to tell: the group
of images in which a part varies most is split in two, again and again, until there are enough.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pace.model.concepts import Concepts, fit_dirichlet
from pace.model.gaussians import FAMILIES, Gaussians, Prior
from pace.model.inference import Weights, infer
from pace.model.nesting import Nest
from pace.model.objective import expected_log_theta
from pace.model.seeding import PATCHES_PER_CONCEPT, Sample, cluster, within_covariance
from pace.model.settings import Settings
from pace.observations import Observations
from pace.places import matching_patches

_IMAGES = 2000  # on which all of this is done
_TELL_PARTS, _TELL_KINDS = 32, 64  # directions
# Shares of the mean variance that count as if a view changed every direction by as much. Parts are told nearly as patches lie,
# less what views change most; kinds nearly by what views leave alone.
_PARTS_FLOOR, _KINDS_FLOOR = 1.0, 0.03
_STARTS = 10  # of k-means for the parts: it likes to split a large one and to merge two small ones
_EPOCHS = 12  # of EM for the parts alone
_LLOYD = 10  # rounds for the kinds
_LEAST_SPREAD = 1e-3  # of the variance that a change of view makes
LEAST_KIND_EFFECT = 0.1  # share of what varies within a part that must lie between images, else parts have no kinds


class Moments(NamedTuple):
    """Attention-weighted covariances of the patches (d, d), float64."""

    within: Tensor  # of images
    total: Tensor
    view: Tensor  # half of that of the difference between two views of one place
    offset: Tensor  # (d,) mean embedding


def nested_start(
    observations: Observations,
    perturbed: Observations | None,
    n_parts: int,
    n_concepts: int,
    alpha: Tensor,
    family: str,
    rank: int,
    settings: Settings,
    seed: int,
    least: float = LEAST_KIND_EFFECT,
) -> tuple[Concepts, Tensor] | None:
    """Concepts, and Σ0 of both levels as one block-diagonal covariance.

    None where less than `least` of what varies within parts lies between images: then parts have no kinds.
    """
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.choice(len(observations), min(_IMAGES, len(observations)), replace=False))
    views = [view[rows] for view in (observations, perturbed) if view is not None]
    moments = _moments(views[0], views[1] if len(views) == 2 else None, settings)
    width = observations.dim // observations.blocks
    first, last = slice(0, width), slice(observations.dim - width, None)  # blocks, the same one if there is one
    to_parts = _telling(moments.within, moments.view, first, _TELL_PARTS, _PARTS_FLOOR).to(settings.dtype)
    u, count = _part_features(views[0], to_parts, settings)
    parts, alpha, parts_prior = _learn_parts(u, count, n_parts, alpha, family, rank, settings, rng)

    offset = moments.offset.to(settings.dtype)
    pooled = [_pool(view, parts, alpha, to_parts, offset, settings) for view in views]
    size, means = pooled[0]  # (M, P), (M, P, d)
    weight = size / size.sum()
    middle = (means * weight[:, :, None]).sum(0) / weight.sum(0)[:, None].clamp_min(1e-30)
    between = _outer(means - middle, weight)
    within = (moments.total - between - _outer(middle[None], weight.sum(0))).diagonal()[last].clamp_min(0).sum()
    effect = float(1 / (1 + within / between.diagonal()[last].sum()))
    if effect < least:
        return None
    moved = torch.zeros_like(between)
    if len(pooled) == 2:
        both = torch.minimum(size, pooled[1][0])
        moved = _outer(means - pooled[1][1], both / both.sum()) / 2
    to_kinds = _telling(between, moved, last, _TELL_KINDS, _KINDS_FLOOR).to(settings.dtype)
    part_of, kind_means, spread = _kinds(means @ to_kinds, size, n_concepts, seed)
    kinds_prior = spread * torch.eye(to_kinds.shape[1], dtype=torch.float64, device=settings.device)
    sizes = torch.bincount(part_of, minlength=n_parts).double()
    nest = Nest(
        part_of=part_of,
        parts=parts,
        to_parts=to_parts,
        to_kinds=to_kinds,
        kind_shares=1 / sizes[part_of],
        means=means.new_zeros(n_concepts, observations.dim),
    )
    concepts = Concepts(
        gaussians=FAMILIES[family].seed(kind_means.contiguous(), kinds_prior, rank),
        offset=offset,
        alpha=alpha,
        label_head=torch.zeros(n_concepts, observations.n_classes, dtype=torch.float64, device=settings.device),
        pair_weights=torch.ones(n_concepts, dtype=torch.float64, device=settings.device),
        nest=nest,
    )
    return concepts, torch.block_diag(parts_prior, kinds_prior)  # type: ignore[no-untyped-call]


def _part_features(view: Observations, to_parts: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """u (M, J, r) and what the tokens count (M, J)."""
    features, counts = [], []
    for _, batch in view.batches(32, settings.device, settings.dtype):
        share = batch.attention / batch.attention.sum(1, keepdim=True)
        features.append((batch.embeddings - torch.bmm(share[:, None], batch.embeddings)) @ to_parts)
        counts.append(Weights.of(batch.attention, "exact").count)
    return torch.cat(features), torch.cat(counts)


def _pool(
    view: Observations, parts: Gaussians, alpha: Tensor, to_parts: Tensor, offset: Tensor, settings: Settings
) -> tuple[Tensor, Tensor]:
    """How many patches an image has of every part (M, P), and their mean embedding (M, P, d)."""
    u, count = _part_features(view, to_parts, settings)
    both = Weights.of(count, "exact")
    distances = parts.mahalanobis(u.flatten(0, 1)).view(*count.shape, -1)
    start = u.new_full((len(u), len(alpha)), u.shape[1] / len(alpha), dtype=torch.float64)
    evidence = both.log_likelihood(distances, parts.log_det, u.shape[2])
    phi = infer(evidence, both, alpha, (start, start / u.shape[1])).phi
    held = phi * count[:, :, None]
    size, sums = held.sum(1), []
    for rows, batch in view.batches(32, settings.device, settings.dtype):
        sums.append(torch.bmm(held[rows].mT, batch.embeddings - offset))
    return size, torch.cat(sums) / size[:, :, None].clamp_min(1e-9)


def _moments(seen: Observations, pair: Observations | None, settings: Settings) -> Moments:
    dim, prefix = seen.dim, seen.prefix_tokens
    within, second, view = (torch.zeros(dim, dim, dtype=torch.float64, device=settings.device) for _ in range(3))
    first, compared = torch.zeros(dim, dtype=torch.float64, device=settings.device), 0.0
    matches = None
    if pair is not None and pair.crops is not None and seen.grid is not None:
        matches = matching_patches(pair.crops[:], seen.grid)
    for rows, batch in seen.batches(32, settings.device, settings.dtype):
        share = batch.attention / batch.attention.sum(1, keepdim=True)
        centre = torch.bmm(share[:, None], batch.embeddings)
        first += centre.sum((0, 1)).double()
        within += _outer(batch.embeddings - centre, share)
        second += _outer(batch.embeddings, share)
        here, there = batch.embeddings[:, prefix:], None
        if matches is not None and pair is not None:
            other = pair.batch(rows, settings.device, settings.dtype)
            place = torch.from_numpy(matches[rows]).to(settings.device)
            there, here = other.embeddings[:, prefix:], here.gather(1, place[:, :, None].expand(-1, -1, dim))
            weight = share[:, prefix:].gather(1, place)
        elif seen.grid is not None and min(seen.grid) > 1:  # neighbours mostly show the same
            maps = here.reshape(len(here), *seen.grid, dim)
            weights = share[:, prefix:].reshape(len(here), *seen.grid)
            here, there, weight = (some.flatten(1, 2) for some in (maps[:, :, 1:], maps[:, :, :-1], weights[:, :, 1:]))
        if there is not None:
            view += _outer(there - here, weight) / 2
            compared += float(weight.sum())
    mean = first / len(seen)
    total = second / len(seen) - mean[:, None] * mean
    return Moments(within / len(seen), total, view / compared if compared else torch.zeros_like(view), mean)


def _outer(x: Tensor, weights: Tensor) -> Tensor:
    """Σ w x xᵀ, float64."""
    flat = x.flatten(0, 1)
    return ((flat * weights.reshape(-1, 1)).T @ flat).double()


def _telling(variation: Tensor, view: Tensor, own: slice, most: int, floor: float) -> Tensor:
    """The directions (d, r) of a block in which variation is largest against the view's, scaled so that the latter is 1."""
    whole, variation, view = len(view), variation[own, own], view[own, own]
    everywhere = torch.eye(len(view), dtype=view.dtype, device=view.device) * (variation.trace() / len(view))
    lower = torch.linalg.cholesky(view + floor * everywhere)
    inverse = torch.linalg.inv(lower)
    vectors = torch.linalg.eigh(inverse @ variation @ inverse.mT).eigenvectors.flip(1)
    directions = view.new_zeros(whole, min(most, len(view)))
    directions[own] = inverse.mT @ vectors[:, : directions.shape[1]]
    return directions


def _learn_parts(
    u: Tensor,
    count: Tensor,
    n_parts: int,
    alpha: Tensor,
    family: str,
    rank: int,
    settings: Settings,
    rng: np.random.Generator,
) -> tuple[Gaussians, Tensor, Tensor]:
    """Gaussians, α and Σ0 of the parts, by EM on these images."""
    flat, weights = u.flatten(0, 1), count.reshape(-1)
    chances = (weights > 0).double().cpu().numpy()
    drawn = rng.choice(
        len(flat), min(50 * PATCHES_PER_CONCEPT, int(chances.sum())), replace=False, p=chances / chances.sum()
    )
    some = torch.from_numpy(np.sort(drawn)).to(flat.device)
    sample = Sample(np.arange(len(u)), flat[some], weights[some], flat.new_zeros(flat.shape[1]))
    means, _ = min(
        (cluster(sample, n_parts, int(rng.integers(2**31))) for _ in range(_STARTS)), key=lambda found: found[1]
    )
    covariance = within_covariance(sample, means)
    prior = Prior(covariance, float(flat.shape[1]))
    gaussians = FAMILIES[family].seed(means.contiguous(), covariance, rank)
    both, learn_alpha = Weights.of(count, "exact"), settings.learn_alpha
    counts = u.new_full((len(u), n_parts), u.shape[1] / n_parts, dtype=torch.float64)
    for _ in range(_EPOCHS):
        distances = gaussians.mahalanobis(flat).view(*count.shape, -1)
        evidence = both.log_likelihood(distances, gaussians.log_det, flat.shape[1])
        found = infer(evidence, both, alpha, (counts, counts / u.shape[1]), max_sweeps=4)
        counts = found.counts
        if learn_alpha:
            alpha = fit_dirichlet(alpha, expected_log_theta(found.gamma).mean(0), settings.smallest_alpha)
        sums = gaussians.empty_sums()
        gaussians.accumulate(flat.clone(), (found.phi * count[:, :, None]).flatten(0, 1), sums)
        gaussians = gaussians.maximise(sums, prior)
    return gaussians, alpha, covariance


def _kinds(pooled: Tensor, size: Tensor, n_concepts: int, seed: int) -> tuple[Tensor, Tensor, float]:
    """Kinds of the parts from each image's mean of each part (M, P, q) and how many patches it has of it (M, P).

    Gives the part (K,) and the centre (K, q) of every kind, and the variance that they leave, in a direction.
    """
    images, n_parts = size.shape
    weight = size.clamp_min(1e-9)
    groups = [(part, torch.arange(images, device=size.device)) for part in range(n_parts)]
    inertia = [_inertia(pooled[:, part], weight[:, part]) for part in range(n_parts)]
    while len(groups) < n_concepts:
        worst = int(np.argmax(inertia))
        (part, rows), _ = groups.pop(worst), inertia.pop(worst)
        x, w = pooled[rows, part], weight[rows, part]
        halves = _two(x, w, seed)
        for side in (halves, ~halves):
            groups.append((part, rows[side]))
            inertia.append(_inertia(x[side], w[side]) if int(side.sum()) > 1 else 0.0)
    part_of = torch.tensor(sorted(part for part, _ in groups), device=size.device)
    centres, left = [], 0.0
    for part in range(n_parts):
        x, w = pooled[:, part], weight[:, part]
        own = [rows for of, rows in groups if of == part]
        means = torch.stack([_mean(x[rows], w[rows]) if len(rows) else x.mean(0) for rows in own])
        for _ in range(_LLOYD):
            member = torch.nn.functional.one_hot(torch.cdist(x, means).argmin(1), len(means)).to(x.dtype) * w[:, None]
            held = member.sum(0)[:, None]
            means = torch.where(held > 0, member.T @ x / held.clamp_min(1e-30), means)
        centres.append(means)
        left += float((torch.cdist(x, means).amin(1).square() * w).sum())
    return part_of, torch.cat(centres), max(left / float(weight.sum()) / pooled.shape[2], _LEAST_SPREAD)


def _mean(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight[:, None]).sum(0) / weight.sum()


def _inertia(x: Tensor, weight: Tensor) -> float:
    return float(((x - _mean(x, weight)).square().sum(1) * weight).sum())


def _two(x: Tensor, weight: Tensor, seed: int) -> Tensor:
    """Which of the rows belong to the first of two clusters."""
    sample = Sample(np.arange(0), x, weight, x.new_zeros(x.shape[1]))
    owner = torch.cdist(x, cluster(sample, 2, seed)[0]).argmin(1)
    return owner == 0
