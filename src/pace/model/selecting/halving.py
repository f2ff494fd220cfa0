"""Ways to cut the patches of every concept in two, all concepts at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import normalize

from pace.model.selecting.grouping import Grouping

FEWEST = 4  # patches that could be two concepts

_POWER_STEPS = 10  # towards the principal axis
_ODD = 4.5  # median deviations beyond which a patch is badly explained
_ROUNDS = 5  # of two means
_AT_ONCE = {"cpu": 1 << 18}  # numbers that stay in a CPU's cache; a GPU takes all patches together


def halves(x: Tensor, weights: Tensor, concept: Tensor, number: int, *, white: bool = False) -> list[Tensor]:
    """Three ways to cut the patches x (n, d) of each concept in two: boolean (n,).

    Patches come one concept after the other, and every concept has some.

    Two means started along the principal axis (a split), from the farthest patch, and from the mean of all badly explained
    patches (births: a small concept within a large one hardly turns its axis). Where patches have unit spread (`white`) they go
    to the likelier half and not to the nearer: the edge of a large cloud would outnumber a small one beside it. All may be on
    the same side.
    """
    starts = torch.searchsorted(concept, torch.arange(number + 1, device=x.device)).tolist()
    ways = []
    for first, last in _runs(starts, _rows_at_once(x)):
        rows = slice(starts[first], starts[last])
        ways.append(_halves(x[rows], weights[rows], Grouping(concept[rows] - first, last - first), white))
    return [torch.cat(way) for way in zip(*ways, strict=True)]


def along_widest(x: Tensor, weights: Tensor, by: Grouping) -> Tensor:
    """Where each patch lies (n,) from the mean of its group, in the direction in which the group varies most."""
    starts, ordered = by.starts.tolist(), by.group[by.order]
    places = torch.empty_like(x[:, 0])
    for first, last in _runs(starts, _rows_at_once(x)):
        rows = by.order[starts[first] : starts[last]]
        some = Grouping(ordered[starts[first] : starts[last]] - first, last - first)
        centred = _centred(x[rows], weights[rows], some)
        if len(centred):
            farthest = some.ranked(centred.square().sum(1))[(some.starts[1:] - 1).clamp_min(0)]
            axes = _principal_axes(centred, weights[rows], some, centred[farthest])
            places[rows] = (centred * axes[some.group]).sum(1)
    return places


def _rows_at_once(x: Tensor) -> int:
    return max(1, _AT_ONCE.get(x.device.type, x.numel()) // x.shape[1])


def _centred(x: Tensor, weights: Tensor, by: Grouping) -> Tensor:
    held = by.totals(weights).clamp_min(1e-300)
    return x - (by.sums(x, weights) / held[:, None]).to(x.dtype)[by.group]


def _principal_axes(x: Tensor, weights: Tensor, by: Grouping, axes: Tensor) -> Tensor:
    """Of every group (number, d), from some directions."""
    for _ in range(_POWER_STEPS):
        axes = normalize(by.sums(x, weights * (x * axes[by.group]).sum(1)), dim=1)
    return axes


def _runs(starts: list[int], rows: int) -> Iterator[tuple[int, int]]:
    """Concepts first … last - 1 that have so many rows together, or one concept that has more."""
    first = 0
    for last in range(1, len(starts)):
        if last == len(starts) - 1 or starts[last + 1] - starts[first] > rows:
            yield first, last
            first = last


def _halves(x: Tensor, weights: Tensor, by: Grouping, white: bool) -> list[Tensor]:
    held = by.totals(weights).clamp_min(1e-300)
    x = _centred(x, weights, by)
    radius = x.square().sum(1)

    def along(directions: Tensor) -> Tensor:
        return (x * directions[by.group]).sum(1)

    ends = by.starts[1:] - 1

    def middle_of(values: Tensor) -> Tensor:
        return values[by.ranked(values)[(by.starts[:-1] + ends).div(2, rounding_mode="floor")]]

    farthest = by.ranked(radius)[ends]
    middle = middle_of(radius)
    far = middle + _ODD * middle_of((radius - middle[by.group]).abs())
    odd = weights * (radius >= torch.minimum(far, radius[farthest])[by.group])
    strange = by.sums(x, odd) / by.totals(odd).clamp_min(1e-300)[:, None].to(x.dtype)
    axis = _principal_axes(x, weights, by, x[farthest])

    def nearer(mean: Tensor) -> Tensor:
        """To this mean than to that of all, which is the origin."""
        return along(mean) > (mean.square().sum(1) / 2)[by.group]

    sides = []
    for side in (along(axis) > 0, nearer(x[farthest]), nearer(strange)):
        for _ in range(_ROUNDS):
            one = by.totals(weights * side)
            one, other = one.clamp_min(1e-300), (held - one).clamp_min(1e-300)
            first = by.sums(x, weights * side)  # and the others' is what is missing to the origin
            bias = first.square().sum(1) / 2 * (1 / one - 1 / other)
            if white:
                bias = bias + (other / one).log() / (1 / one + 1 / other)
            count = by.totals(side)
            both = (count > 0) & (count < by.sizes)
            side = torch.where(both[by.group], along(first) > bias.to(x.dtype)[by.group], side)
        sides.append(side)
    return sides
