"""What a report says about concepts and classes, computed from an explanation once, before the page is written.

θ (M, K) · φ (M, J, K) · a (M, J) attention · H (K, N) label head, columns η_n
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pace.explainer import PACE
from pace.explanation import Array
from pace.observations import Observations

_WORTH_A_LOOK = 0.01  # share of an image below which it does not show a concept
_TOKENS_AT_ONCE = 1 << 14  # tokens whose distances to every μ_k are held together


def weights(attention: Array) -> Array:
    """The share of its image that every token stands for (M, J)."""
    shares: Array = attention / attention.sum(1, keepdims=True)
    return shares


def use(phi: Array, token_weights: Array) -> Array:
    """The share of the shown images that every concept holds (K,), each patch weighed by the attention it gets."""
    held = token_weights.reshape(-1) @ phi.reshape(-1, phi.shape[2])
    shares: Array = held / held.sum()
    return shares


def in_use(shares: Array, tokens: int) -> Array:
    """Whether a concept holds at least one patch's worth of all `tokens` (K,)."""
    return shares * tokens >= 1


def left_empty(model: PACE, used: Array) -> Array:
    """Whether a concept held nothing when it was learned, and holds nothing here (K,): there is nothing to show of it."""
    empty: Array = np.isin(np.arange(len(used)), model.empty_concepts_) & ~used
    return empty


def effective_number(shares: Array) -> float:
    """exp of the entropy: how many equally used concepts would be as diverse as these."""
    positive = shares[shares > 0]
    return float(np.exp(-(positive * np.log(positive)).sum()))


@dataclass(frozen=True)
class Nearest:
    """For every concept the images whose nearest patch lies nearest to μ_k (K, n), and which patch that is."""

    images: Array
    patches: Array


def nearest(model: PACE, observations: Observations, n: int) -> Nearest:
    """One patch of an image at most, so that a gallery shows different images.

    The same distances as `PACE.nearest_patches`, of all concepts in one pass over the observations.
    """
    means = torch.as_tensor(model.means_, dtype=torch.float32)
    closest, where = [], []
    for _, batch in observations.batches(max(1, _TOKENS_AT_ONCE // observations.n_tokens), "cpu", torch.float32):
        distances = torch.cdist(batch.embeddings[:, observations.prefix_tokens :], means)
        least, patch = distances.min(1)
        closest.append(least)
        where.append(patch)
    order = torch.argsort(torch.cat(closest), dim=0, stable=True)[:n]
    return Nearest(order.T.numpy(), torch.cat(where).gather(0, order).T.numpy())


def neighbours(means: Array, used: Array, n: int) -> list[list[int]]:
    """For every concept the used concepts whose means lie nearest to its own, nearest first."""
    points = torch.as_tensor(means, dtype=torch.float64)
    distances = torch.cdist(points, points).numpy()
    np.fill_diagonal(distances, np.inf)
    distances[:, ~used] = np.inf
    order = np.argsort(distances, axis=1, kind="stable")[:, :n]
    return [[int(k) for k in row if np.isfinite(distances[concept, k])] for concept, row in enumerate(order)]


def evidence(label_head: Array) -> Array:
    """η_kn less the concept's mean over classes (K, N): what all classes share cannot favour one of them."""
    head = label_head.astype(np.float64)
    return head - head.mean(1, keepdims=True) if head.shape[1] else head


@dataclass(frozen=True)
class ClassConcept:
    """A concept that speaks for a class: how strongly, and the class's images that hold most of it."""

    concept: int
    strength: float
    images: list[int]


def class_concepts(
    theta: Array, speaks: Array, predicted: Array | None, used: Array, *, concepts: int, images: int
) -> list[list[ClassConcept]]:
    """For every class its strongest concepts by mean θ_k (over the images predicted as it) times η_kn, if above 0."""
    found = []
    for label in range(speaks.shape[1]):
        members = np.array([], np.int64) if predicted is None else np.flatnonzero(predicted == label)
        typical = theta[members].mean(0) if members.size else theta.mean(0)
        strength: Array = np.where(used, typical * speaks[:, label], -np.inf)
        best = [int(k) for k in np.argsort(-strength, kind="stable")[:concepts] if strength[k] > 0]
        found.append([ClassConcept(k, float(strength[k]), _holders(theta[:, k], members, images)) for k in best])
    return found


def _holders(share: Array, members: Array, n: int) -> list[int]:
    """The members with the largest share, as far as it is worth a look."""
    order = members[np.argsort(-share[members], kind="stable")[:n]]
    return [int(m) for m in order if share[m] >= _WORTH_A_LOOK]
