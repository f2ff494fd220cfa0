"""Torch's modes: what a caller has switched on around a call is not meant for the arithmetic in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def undisturbed(work: Callable[P, R]) -> Callable[P, R]:
    """Work that knows neither autocast, which would round what it adds up, nor `no_grad` and inference mode."""

    @wraps(work)
    def done(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False), torch.inference_mode(False):
            return work(*args, **kwargs)

    return done


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of float32 in float32, also where a GPU may take TensorFloat-32 for them."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
