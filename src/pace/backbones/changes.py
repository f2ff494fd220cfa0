"""Changes to a model for the length of a call, undone even when the model raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# Switched off during a call. Checkpointing would run blocks a second time without our replacements, and compiled code
# would run as it was traced, without them.
_OFF = (("training", False), ("grad_checkpointing", False), ("_compiled_call_impl", None))


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode. Sets the flags directly, since some models overload ``eval()`` to do more."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    modules = [model]
    try:
        while modules:  # much faster than modules(), which would show in a small batch's time on a GPU
            module = modules.pop()
            state = vars(module)
            for name, off in _OFF:
                if state.get(name):
                    before.append((state, name, state[name]))
                    state[name] = off
            if "shift_size" in state:  # transformers' Swin shrinks its windows for good when it meets a small image
                before += [(state, name, state[name]) for name in ("shift_size", "window_size")]
            modules += filter(None, module._modules.values())
        yield
    finally:
        for state, name, value in before:
            state[name] = value


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """`module` runs `forward` instead of its own."""
    state = vars(module)
    before = {"forward": state["forward"]} if "forward" in state else {}  # accelerate, for one, puts its own here
    state["forward"] = forward
    try:
        yield
    finally:
        del state["forward"]
        state.update(before)
