"""Total Sobol indices: how much of an output's variance involves a variable."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def total_indices(
    values: Callable[[Tensor], Tensor], variables: int, designs: int, seed: int, device: torch.device
) -> Tensor:
    """S_T (B, K) of B outputs in K variables, uniform on [0, 1]; `values` turns inputs (S, K) into outputs (B, S).

    Jansen's estimator on a scrambled Sobol sequence, designs · (K + 2) evaluations. An output that does not vary has
    indices of 0.
    """
    engine = torch.quasirandom.SobolEngine(2 * variables, scramble=True, seed=seed)  # type: ignore[no-untyped-call]
    first, second = torch.split(engine.draw(designs).to(device), variables, 1)
    swapped = first.repeat(variables, 1, 1)  # variable k of design k comes from the second half
    index = torch.arange(variables, device=device)
    swapped[index, :, index] = second.T
    found = values(torch.cat([first, second, swapped.flatten(0, 1)])).double()
    before, after = found[:, :designs], found[:, 2 * designs :].reshape(-1, variables, designs)
    variance = found[:, : 2 * designs].var(1, correction=0)[:, None]
    effect = (before[:, None] - after).square().mean(2) / 2
    still = variance <= 1e-12 * found[:, :designs].square().mean(1, keepdim=True)
    return torch.where(still, 0.0, effect / variance.clamp_min(1e-300)).float()
