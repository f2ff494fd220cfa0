"""What every covariance family can do, and the pieces they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, threshold

Sums = dict[str, Tensor]

NOT_POSITIVE = (
    "a concept's covariance is not positive definite; rescale the embeddings if their squares leave the range of dtype, "
    "or use dtype='float64'"
)

_SPARSE, _WIDE = 8, 64  # a product is quicker over nonzero entries only, if one in 8 is and there are 64 columns


@dataclass(frozen=True)
class Prior:
    """κ pseudo-patches with covariance Σ0 for every concept, around whatever mean it has."""

    covariance: Tensor  # Σ0 (d, d), float64
    strength: float  # κ


class Gaussians(ABC):
    """K Gaussians with means (K, d); every family below is one way to hold their covariances."""

    name: str
    means: Tensor
    log_det: Tensor  # log |Σ_k| (K,)

    @classmethod
    @abstractmethod
    def seed(cls, means: Tensor, covariance: Tensor, rank: int) -> Gaussians:
        """All concepts start from one covariance (d, d)."""

    def features(self, embeddings: Tensor, offset: Tensor, room: Tensor | None = None) -> Tensor:
        """What `mahalanobis` and `accumulate` read: the patches x = e - offset, and their squares where needed.

        `room` is the result of an earlier call that is no longer needed: fresh memory costs more than the arithmetic.
        """
        return torch.sub(embeddings, offset, out=room_for(room, embeddings, embeddings.shape[1]))

    @abstractmethod
    def mahalanobis(self, x: Tensor) -> Tensor:
        """(x_i - μ_k)ᵀ Σ_k⁻¹ (x_i - μ_k) as (n, K), from features."""

    def near_distances(self, x: Tensor, within: float) -> Tensor:
        """`mahalanobis`, but only roughly for a concept under which log N is more than `within` below the patch's best."""
        return self.mahalanobis(x)

    def contrasts(self, x: Tensor, within: float) -> Tensor:
        """`near_distances` up to a constant for each patch, where leaving that out saves work."""
        return self.near_distances(x, within)

    @abstractmethod
    def empty_sums(self) -> Sums:
        """Zeros for `accumulate`; always with `weight` Σ_i r_ik (K,) and `first` Σ_i r_ik x_i (K, d)."""

    def accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None:
        """Add these patches, given as features, to the sums; overwrites both x and r.

        Most responsibilities are zero to machine precision. These are left out of all sums alike.
        """
        self._accumulate(x, threshold(r, 8 * torch.finfo(r.dtype).eps, 0.0, inplace=True), sums)

    @abstractmethod
    def _accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None: ...

    @abstractmethod
    def maximise(self, sums: Sums, prior: Prior) -> Gaussians:
        """eq. update_mu and update_sigma, with the prior. A concept without patches keeps its mean."""

    @abstractmethod
    def log_prior(self, prior: Prior) -> float:
        """-κ/2 Σ_k (log |Σ_k| + tr Σ0 Σ_k⁻¹), what the prior adds to the bound."""

    @abstractmethod
    def covariances(self) -> Tensor:
        """Σ, float64: (K, d, d); (d, d) when tied; the variances (K, d) when diagonal."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Everything `from_tensors` needs: the constructor's arguments by name."""

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Gaussians:
        return cls(**tensors)

    def tokens_at_once(self) -> int:
        """How many patches to work on together: enough to fill a GPU; on a CPU enough to amortise K d² sums."""
        return 1 << (15 if self.means.device.type == "cpu" else 18)

    def _new_means(self, sums: Sums) -> Tensor:
        """eq. update_mu: μ_k = Σ_i r_ik x_i / Σ_i r_ik, float64."""
        weight = sums["weight"][:, None]
        return torch.where(weight > 0, sums["first"] / weight.clamp_min(1e-300), self.means.double())

    def _zeros(self, **shapes: tuple[int, ...]) -> Sums:
        """`weight` (K,), `first` (K, d) and these, float64."""
        k, d = self.means.shape
        shapes = {"weight": (k,), "first": (k, d), **shapes}
        return {name: self.means.new_zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}


def slices(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def by_concept(chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns of the true entries of (n, K), column by column, and how many each column has."""
    places = chosen.T.flatten().nonzero().squeeze(1)
    return places % len(chosen), places // len(chosen), chosen.sum(0)


def weighted_sums(r: Tensor, columns: int) -> Callable[[Tensor], Tensor]:
    """x -> rᵀ x, for x with so many columns. On a CPU, where r is mostly zero, only from the other entries."""
    if r.device.type == "cpu" and columns >= _WIDE:
        n, k = r.shape
        flat = r.T.flatten()
        places = torch.from_numpy(np.flatnonzero(flat.numpy() > 0))  # several times as fast as torch's own
        if len(places) * _SPARSE < len(flat):
            rows, weights = places % n, flat[places]
            starts = torch.searchsorted(places, n * torch.arange(k))
            # One bag of weighted rows for every concept: several times as fast as torch's sparse product.
            return lambda x: embedding_bag(rows, x, starts, mode="sum", per_sample_weights=weights)
    return lambda x: r.T @ x


def room_for(room: Tensor | None, like: Tensor, columns: int) -> Tensor:
    if room is None or len(room) < len(like):
        return like.new_empty(len(like), columns)
    return room[: len(like)]
