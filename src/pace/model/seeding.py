"""Where the concepts start: k-means++ over attention-weighted patches drawn from many images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pace.model.concepts import Concepts
from pace.model.gaussians import FAMILIES, Prior
from pace.model.inference import Weights
from pace.model.settings import Settings
from pace.observations import Observations

PATCHES_PER_CONCEPT = 200  # to place a centre with; the epochs then see every patch
_TRIAL_IMAGES = 100  # at least, on which starts are compared
_SPREAD = 4000  # images to draw patches from: patches of one image are alike, so few images show few concepts
_VALUES_AT_ONCE = 1 << 26  # read from the images
_LLOYD_ROUNDS = 10
_ROUNDING = 1e-6  # of their squares, below which two patches are the same one


@dataclass(frozen=True)
class Sample:
    """Patches of many images, with positive weight and centred on their mean, and a few images to try starts on."""

    images: np.ndarray
    patches: Tensor  # (n, d)
    weights: Tensor  # (n,)
    offset: Tensor  # (d,)


def draw_sample(observations: Observations, n_concepts: int, settings: Settings, rng: np.random.Generator) -> Sample:
    """`PATCHES_PER_CONCEPT` patches for every concept, or all there are, evenly from as many images as may be."""
    wanted = PATCHES_PER_CONCEPT * n_concepts
    few = max(_TRIAL_IMAGES, -(-wanted // observations.n_tokens))
    # Not a permutation of all images, which would take memory for each.
    order = rng.choice(len(observations), min(max(few, _SPREAD), len(observations)), replace=False)
    patches, weights = _draw(observations, np.sort(order), wanted, settings, rng)
    if len(patches) < wanted and len(order) < len(observations):  # tokens without attention do not count
        patches, weights = _draw(observations, np.arange(len(observations)), wanted, settings, rng)
    if len(patches) < n_concepts:
        found = len(patches)
        raise ValueError(
            f"n_concepts: {n_concepts} is more than the {found} patches with positive attention; use at most {found}"
        )
    offset = torch.einsum("n,nd->d", weights.double(), patches.double()) / weights.sum(dtype=torch.float64)
    offset = offset.to(settings.dtype)
    return Sample(np.sort(order[:few]), patches - offset, weights, offset)


def _draw(
    observations: Observations, images: np.ndarray, wanted: int, settings: Settings, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """So many patches of these images, as many of each as there must be, and their weights."""
    each = -(-wanted // len(images))
    at_once = max(1, _VALUES_AT_ONCE // (observations.n_tokens * observations.dim))
    patches, weights = [], []
    for start in range(0, len(images), at_once):
        batch = observations.batch(images[start : start + at_once], settings.device, settings.dtype)
        weight = Weights.of(batch.attention, "exact").count
        # Tokens in random order, those without weight last.
        draws = torch.from_numpy(rng.random(weight.shape)).to(weight.device)
        chosen = torch.where(weight > 0, draws, 2.0).argsort(1)[:, :each].sort(1).values
        counted = weight.gather(1, chosen) > 0
        rows = torch.arange(len(weight), device=weight.device)[:, None].expand_as(chosen)[counted]
        patches.append(batch.embeddings[rows, chosen[counted]])
        weights.append(weight[rows, chosen[counted]])
    return torch.cat(patches), torch.cat(weights)


def cluster(sample: Sample, n_concepts: int, seed: int) -> tuple[Tensor, float]:
    """k-means++ centres polished by a few rounds of Lloyd's algorithm, and the inertia they leave."""
    x, weights = sample.patches, sample.weights
    means = x[spread_out(x, weights, n_concepts, np.random.default_rng(seed), trials=2 + int(np.log(n_concepts)))]
    for _ in range(_LLOYD_ROUNDS):
        owner = torch.cdist(x, means).argmin(1)
        one_hot = torch.zeros(len(x), n_concepts, dtype=x.dtype, device=x.device)
        one_hot[torch.arange(len(x), device=x.device), owner] = weights
        size = one_hot.sum(0)[:, None]
        means = torch.where(size > 0, one_hot.T @ x / size.clamp_min(1e-30), means)
    return means, float((torch.cdist(x, means).amin(1).double().square() * weights).sum())


def spread_out(x: Tensor, weights: Tensor, number: int, rng: np.random.Generator, trials: int = 1) -> Tensor:
    """k-means++ (Arthur & Vassilvitskii 2007): draw rows in proportion to their squared distance from those drawn before.

    With several `trials`, each step keeps the best of so many, as scikit-learn does. With fewer different rows than `number`,
    some come twice. Our own because scikit-learn's runs on a CPU only, where it took as long as the whole fit on a GPU.
    """
    draws = torch.from_numpy(rng.random(1 + (number - 1) * trials)).to(x.device)
    squares = x.square().sum(1)

    def drawn(mass: Tensor, draw: Tensor) -> Tensor:
        ladder = mass.double().cumsum(0)
        return torch.searchsorted(ladder, draw * ladder[-1], right=True).clamp_max(len(x) - 1)

    def distances(rows: Tensor) -> Tensor:
        """(n, rows), zero where rounding leaves nothing else."""
        both = squares[:, None] + squares[rows]
        apart = torch.addmm(both, x, x[rows].T, alpha=-2)
        return apart.masked_fill_(apart <= _ROUNDING * both, 0)

    chosen = [drawn(weights, draws[:1])]
    nearest = distances(chosen[0])
    for draw in draws[1:].view(-1, trials):
        candidates = drawn(nearest[:, 0] * weights, draw)
        nearest = torch.minimum(distances(candidates), nearest)
        if trials > 1:
            best = (nearest * weights[:, None]).sum(0).argmin(0, keepdim=True)
            candidates, nearest = candidates[best], nearest[:, best]
        chosen.append(candidates)
    return torch.cat(chosen)


def within_covariance(sample: Sample, means: Tensor) -> Tensor:
    """Pooled covariance of the patches around their nearest centre, shrunk so that it is safely positive definite.

    Shrinkage towards a multiple of the identity by the oracle-approximating rule (Chen, Wiesel, Eldar & Hero 2010), so that it
    turns with the embeddings.
    """
    x = (sample.patches - means[torch.cdist(sample.patches, means).argmin(1)]).double()
    weights = sample.weights.double()
    covariance = (x * weights[:, None]).T @ x / weights.sum()
    n, dim = x.shape
    identity = torch.eye(dim, dtype=torch.float64, device=x.device)
    scale = covariance.trace() / dim
    # Spread that the working precision cannot tell from none: what sums of squares and the embeddings' own rounding lose.
    eps = 8 * torch.finfo(sample.patches.dtype).eps
    centred, whole = sample.patches.double(), sample.patches.double() + sample.offset.double()
    floor = eps * centred.square().mean() + eps**2 * whole.square().mean()
    if scale <= floor:
        return identity * (floor if floor > 0 else 1.0)
    square, total = covariance.square().sum(), covariance.trace() ** 2
    spread = (n + 1 - 2 / dim) * (square - total / dim)
    shrinkage = float(((1 - 2 / dim) * square + total) / spread) if spread > 0 else 1.0
    shrinkage = min(max(shrinkage, 1e-4), 1.0)
    return (1 - shrinkage) * covariance + shrinkage * scale * identity


def place(
    means: Tensor, sample: Sample, prior: Prior, alpha: Tensor, n_classes: int, family: str, rank: int
) -> Concepts:
    """Concepts that all begin with the prior's covariance."""
    k = len(means)
    return Concepts(
        gaussians=FAMILIES[family].seed(means.contiguous(), prior.covariance, rank),
        offset=sample.offset,
        alpha=alpha,
        label_head=torch.zeros(k, n_classes, dtype=torch.float64, device=means.device),
        pair_weights=torch.ones(k, dtype=torch.float64, device=means.device),
    )
