"""Ways to cut the patches of every concept in two, all concepts at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import normalize

from pace.model.selecting.grouping import Grouping

_POWER_STEPS = 10  # towards the principal axis
_ODD = 4.5  # median deviations beyond which a patch is badly explained
_ROUNDS = 5  # of two means
_VALUES_AT_ONCE = 1 << 18  # that stay in a CPU's cache, which is several times as fast; a GPU takes all patches at once


def halves(x: Tensor, weights: Tensor, by: Grouping, *, white: bool = False) -> list[Tensor]:
    """Three ways to cut the patches x (n, d) of each group in two: boolean (n,).

    Patches come one group after the other. Two means start along the principal axis (a split), from the farthest patch, and
    from the mean of all badly explained patches (births: a small concept within a large one hardly turns its axis). Where
    patches have unit spread (`white`) they go to the likelier half, not to the nearer: otherwise the edge of a large cloud
    would outnumber a small one beside it. All may end up on the same side.
    """
    ways = [_halves(x[rows], weights[rows], some, white) for rows, some in _chunks(x, by)]
    return [torch.cat(way) for way in zip(*ways, strict=True)]


def along_widest(x: Tensor, weights: Tensor, by: Grouping) -> Tensor:
    """Where each patch lies (n,) from the mean of its group, along the direction in which the group varies most."""
    places = torch.empty_like(x[:, 0])
    for rows, some in _chunks(x, by):
        centred = _centred(x[rows], weights[rows], some)
        if len(centred):
            farthest = some.ranked(centred.square().sum(1))[(some.starts[1:] - 1).clamp_min(0)]
            axes = _principal_axes(centred, weights[rows], some, centred[farthest])
            places[rows] = (centred * axes[some.group]).sum(1)
    return places


def _chunks(x: Tensor, by: Grouping) -> Iterator[tuple[Tensor, Grouping]]:
    """Rows of several whole groups, and these groups."""
    at_once = max(1, (_VALUES_AT_ONCE if x.device.type == "cpu" else x.numel()) // x.shape[1])
    starts, first = by.starts.tolist(), 0
    for last in range(1, by.number + 1):
        if last == by.number or starts[last + 1] - starts[first] > at_once:
            rows = by.order[starts[first] : starts[last]]
            yield rows, Grouping(by.group[rows] - first, last - first)
            first = last


def _centred(x: Tensor, weights: Tensor, by: Grouping) -> Tensor:
    held = by.totals(weights).clamp_min(1e-300)
    return x - (by.sums(x, weights) / held[:, None]).to(x.dtype)[by.group]


def _principal_axes(x: Tensor, weights: Tensor, by: Grouping, axes: Tensor) -> Tensor:
    """Of every group (number, d), by power iteration from these directions."""
    for _ in range(_POWER_STEPS):
        axes = normalize(by.sums(x, weights * (x * axes[by.group]).sum(1)), dim=1)
    return axes


def _halves(x: Tensor, weights: Tensor, by: Grouping, white: bool) -> list[Tensor]:
    held = by.totals(weights).clamp_min(1e-300)
    x = _centred(x, weights, by)
    radius = x.square().sum(1)
    ends = by.starts[1:] - 1

    def along(directions: Tensor) -> Tensor:
        return (x * directions[by.group]).sum(1)

    def median_of(values: Tensor) -> Tensor:
        return values[by.ranked(values)[(by.starts[:-1] + ends).div(2, rounding_mode="floor")]]

    def nearer(mean: Tensor) -> Tensor:
        """To this mean than to that of the group, which is the origin."""
        return along(mean) > (mean.square().sum(1) / 2)[by.group]

    farthest = by.ranked(radius)[ends]
    median = median_of(radius)
    far = median + _ODD * median_of((radius - median[by.group]).abs())
    odd = weights * (radius >= torch.minimum(far, radius[farthest])[by.group])
    odd_mean = by.sums(x, odd) / by.totals(odd).clamp_min(1e-300)[:, None].to(x.dtype)
    axis = _principal_axes(x, weights, by, x[farthest])
    sides = []
    for side in (along(axis) > 0, nearer(x[farthest]), nearer(odd_mean)):
        for _ in range(_ROUNDS):
            one = by.totals(weights * side)
            one, other = one.clamp_min(1e-300), (held - one).clamp_min(1e-300)
            first = by.sums(x, weights * side)  # the other half's sum is minus this
            bias = first.square().sum(1) / 2 * (1 / one - 1 / other)
            if white:
                bias = bias + (other / one).log() / (1 / one + 1 / other)
            count = by.totals(side)
            both = (count > 0) & (count < by.sizes)
            side = torch.where(both[by.group], along(first) > bias.to(x.dtype)[by.group], side)
        sides.append(side)
    return sides
