"""Parts and kinds: an image is a mixture of parts, and in an image every part has one kind. A concept is a kind of a part.

B images · J tokens · P parts · K concepts, those with part_of = p are the kinds of part p · w (B, J) = J a

    u_mj = (e_mj - Σ_i a_mi e_mi) A_u    what tells parts: a patch beside the others of its image
    v_mj = (e_mj - offset) A_v           what tells kinds

    θ_m ~ Dir(α)   s_mp ~ Cat(π_p)   z_mj ~ Cat(θ_m)   u_mj | z = p ~ N(m_p, Σ_u)   v_mj | z = p, s_mp = s ~ N(μ_ps, Σ_v)^ρ

    φ_mjp ∝ exp[E log θ_mp + log N(u_mj | m_p, Σ_u) + ρ Σ_s ψ_mps log N(v_mj | μ_ps, Σ_v)]
    ψ_mps ∝ π_ps exp[ρ Σ_j w_mj φ_mjp log N(v_mj | μ_ps, Σ_v)]        γ_mp = α_p + Σ_j w_mj φ_mjp

ρ < 1 is how much a patch says about the kind of its part: those of one image repeat each other. It is a factor of the bound
itself, so that every update above raises it. With one kind for every part and nothing that tells parts apart from it, this is
the paper's model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pace.model.gaussians import Gaussians, Prior, Sums
from pace.model.inference import Posterior, Weights, infer

_SWEEPS = 4  # over φ and γ between two looks at the kinds
_ROUNDS = 10  # at most, for an image on its own
_SETTLED = 1e-3  # change of ψ
_KIND_PRIOR = 0.5  # images that every kind starts with
PARTS = "parts."  # what the names of the parts' sums begin with


@dataclass(frozen=True)
class Nest:
    """What is learned beside the kinds' Gaussians."""

    part_of: Tensor  # (K,) int64
    parts: Gaussians  # m_p, Σ_u
    to_parts: Tensor  # A_u (d, r)
    to_kinds: Tensor  # A_v (d, q)
    kind_shares: Tensor  # π (K,) float64
    patch_weight: Tensor  # ρ, () float64
    means: Tensor  # (K, d) mean embedding of each concept's patches, less the offset

    def __len__(self) -> int:
        return len(self.parts.means)

    def features(self, embeddings: Tensor, attention: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        """u (B, J, r) and v (B, J, q)."""
        share = attention / attention.sum(1, keepdim=True)
        both = (embeddings - offset) @ torch.cat([self.to_parts, self.to_kinds], 1)
        u, v = both.tensor_split([self.to_parts.shape[1]], 2)
        return u - torch.bmm(share[:, None], u), v.contiguous()

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
        size = self.to_parts.shape[1]
        return tuple(Prior(prior.covariance[some, some], prior.strength) for some in (slice(size), slice(size, None)))  # type: ignore[return-value]

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
        """What the prior of the parts and of π adds to the bound."""
        return self.parts.log_prior(prior) + _KIND_PRIOR * float(self.kind_shares.log().sum())

    def tensors(self) -> dict[str, Tensor]:
        own = {name: getattr(self, name) for name in _OWN}
        return own | {PARTS + name: tensor for name, tensor in self.parts.tensors().items()}

    @classmethod
    def from_tensors(cls, family: type[Gaussians], tensors: dict[str, Tensor]) -> Nest:
        parts = {name.removeprefix(PARTS): tensor for name, tensor in tensors.items() if name.startswith(PARTS)}
        return cls(parts=family.from_tensors(parts), **{name: tensors[name] for name in _OWN})

    def to(self, device: torch.device, dtype: torch.dtype) -> Nest:
        exact = ("part_of", "kind_shares", "patch_weight")
        moved = {name: t.to(device) if name in exact else t.to(device, dtype) for name, t in self.tensors().items()}
        return Nest.from_tensors(type(self.parts), moved)


_OWN = ("part_of", "to_parts", "to_kinds", "kind_shares", "patch_weight", "means")


@dataclass
class Evidence:
    """What the tokens of some images say."""

    u: Tensor  # (B J, r)
    v: Tensor  # (B J, q)
    parts: Tensor  # log N(u | m_p, Σ_u) (B, J, P)
    kinds: Tensor  # ρ log N(v | μ_k, Σ_v) (B, J, K)
    weights: Weights

    def of_images(self, images: Tensor) -> Evidence:
        """Those of some of the images, without their features."""
        return replace(self, parts=self.parts[images], kinds=self.kinds[images], weights=self.weights.of_images(images))


def evidence(
    embeddings: Tensor, attention: Tensor, nest: Nest, kinds: Gaussians, offset: Tensor, relative: bool = False
) -> Evidence:
    """`relative` may leave out what a token's log-likelihoods have in common, as in `Gaussians.mahalanobis`."""
    weights = Weights.of(attention, "exact")
    features = [some.flatten(0, 1) for some in nest.features(embeddings, attention, offset)]
    found = []
    for x, gaussians in zip(features, (nest.parts, kinds), strict=True):
        distances = gaussians.mahalanobis(x, relative=relative).view(*attention.shape, -1)
        found.append(weights.log_likelihood(distances, gaussians.log_det, x.shape[1]))
    (u, v), (parts, of_kinds) = features, found
    return Evidence(u, v, parts, of_kinds.mul_(float(nest.patch_weight)), weights)


def infer_nested(
    given: Evidence,
    nest: Nest,
    alpha: Tensor,
    start: tuple[Tensor, Tensor] | None,
    *,
    rounds: int = _ROUNDS,
    tol: float = 1e-4,
) -> tuple[Posterior, Tensor]:
    """The E-step: φ and γ of parts, in turn with the kinds ψ (B, K). `start` are γ - α and ψ of an earlier E-step.

    The posterior's `phi`, `counts`, `gamma` are of parts, its `bound` is that of both levels.
    """
    images, tokens, n_parts = given.parts.shape
    log_shares, member = nest.kind_shares.log().to(given.kinds.dtype), nest.member.to(given.kinds.dtype)
    if start is None:  # at first every patch may be of its own kind
        counts = given.parts.new_full((images, n_parts), tokens / n_parts, dtype=torch.float64)
        largest = given.kinds.amax(2, keepdim=True)
        mixed = nest.of_parts((given.kinds - largest + log_shares).exp()).clamp_min(torch.finfo(given.kinds.dtype).tiny)
        first = infer(
            given.parts + mixed.log() + largest,
            given.weights,
            alpha,
            (counts, counts / tokens),
            max_sweeps=_SWEEPS,
            tol=tol,
        )
        counts, psi = first.counts, _kinds_of(first, given, nest, log_shares)[1]
    else:
        counts, psi = start
    rest = torch.arange(images, device=counts.device)
    found: Posterior | None = None
    for _ in range(rounds):  # each image until its kinds have settled, whichever others are beside it
        some = given if len(rest) == images else given.of_images(rest)
        begin, before = (counts[rest], counts[rest] / tokens), psi[rest]
        said = torch.addmm(
            some.parts.flatten(0, 1), (some.kinds * before[:, None].to(some.kinds.dtype)).flatten(0, 1), member
        )
        late = infer(said.view_as(some.parts), some.weights, alpha, begin, max_sweeps=_SWEEPS, tol=tol)
        pulled, fresh = _kinds_of(late, some, nest, log_shares)
        entropy = torch.special.entr(fresh) + fresh * nest.kind_shares.log()
        late.bound = late.bound + ((fresh - before) * pulled + entropy).sum(1)
        if found is None:
            found, counts, psi = late, late.counts, fresh
        else:
            for name in ("counts", "phi_bar", "gamma", "moving", "bound", "phi"):
                getattr(found, name)[rest] = getattr(late, name)
            counts, psi = found.counts, psi.index_copy(0, rest, fresh)
        rest = rest[late.moving | ((fresh - before).abs().amax(1) > _SETTLED)]
        if len(rest) == 0:
            break
    assert found is not None
    return found, psi


def _kinds_of(found: Posterior, given: Evidence, nest: Nest, log_shares: Tensor) -> tuple[Tensor, Tensor]:
    """ρ Σ_j w φ log N of every kind (B, K), and ψ."""
    held = (found.phi * given.weights.count[:, :, None]).mT @ given.kinds  # (B, P, K)
    pulled = held.gather(1, nest.part_of.expand(len(held), 1, -1)).squeeze(1).double()
    return pulled, nest.choose(pulled + log_shares.double())
