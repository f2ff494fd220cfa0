"""Looking into a model without changing it: whatever is switched here is switched back, also when the model raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# Switched off during a call. Checkpointing would run blocks a second time when our replacements are gone again,
# and compiled code would run as it was traced, without them.
_OFF = (("training", False), ("grad_checkpointing", False), ("_compiled_call_impl", None))

# Left alone, but put back: transformers' Swin shrinks its windows for good when it meets a small image.
_KEPT = ("shift_size", "window_size")


@contextmanager
def undisturbed(*models: nn.Module) -> Iterator[None]:
    """The models run in eval mode inside, and are afterwards as they were.

    Flags are set directly rather than with ``eval()``, which some models overload to do more than that.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    modules: list[nn.Module] = list(models)
    try:
        while (
            modules
        ):  # several times as fast as modules(), which would be a good part of a small batch's time on a GPU
            module = modules.pop()
            state = vars(module)
            for name, off in _OFF:
                if state.get(name):
                    before.append((state, name, state[name]))
                    state[name] = off
            if "shift_size" in state:
                before += [(state, name, state[name]) for name in _KEPT]
            modules += filter(None, module._modules.values())
        yield
    finally:
        for state, name, value in before:
            state[name] = value


@contextmanager
def instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, `module` runs `forward` in place of its own."""
    state = vars(module)
    before = {"forward": state["forward"]} if "forward" in state else {}  # e.g. accelerate puts one here
    state["forward"] = forward
    try:
        yield
    finally:
        del state["forward"]
        state.update(before)


@contextmanager
def tapped(module: nn.Module, record: Callable[[tuple[Any, ...], Any], None]) -> Iterator[None]:
    """Inside, `record(arguments, output)` is told of every run of `module`."""
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        record(args, output)
        return output

    with instead(module, forward):
        yield
