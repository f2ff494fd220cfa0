"""Parts and kinds: an image is a mixture of parts, and in an image every part has one kind. A concept is a kind of a part.

B images · J tokens · P parts · K concepts, those with part_of = p are the kinds of part p · w (B, J) = J a

    u_mj = (e_mj - Σ_i a_mi e_mi) A_u            what tells parts: a patch beside the others of its image
    v_mp = Σ_j r_mpj (e_mj - offset) A_v         what tells kinds: the mean of a part, r_mpj = w_mj φ_mjp / Σ_i w_mi φ_mip

    θ_m ~ Dir(α)   z_mj ~ Cat(θ_m)   u_mj | z = p ~ N(m_p, Σ_u)          the paper's model, of parts
    s_mp ~ Cat(π_p)   v_mp | s = k ~ N(μ_k, τ I)                         a mixture for every part

    φ_mjp ∝ exp[E log θ_mp + log N(u_mj | m_p, Σ_u)]   γ_mp = α_p + Σ_j w_mj φ_mjp   ψ_mk ∝ π_k N(v_mp | μ_k, τ I)

However many patches a part has, its mean counts as one observation: patches of one image repeat each other. No kind pulls on
a part, so each level climbs a bound of its own: parts theirs, kinds theirs for the parts as they are. With one kind a part
this is the paper's model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pace.model.gaussians import Gaussians, Prior, Sums
from pace.model.gaussians.family import weighted_sums
from pace.model.inference import Posterior

_KIND_PRIOR = 0.5  # images that every kind starts with
_FIRM = 1e9  # weight of the kinds' covariance τ I: a few images a kind tell no other
PARTS = "parts."  # what the names of the parts' sums begin with


@dataclass(frozen=True)
class Nest:
    """What is learned beside the kinds' Gaussians."""

    part_of: Tensor  # (K,) int64
    parts: Gaussians  # m_p, Σ_u
    to_parts: Tensor  # A_u (d, r)
    to_kinds: Tensor  # A_v (d, q)
    kind_shares: Tensor  # π (K,) float64
    means: Tensor  # (K, d) mean embedding of each concept's patches, less the offset

    def __len__(self) -> int:
        return len(self.parts.means)

    def features(self, x: Tensor, attention: Tensor) -> Tensor:
        """u (B, J, r), of x = e - offset."""
        share = attention / attention.sum(1, keepdim=True)
        u = x @ self.to_parts
        return u - torch.bmm(share[:, None], u)

    def of_parts(self, values: Tensor) -> Tensor:
        """Sums (…, P) over the kinds of each part."""
        return values @ self.member.to(values.dtype)

    @property
    def member(self) -> Tensor:
        """(K, P): 1 where a concept is a kind of a part."""
        return torch.nn.functional.one_hot(self.part_of, len(self))

    def choose(self, evidence: Tensor) -> Tensor:
        """Softmax (…, K) among the kinds of each part, of evidence with their log π."""
        largest = evidence.new_full((*evidence.shape[:-1], len(self)), -math.inf)
        largest = largest.scatter_reduce(-1, self.part_of.expand_as(evidence), evidence.detach(), "amax")
        odds = (evidence - largest[..., self.part_of]).exp()
        return odds / self.of_parts(odds)[..., self.part_of]

    def priors(self, prior: Prior) -> tuple[Prior, Prior]:
        """The two blocks of the prior: for the parts' Gaussians, and for the kinds'."""
        covariance, size = prior.covariance, self.to_parts.shape[1]
        return Prior(covariance[:size, :size], prior.strength), Prior(covariance[size:, size:], _FIRM)

    def empty_sums(self, kinds: Gaussians) -> Sums:
        """Zeros for the sums of both levels: the parts' under names that begin with `PARTS`."""
        parts = {PARTS + name: zeros for name, zeros in self.parts.empty_sums().items()}
        own = {
            "kinds": self.kind_shares.new_zeros(len(self.part_of)),
            "embeddings": self.means.double().new_zeros(self.means.shape),
        }
        return kinds.empty_sums() | parts | own

    def maximise(self, sums: Sums, prior: Prior) -> Nest:
        """The M-step of the parts and of π."""
        parts = self.parts.maximise(
            {name.removeprefix(PARTS): t for name, t in sums.items() if name.startswith(PARTS)}, prior
        )
        counts = sums["kinds"] + _KIND_PRIOR
        weight = sums["weight"][:, None]
        means = torch.where(weight > 0, sums["embeddings"] / weight.clamp_min(1e-300), self.means.double())
        shares = counts / self.of_parts(counts)[self.part_of]
        return replace(self, parts=parts, kind_shares=shares, means=means.to(self.means.dtype))

    def log_prior(self, prior: Prior) -> float:
        """What the prior of the parts adds to their bound."""
        return self.parts.log_prior(prior)

    def tensors(self) -> dict[str, Tensor]:
        own = {name: getattr(self, name) for name in _OWN}
        return own | {PARTS + name: tensor for name, tensor in self.parts.tensors().items()}

    @classmethod
    def from_tensors(cls, family: type[Gaussians], tensors: dict[str, Tensor]) -> Nest:
        parts = {name.removeprefix(PARTS): tensor for name, tensor in tensors.items() if name.startswith(PARTS)}
        return cls(parts=family.from_tensors(parts), **{name: tensors[name] for name in _OWN})

    def to(self, device: torch.device, dtype: torch.dtype) -> Nest:
        exact = ("part_of", "kind_shares")
        moved = {name: t.to(device) if name in exact else t.to(device, dtype) for name, t in self.tensors().items()}
        return Nest.from_tensors(type(self.parts), moved)


_OWN = ("part_of", "to_parts", "to_kinds", "kind_shares", "means")


class Kinds(NamedTuple):
    """Of some images: the kinds of their parts, and what tells them."""

    psi: Tensor  # ψ (B, K) float64
    share: Tensor  # of the patches that are of each part (B, P), by attention
    mean: Tensor  # of each part's embeddings, less the offset (B, P, d)
    features: Tensor  # v (B, P, q)
    bound: Tensor  # (B,) of the kinds, each part counted by its share


def infer_kinds(found: Posterior, x: Tensor, count: Tensor, nest: Nest, kinds: Gaussians) -> Kinds:
    """The kinds of parts whose φ (B, J, P) is known, from x = e - offset; `count` (B, J) is what a token counts."""
    held = found.phi * count[:, :, None]
    size = held.sum(1)
    mean = torch.bmm(held.mT, x) / size.clamp_min(torch.finfo(size.dtype).tiny)[:, :, None]
    features = mean @ nest.to_kinds
    likelihood = log_likelihood(features, nest, kinds) + nest.kind_shares.log()
    psi, share = nest.choose(likelihood), size / x.shape[1]
    bound = share[:, nest.part_of] * (psi * likelihood + torch.special.entr(psi))
    return Kinds(psi, share, mean, features, bound.sum(1))


def log_likelihood(features: Tensor, nest: Nest, kinds: Gaussians) -> Tensor:
    """log N(v_mp | μ_k, Σ_v) of the kinds of each part (B, K), float64."""
    distances = kinds.mahalanobis(features.flatten(0, 1)).view(*features.shape[:2], -1)
    own = distances.gather(1, nest.part_of.expand(len(features), 1, -1)).squeeze(1).double()
    return (own + kinds.log_det + features.shape[2] * math.log(2 * math.pi)) / -2


def add_kinds(found: Kinds, nest: Nest, kinds: Gaussians, sums: Sums) -> None:
    """Add images to the sums for the kinds."""
    r = (found.psi * found.share[:, nest.part_of])[:, None] * nest.member.T  # only its own part tells a kind
    sums["kinds"].add_(r.sum((0, 1)))
    r = r.to(found.mean.dtype).flatten(0, 1)
    mean = found.mean.flatten(0, 1)
    sums["embeddings"].add_(weighted_sums(r, mean.shape[1])(mean))
    kinds.accumulate(found.features.flatten(0, 1), r, sums)
