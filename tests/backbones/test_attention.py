"""The probe sees what the three attention calls of PyTorch compute, whatever their arguments."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pace.backbones import attention
from pace.backbones.attention import AttentionProbe

CLS, ALL = slice(0, 1), slice(None)


def _weights(query: Tensor, key: Tensor, bias: Tensor | float = 0.0, scale: float | None = None) -> Tensor:
    """Attention as it is defined, (B, heads, T, T)."""
    return (query @ key.mT * (scale or query.shape[-1] ** -0.5) + bias).softmax(-1)


def _qkv(heads: int = 4, of_keys: int = 4, tokens: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, heads, tokens, 8), torch.randn(3, of_keys, tokens, 8), torch.randn(3, of_keys, tokens, 8)


@pytest.mark.parametrize("rows", [CLS, ALL])
@pytest.mark.parametrize("shape", [(), (1, 7), (4, 7, 7), (3, 1, 7, 7)])
@pytest.mark.parametrize("boolean", [False, True])
def test_masks_of_every_shape(rows: slice, shape: tuple[int, ...], boolean: bool) -> None:
    query, key, value = _qkv()
    mask = bias = None
    if shape:
        bias = torch.randn(shape)
        mask = bias > -1 if boolean else bias
        bias = torch.zeros(shape).masked_fill(~mask, -torch.inf) if boolean else bias
    with AttentionProbe(rows) as probe:
        output = F.scaled_dot_product_attention(query, key, value, mask)
    weights = _weights(query, key, 0.0 if bias is None else bias)
    torch.testing.assert_close(output, weights @ value)
    assert len(probe.seen) == 1
    torch.testing.assert_close(probe.seen[0], weights.mean(1)[:, rows])


def test_scale_causal_order_and_grouped_heads() -> None:
    query, key, value = _qkv(heads=4, of_keys=2)
    with AttentionProbe(ALL) as probe:
        F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True)
    late = torch.full((7, 7), -torch.inf).triu(1)
    torch.testing.assert_close(probe.seen[0], _weights(query, key.repeat_interleave(2, 1), late, 0.3).mean(1))


def test_large_batches_are_worked_off_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = _qkv()
    mask = torch.randn(3, 4, 7, 7)
    monkeypatch.setattr(attention, "_VALUES", 4 * 7 * 7)
    with AttentionProbe(ALL) as probe:
        F.scaled_dot_product_attention(query, key, value, mask)
    torch.testing.assert_close(probe.seen[0], _weights(query, key, mask).mean(1))


@pytest.mark.parametrize("rows", [CLS, ALL])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("other_width", [None, 12])
def test_multi_head_attention(rows: slice, batch_first: bool, other_width: int | None) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, batch_first=batch_first, kdim=other_width, vdim=other_width).eval()
    query = torch.randn(3, 3, 16)
    key = query if other_width is None else torch.randn(3, 3, other_width)
    mask = torch.randn(3, 3)
    with torch.no_grad(), AttentionProbe(rows) as probe:
        module(query, key, key, attn_mask=mask, need_weights=False)
    expected = module(query, key, key, attn_mask=mask, need_weights=True)[1]
    torch.testing.assert_close(probe.seen[0], expected[:, rows])


@pytest.mark.parametrize("softmax", [torch.softmax, torch.Tensor.softmax, F.softmax])
def test_attention_written_out_with_a_softmax(softmax: object) -> None:
    query, key, _ = _qkv()
    with AttentionProbe(CLS) as probe:
        weights = softmax(query @ key.mT, -1)  # type: ignore[operator]
    torch.testing.assert_close(probe.seen[0], weights.mean(1)[:, :1])


def test_half_precision_is_added_up_in_float32() -> None:
    query, key, value = (part.to(torch.bfloat16) for part in _qkv())
    with AttentionProbe(CLS) as probe:
        F.scaled_dot_product_attention(query, key, value)
    assert probe.seen[0].dtype == torch.float32
    torch.testing.assert_close(probe.seen[0].sum(-1), torch.ones(3, 1))
