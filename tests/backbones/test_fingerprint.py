from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pace.backbones.fingerprint import fingerprint


def _closing_over(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda features: features @ weight


class Owned:
    """A callable with a method, and an owner that knows it."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.owner = {"of": self}

    def times(self, features: Tensor) -> Tensor:
        return features * self.value


SAME_TWICE: list[Callable[[float], Any]] = [
    lambda x: x,
    lambda x: torch.full((3, 2), x),
    lambda x: torch.full((3, 2), x, dtype=torch.bfloat16),
    lambda x: torch.tensor(x),
    lambda x: np.full(3, x),
    lambda x: [1, (x, "a")],
    lambda x: {"b": x, "a": None},
    lambda x: _closing_over(torch.full((2,), x)),
    lambda x: partial(torch.mul, other=torch.tensor(x)),
    lambda x: Owned(x),
    lambda x: Owned(x).times,
    lambda x: nn.Dropout(x / 10),
]


@pytest.mark.parametrize("make", SAME_TWICE)
def test_the_same_thing_has_the_same_fingerprint_and_another_another(make: Callable[[float], Any]) -> None:
    assert fingerprint(make(1.0)) == fingerprint(make(1.0))
    assert fingerprint(make(1.0)) != fingerprint(make(2.0))


def test_shape_type_order_and_nesting_count() -> None:
    things = [
        torch.zeros(6),
        torch.zeros(2, 3),
        torch.zeros(6).int(),
        (1, 2),
        (2, 1),
        ((1,), 2),
        (1, (2,)),
        "1",
        1,
        1.0,
    ]
    assert len({fingerprint(thing) for thing in things}) == len(things)


def test_functions_are_told_apart() -> None:
    functions = [
        torch.relu,
        torch.tanh,
        math.sin,
        lambda x: x + 1,
        lambda x: x + 2,
        lambda x: x - 1,
        lambda x: x.relu(),
        lambda x: x.tanh(),
    ]
    assert len({fingerprint(function) for function in functions}) == len(functions)


def test_settings_without_weights_count_and_modes_do_not() -> None:
    one, other = nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 4)
    other.load_state_dict(one.state_dict())
    assert fingerprint(one) != fingerprint(other)
    before = fingerprint(one)
    one.eval().requires_grad_(False)
    assert fingerprint(one) == before
