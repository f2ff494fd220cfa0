"""Where the concepts start: k-means++ over attention-weighted patches of a sample of the images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pace.model.gaussians import FAMILIES, Prior
from pace.model.inference import Weights
from pace.model.learning import Concepts, Settings
from pace.observations import Observations

PATCHES_PER_CONCEPT = 200  # enough to place K centres; the epochs see every patch
_IMAGES = 100  # at least: patches of one image are alike, so few images hold few concepts
_LLOYD_ROUNDS = 10


@dataclass(frozen=True)
class Sample:
    """Some images, and their patches with positive weight, centred on their mean."""

    images: np.ndarray
    patches: Tensor  # (n, d)
    weights: Tensor  # (n,)
    offset: Tensor  # (d,)


def draw_sample(observations: Observations, n_concepts: int, settings: Settings, rng: np.random.Generator) -> Sample:
    """Whole images, so many that they hold `PATCHES_PER_CONCEPT` patches with positive weight for every concept."""
    order = rng.permutation(len(observations))
    wanted = max(_IMAGES, -(-PATCHES_PER_CONCEPT * n_concepts // observations.n_tokens))
    while True:
        images = np.sort(order[:wanted])
        batch = observations.batch(images, settings.device, settings.dtype)
        weights = Weights.of(batch.attention, "exact").count.flatten()
        counted = weights > 0
        found = int(counted.sum())
        if found >= PATCHES_PER_CONCEPT * n_concepts or wanted >= len(observations):
            break
        wanted *= 2  # tokens without attention do not count
    if found < n_concepts:
        raise ValueError(
            f"n_concepts={n_concepts} is more than the {found} patches with positive attention; use at most {found}"
        )
    patches, weights = batch.embeddings.flatten(0, 1)[counted], weights[counted]
    offset = torch.einsum("n,nd->d", weights.double(), patches.double()) / weights.sum(dtype=torch.float64)
    offset = offset.to(settings.dtype)
    return Sample(images, patches - offset, weights, offset)


def cluster(sample: Sample, n_concepts: int, seed: int) -> tuple[Tensor, float]:
    """k-means++ centres polished by a few rounds of Lloyd's algorithm, and the inertia they leave."""
    from sklearn.cluster import kmeans_plusplus

    x, weights = sample.patches, sample.weights
    centres, _ = kmeans_plusplus(
        x.cpu().numpy(), n_concepts, sample_weight=weights.cpu().numpy().astype(np.float64), random_state=seed
    )
    means = torch.as_tensor(centres, device=x.device, dtype=x.dtype)
    for _ in range(_LLOYD_ROUNDS):
        owner = torch.cdist(x, means).argmin(1)
        one_hot = torch.zeros(len(x), n_concepts, dtype=x.dtype, device=x.device)
        one_hot[torch.arange(len(x), device=x.device), owner] = weights
        size = one_hot.sum(0)[:, None]
        means = torch.where(size > 0, one_hot.T @ x / size.clamp_min(1e-30), means)
    return means, float((torch.cdist(x, means).amin(1).double().square() * weights).sum())


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
