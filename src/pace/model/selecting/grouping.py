"""Groups of patches: sums over them, and ways to cut each in two, all groups at once.

Sums have the same order every time: on a GPU too, where scattered adds are not reproducible.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, normalize

_POWER_STEPS = 10  # towards the principal axis
_ODD = 4.5  # median deviations beyond which a patch is badly explained
_ROUNDS = 5  # of two means


class Grouping:
    """Rows 0 … n - 1 in groups 0 … number - 1, some of which may be empty."""

    def __init__(self, group: Tensor, number: int):
        self.group, self.number = group, number  # (n,)
        ordered, self.order = group.sort(stable=True)
        self.starts = torch.searchsorted(ordered, torch.arange(number + 1, device=group.device))
        self.sizes = self.starts.diff()

    def sums(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Σ_i w_i x_i by group (number, d)."""
        total: Tensor = embedding_bag(
            self.order, rows, self.starts[:-1], mode="sum", per_sample_weights=weights[self.order]
        )
        return total

    def totals(self, values: Tensor) -> Tensor:
        """Σ_i v_i by group (number,), float64."""
        return segment_sums(values[self.order].double(), self.starts)

    def ranked(self, values: Tensor) -> Tensor:
        """The rows of group 0 by their values (n,), smallest first, then those of group 1, …"""
        order = values.argsort(stable=True)
        return order[self.group[order].argsort(stable=True)]

    def centred(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Rows minus the mean of their group."""
        means = self.sums(rows, weights) / self.totals(weights).clamp_min(1e-300)[:, None]
        return rows - means.to(rows.dtype)[self.group]


def summed(rows: Tensor, group: Tensor, number: int) -> Tensor:
    """Rows (n, …) added up by group (number, …); for few rows, or where rounding does not matter."""
    return rows.new_zeros(number, *rows.shape[1:]).index_add_(0, group, rows)


def segment_sums(values: Tensor, starts: Tensor) -> Tensor:
    """Of values (n,) from each start to the next: (len(starts) - 1,)."""
    total: Tensor = torch.segment_reduce(values, "sum", offsets=starts, unsafe=True)  # skips checking the lengths
    return total


def nearest(x: Tensor, means: Tensor) -> Tensor:
    """The nearest mean to every row (n,)."""
    return torch.addmm(means.square().sum(1), x, means.T, alpha=-2).argmin(1)


def along_widest(x: Tensor, weights: Tensor, by: Grouping) -> Tensor:
    """Where each patch lies (n,) from the mean of its group, along the direction in which the group varies most."""
    x = by.centred(x, weights)
    farthest = by.ranked(x.square().sum(1))[(by.starts[1:] - 1).clamp_min(0)]
    return (x * _principal_axes(x, weights, by, x[farthest])[by.group]).sum(1)


def _principal_axes(x: Tensor, weights: Tensor, by: Grouping, axes: Tensor) -> Tensor:
    """Of every group (number, d), by power iteration from these directions."""
    for _ in range(_POWER_STEPS):
        axes = normalize(by.sums(x, weights * (x * axes[by.group]).sum(1)), dim=1)
    return axes


def halves(x: Tensor, weights: Tensor, by: Grouping, *, white: bool = False) -> list[Tensor]:
    """Three ways to cut the patches x (n, d) of each group, none of which is empty, in two: boolean (n,).

    Two means start along the principal axis (a split), from the farthest patch, and from the mean of all badly explained
    patches (births: a small concept within a large one hardly turns its axis). Where patches have unit spread (`white`) they
    go to the likelier half, not to the nearer: otherwise the edge of a large cloud would outnumber a small one beside it. All
    may end up on the same side.
    """
    held = by.totals(weights).clamp_min(1e-300)
    x = by.centred(x, weights)
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
