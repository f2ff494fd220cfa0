"""Sufficient statistics of some images. They add up: over batches, over processes, over restarts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from pace.model.gaussians import Sums


@dataclass
class Statistics:
    """Sums over images, float64: all that the M-step needs."""

    images: Tensor  # () number of images
    views: Tensor  # () number of θ inferred: twice the images when perturbed views are there
    bound: Tensor  # (3,) ΣL_e, ΣL_f, ΣL_s
    log_theta: Tensor  # (K,) Σ E[log θ]; (P,) of parts
    # A quadratic that lies below ΣL_f and touches it at the present H: its slope at H = 0 and its negative curvature.
    # Expanded around H = 0, quadratics of different H add up, and online learning climbs their average.
    head_slope: Tensor  # (K, N)
    head_curvature: Tensor  # (K, K) the same for every η_n
    pair_slope: Tensor  # (K,) likewise of ΣL_s, in β
    pair_curvature: Tensor  # (K, K)
    held: Tensor  # (K,) patches of every concept in the images as they are; the moments count perturbed views as well
    said: Tensor  # (K, N) Σ φ̄_m ŷ_mᵀ of the same
    moments: Sums  # weighted sums of the patches, as the covariance family needs them

    @classmethod
    def zeros(cls, moments: Sums, n_classes: int, n_shares: int) -> Statistics:
        k, device = len(moments["weight"]), moments["weight"].device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(
            images=zeros(),
            views=zeros(),
            bound=zeros(3),
            log_theta=zeros(n_shares),
            head_slope=zeros(k, n_classes),
            head_curvature=zeros(k, k),
            pair_slope=zeros(k),
            pair_curvature=zeros(k, k),
            held=zeros(k),
            said=zeros(k, n_classes),
            moments=moments,
        )

    def __add__(self, other: Statistics) -> Statistics:
        mine, theirs = self.tensors(), other.tensors()
        return self.from_tensors({name: mine[name] + theirs[name] for name in mine})

    def map(self, change: Callable[[Tensor], Tensor]) -> Statistics:
        """The same statistics with every tensor changed: scaled, moved, reduced over processes."""
        return self.from_tensors({name: change(tensor) for name, tensor in self.tensors().items()})

    def blended(self, fresh: Statistics, rate: float, most: float = torch.inf) -> Statistics:
        """A running average of these and a fresh batch's, which gets the weight `rate`.

        Scaled as a sum over all images so far, so that the prior counts less as more images come; `most` is how many there are
        at all, where some come again.
        """
        seen = (self.images + fresh.images).clamp_max(most)
        old, new = (1 - rate) * seen / self.images, rate * seen / fresh.images
        return self.map(lambda t: t * old) + fresh.map(lambda t: t * new)

    def evidence(self) -> Tensor:
        """(K, N): the mean ŷ of images, each weighted by its share of a concept, less the mean ŷ of all images."""
        shares = self.said.sum(1, keepdim=True)
        lift = self.said / shares.clamp_min(1e-300) - self.said.sum(0) / shares.sum().clamp_min(1e-300)
        return torch.where(shares > 1e-6 * shares.sum(), lift, 0.0)

    def tensors(self) -> dict[str, Tensor]:
        """Flat, for files and for communication."""
        flat = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "moments"}
        return flat | {f"moments.{name}": tensor for name, tensor in self.moments.items()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Statistics:
        moments = {name.removeprefix("moments."): tensor for name, tensor in tensors.items() if "." in name}
        return cls(moments=moments, **{name: tensor for name, tensor in tensors.items() if "." not in name})
