"""Concepts made one: the model that follows where a group of concepts is taken for a single one.

The mean and the covariance of the group's mixture stay what they are (of low rank: the variances), and α, π, η and β follow
from those of its members.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pace.model.concepts import Concepts
from pace.model.gaussians import Gaussians, TiedGaussians
from pace.model.nesting import Nest
from pace.model.settings import SMALLEST_ALPHA

_NEVER = 1e-290  # π of a kind that is nowhere
_FAR = 1000.0  # times as far as the group's patches lie from the origin: out of any patch's reach


def merged(concepts: Concepts, group: Sequence[int], held: Tensor) -> Concepts:
    """The concepts with those of the group as one, under the number of the first; the others stay, and get no patch.

    `held` (K,) is how many patches each concept holds, float64.
    """
    chosen = torch.tensor(list(group), device=held.device)
    first, rest = chosen[0], chosen[1:]
    heads = {name: getattr(concepts, name).clone() for name in ("label_head", "pair_weights")}
    for values in heads.values():
        values[first] = mean_of(values, chosen, held)
    if concepts.nest is not None:
        nest = _merged_kinds(concepts.nest, chosen, held)
        # The kinds' covariance is the prior's, however many images they have. Where all but π is alike, the first is found.
        tied = isinstance(concepts.gaussians, TiedGaussians)
        kinds = {name: tensor.clone() for name, tensor in concepts.gaussians.tensors().items()}
        kinds["means"][first] = mean_of(kinds["means"], chosen, held)
        for tensor in [kinds["means"]] if tied else kinds.values():
            tensor[rest] = tensor[first].clone()
        gaussians = type(concepts.gaussians).from_tensors(kinds)
        return replace(concepts, gaussians=gaussians, nest=nest, **heads)
    alpha = concepts.alpha.clone()
    alpha[first], alpha[rest] = alpha[chosen].sum(), SMALLEST_ALPHA
    return replace(concepts, gaussians=_merged_gaussians(concepts.gaussians, chosen, held), alpha=alpha, **heads)


def shares_of(group: Tensor, held: Tensor) -> Tensor:
    """What each member holds of the patches of its group; as much as the others where none holds any."""
    own = held[group]
    return own / own.sum() if float(own.sum()) > 0 else torch.full_like(own, 1 / len(own))


def mean_of(values: Tensor, group: Tensor, held: Tensor) -> Tensor:
    """Of values (K, …), each member counted by its patches."""
    mean: Tensor = torch.tensordot(shares_of(group, held), values[group].double(), 1)
    return mean.to(values.dtype)


def _merged_kinds(nest: Nest, group: Tensor, held: Tensor) -> Nest:
    shares, means = nest.kind_shares.clone(), nest.means.clone()
    shares[group[0]], shares[group[1:]] = shares[group].sum(), _NEVER
    means[group[0]] = mean_of(means, group, held)
    return replace(nest, kind_shares=shares, means=means)


def _merged_gaussians(gaussians: Gaussians, group: Tensor, held: Tensor) -> Gaussians:
    family, tensors, tied = type(gaussians), gaussians.tensors(), isinstance(gaussians, TiedGaussians)
    shares, means = shares_of(group, held), gaussians.means.clone()
    centres = means[group].double()
    middle = shares @ centres
    between = (centres - middle).T @ ((centres - middle) * shares[:, None])
    own = {name: t if tied and name != "means" else t[group] for name, t in tensors.items()}
    covariances = family.from_tensors(own).covariances()
    if gaussians.name == "diag":
        covariances = torch.diag_embed(covariances)
    reach = float(covariances.diagonal(dim1=-2, dim2=-1).sum(-1).max().sqrt() + centres.norm(dim=1).max())
    means[group[0]], means[group[1:]] = middle.to(means.dtype), 0.0
    means[group[1:], 0] = _FAR * reach
    if tied:  # all concepts share what the group adds to it
        part = held[group].sum() / held.sum().clamp_min(1e-300)
        return family.seed(means, covariances + part * between, 0)
    covariance = torch.tensordot(shares, covariances, 1) + between
    rank = tensors["factors"].shape[2] if "factors" in tensors else 0
    one = family.seed(means[group[:1]], covariance, rank).tensors()  # of low rank: as learning begins
    found = {name: tensor.clone() for name, tensor in tensors.items()} | {"means": means}
    for name, tensor in one.items():
        found[name][group[0]] = tensor[0]
    return family.from_tensors(found)
