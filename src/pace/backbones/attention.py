"""Read a model's attention weights from outside, while its fused kernels stay on.

However a block computes q and k (q- and k-norm, rotary or relative positions, window masks), it ends in one of three
calls: `scaled_dot_product_attention`, `multi_head_attention_forward`, or a softmax over q·k. `AttentionProbe` intercepts
that call, lets it run unchanged, and computes the wanted rows from the same q, k, scale and mask. The CLS row costs
O(J·d).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pace.backbones.patching import replaced_forward

_SOFTMAX = {torch.softmax, torch.Tensor.softmax, F.softmax, torch.special.softmax}
_WATCHED = {F.scaled_dot_product_attention, F.multi_head_attention_forward, *_SOFTMAX}
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
        output = func(*args, **kwargs) if kwargs else func(*args)
        if func in _WATCHED:  # every torch call passes here, even reading a shape
            self._note(func, args, kwargs or {}, output)
        return output

    def _note(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if func is F.scaled_dot_product_attention:
            self.seen.append(_fused_rows(self.rows, *args, **kwargs))
        elif func is F.multi_head_attention_forward:
            self.seen.append(_multi_head_rows(self.rows, *args, **kwargs))
        elif output.ndim == 4:
            self.seen.append(output[:, :, self.rows].float().mean(1))


@contextmanager
def probing(module: nn.Module, probe: AttentionProbe) -> Iterator[None]:
    """`probe` is active whenever `module` runs, and only then."""
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with probe:
            return own(*args, **kwargs)

    with replaced_forward(module, forward):
        yield


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
    if attn_mask is None:
        bias = query.new_zeros(())
    elif attn_mask.dtype == torch.bool:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    else:
        bias = attn_mask
    bias = bias[(None,) * (4 - bias.ndim)].expand(batch, -1, n, -1)[:, :, rows]

    def part(images: slice) -> Tensor:
        return (query[images] @ key[images].mT + bias[images]).softmax(-1, dtype=torch.float32).mean(1)

    step = max(1, _VALUES // (heads * query.shape[2] * key.shape[2]))
    parts = [part(slice(start, start + step)) for start in range(0, batch, step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
