"""Sums over groups of rows, in the same order every time: on a GPU too, where scattered adds are not reproducible."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag


class Grouping:
    """Rows 0 … n - 1 in groups 0 … number - 1, some of which may be empty."""

    def __init__(self, group: Tensor, number: int):
        self.group, self.number = group, number  # (n,)
        ordered, self.order = group.sort(stable=True)
        self.starts = torch.searchsorted(ordered, torch.arange(number + 1, device=group.device))

    @property
    def sizes(self) -> Tensor:
        return self.starts.diff()

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


def segment_sums(values: Tensor, starts: Tensor) -> Tensor:
    """Of values (n,) from each start to the next: (len(starts) - 1,)."""
    total: Tensor = torch.segment_reduce(values, "sum", offsets=starts, unsafe=True)  # skips checking the lengths
    return total


def nearest(x: Tensor, means: Tensor) -> Tensor:
    """The nearest mean to every row (n,)."""
    return torch.addmm(means.square().sum(1), x, means.T, alpha=-2).argmin(1)
