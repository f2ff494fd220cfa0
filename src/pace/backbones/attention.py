"""Read a model's attention weights from outside, while its fused kernels stay on.

However a block computes q and k (q- and k-norm, rotary or relative positions, window masks), it ends in one of three
calls: `scaled_dot_product_attention`, `multi_head_attention_forward`, or a softmax over q·k. `AttentionProbe` intercepts
that call, lets it run unchanged, and computes the wanted rows from the same q, k, scale and mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_SOFTMAX = {torch.softmax, torch.Tensor.softmax, F.softmax, torch.special.softmax}
_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)
_VALUES = 1 << 26  # attention values held at once


class AttentionProbe(TorchFunctionMode):
    """While active, collects the query rows `rows` of every attention, averaged over heads, in `seen`: (B, R, J) each."""

    def __init__(self, rows: slice) -> None:
        super().__init__()
        self.rows = rows
        self.seen: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self.seen.append(_fused_rows(self.rows, *args, **kwargs))
        elif func is F.multi_head_attention_forward:
            self.seen.append(_multi_head_rows(self.rows, *args, **kwargs))
        elif func in _SOFTMAX and output.ndim == 4:
            self.seen.append(output[:, :, self.rows].float().mean(1))
        return output


def _fused_rows(
    rows: slice,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The rows `rows` of the weights that `scaled_dot_product_attention` (same arguments) applies to the values."""
    batch, heads, n, dim = query.shape
    if enable_gqa:
        key = key.repeat_interleave(heads // key.shape[1], dim=1)
    if is_causal:
        attn_mask = torch.ones(n, key.shape[2], dtype=torch.bool, device=query.device).tril()
    query = query[:, :, rows] * (dim**-0.5 if scale is None else scale)
    bias = query.new_zeros(()) if attn_mask is None else attn_mask
    if bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(~bias, -torch.inf)
    bias = bias[(None,) * (4 - bias.ndim)].expand(batch, -1, n, -1)[:, :, rows]
    step = max(1, _VALUES // (heads * query.shape[2] * key.shape[2]))
    parts = zip(*(torch.split(part, step) for part in (query, key, bias)), strict=True)
    return torch.cat([(q @ k.mT + b).softmax(-1, dtype=torch.float32).mean(1) for q, k, b in parts])


def _multi_head_rows(rows: slice, *args: Any, **kwargs: Any) -> Tensor:
    """The same for `multi_head_attention_forward`: called once more, for these queries only and with weights."""
    call = _MULTI_HEAD.bind(*args, **kwargs).arguments
    call["query"] = call["query"][rows]  # (tokens, images, d)
    if call.get("attn_mask") is not None:
        call["attn_mask"] = call["attn_mask"][..., rows, :]
    call.update(need_weights=True, average_attn_weights=True, is_causal=False)
    _, weights = F.multi_head_attention_forward(**call)
    assert weights is not None
    return weights.float()


class Windows(NamedTuple):
    """How a Swin block cuts its tokens: window size and cyclic shift (rows, columns), and whether it pads before shifting."""

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
