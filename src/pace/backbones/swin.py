"""Swin's windows: from attention within each window to attention over the image."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Windows(NamedTuple):
    """How a block cuts its token grid: window size and cyclic shift (rows, columns), and whether it pads before shifting."""

    size: tuple[int, int]
    shift: tuple[int, int]
    pad_first: bool


def token_windows(grid: tuple[int, int], windows: Windows) -> Tensor:
    """(windows, places): the token at every place of every window, -1 for padding."""
    rows, columns = grid
    height, width = windows.size
    padding = (0, -columns % width, 0, -rows % height)
    shift = [-windows.shift[0], -windows.shift[1]]
    tokens = torch.arange(rows * columns).view(rows, columns)
    if windows.pad_first:
        tokens = F.pad(tokens, padding, value=-1).roll(shift, (0, 1))
    else:
        tokens = F.pad(tokens.roll(shift, (0, 1)), padding, value=-1)
    down, right = tokens.shape[0] // height, tokens.shape[1] // width
    return tokens.view(down, height, right, width).transpose(1, 2).reshape(down * right, height * width)


def attention_received(attention: Tensor, grid: tuple[int, int], windows: Windows) -> Tensor:
    """(B, tokens): the attention each token receives, averaged over all queries of the image (0 from other windows).

    `attention` is (B · windows, places, places). Padding neither gives nor receives attention.
    """
    tokens = token_windows(grid, windows).to(attention.device)
    real = tokens >= 0
    attention = attention.view(-1, *tokens.shape, tokens.shape[1])
    given = (attention * real[:, :, None]).sum(2)
    received = given.new_empty(len(given), grid[0] * grid[1])
    received[:, tokens[real]] = given[:, real]
    return received / received.shape[1]
