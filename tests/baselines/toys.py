"""Models small enough that every answer is known, and observations of them."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from pace import Observations

GRID = (2, 3)


class Toy:
    """f = h ∘ g with any h from tokens (B, T, d) to logits; g is never asked for more than a shape.

    The first `prefix` of the T tokens come before the patches.
    """

    def __init__(self, h: Callable[[Tensor], Tensor], d: int, prefix: int = 1) -> None:
        self.h, self.d, self.prefix, self.calls = h, d, prefix, 0
        self.device = torch.device("cpu")
        self.preprocessing = SimpleNamespace(size=(2 * GRID[0], 2 * GRID[1]))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        return height // 2, width // 2

    def split(self, images: Tensor) -> Tensor:
        rows, columns = self.grid(*images.shape[2:])
        return torch.zeros(len(images), self.prefix + rows * columns, self.d)

    def forward_from(self, tokens: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        self.calls += 1
        return self.h(tokens)

    def observe(self, images: int, seed: int, spread: float = 1.0) -> Observations:
        """Random tokens with CLS, and what h makes of them where T is just that."""
        generator = torch.Generator().manual_seed(seed)
        tokens = spread * torch.randn(images, 1 + GRID[0] * GRID[1], self.d, generator=generator)
        attention = torch.rand(tokens.shape[:2], generator=generator) + 0.1
        inserted = tokens.new_zeros(images, self.prefix - 1, self.d)
        logits = self.h(torch.cat([tokens[:, :1], inserted, tokens[:, 1:]], 1))
        return Observations(tokens, attention, logits.softmax(1).detach(), grid=GRID, prefix_tokens=1)


def linear(d: int, classes: int, tokens: int, seed: int = 0) -> tuple[Toy, Tensor]:
    """h_n(e) = Σ_jc w_njc e_jc, and w (N, J, d)."""
    weights = torch.from_numpy(np.random.default_rng(seed).normal(size=(classes, tokens, d)).astype(np.float32))
    return Toy(lambda e: torch.einsum("bjc,njc->bn", e, weights), d), weights


def read_by_cls(d: int, classes: int, prefix: int = 1) -> Toy:
    """A curved h that reads CLS alone, as the head of most transformers does."""
    rng = np.random.default_rng(1)
    first, second = (torch.from_numpy(rng.normal(size=size).astype(np.float32)) for size in ((d, 8), (8, classes)))
    return Toy(lambda e: torch.tanh(e[:, 0] @ first) @ second, d, prefix)


def read_by_all(d: int, classes: int, prefix: int = 1) -> Toy:
    """A curved h in which every token counts."""
    rng = np.random.default_rng(2)
    first, second = (torch.from_numpy(rng.normal(size=size).astype(np.float32)) for size in ((d, 8), (8, classes)))
    return Toy(lambda e: torch.tanh(e @ first).mean(1) @ second, d, prefix)
