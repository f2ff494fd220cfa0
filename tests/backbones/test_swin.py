from __future__ import annotations

import pytest
import torch

from pace.backbones.attention import Windows, attention_received, token_windows


def test_windows_of_a_shifted_grid_worked_out_by_hand() -> None:
    """4 x 4 tokens, 2 x 2 windows, shifted by one: the first window is the middle of the first four."""
    found = token_windows((4, 4), Windows((2, 2), (1, 1), pad_first=True))
    assert found.tolist() == [[5, 6, 9, 10], [7, 4, 11, 8], [13, 14, 1, 2], [15, 12, 3, 0]]


@pytest.mark.parametrize(("pad_first", "expected"), [(True, [[1, 2], [-1, 0]]), (False, [[1, 2], [0, -1]])])
def test_padding_before_or_after_the_shift(pad_first: bool, expected: list[list[int]]) -> None:
    assert token_windows((1, 3), Windows((1, 2), (0, 1), pad_first)).tolist() == expected


def test_padding_neither_asks_nor_receives() -> None:
    windows = Windows((1, 2), (0, 0), pad_first=True)
    attention = torch.tensor([[[0.75, 0.25], [0.5, 0.5]], [[0.6, 0.4], [0.1, 0.9]]])  # token 2 and padding share one
    found = attention_received(attention, (1, 3), windows)
    torch.testing.assert_close(found, torch.tensor([[1.25, 0.75, 0.6]]) / 3)


@pytest.mark.parametrize("grid", [(6, 6), (4, 8)])
def test_without_padding_the_attention_of_an_image_sums_to_one(grid: tuple[int, int]) -> None:
    attention = torch.rand(5 * grid[0] * grid[1] // 4, 4, 4).softmax(-1)
    found = attention_received(attention, grid, Windows((2, 2), (1, 1), pad_first=False))
    torch.testing.assert_close(found.sum(1), torch.ones(5))
