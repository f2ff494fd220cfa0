"""A short digest of everything that decides what a model says."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, str, type(None))
_NO_MATTER = {"training", "grad_checkpointing", "gradient_checkpointing", "fused_attn", "name_or_path"}


def fingerprint(*things: Any) -> str:
    """The same for the same things; another when a weight, a shape, a setting or a function changes."""
    digest = hashlib.blake2b(digest_size=8)
    _add(digest, things, set())
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, thing: Any, above: set[int]) -> None:
    digest.update(f"<{type(thing).__module__}.{type(thing).__qualname__}>".encode())
    if isinstance(thing, _PLAIN):
        digest.update(repr(thing).encode())
    elif isinstance(thing, Tensor):
        digest.update(f"{thing.dtype} {tuple(thing.shape)}".encode())
        digest.update(thing.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    elif id(thing) not in above:  # an object may know its owner
        for part in _parts(thing):
            _add(digest, part, above | {id(thing)})
        digest.update(b"</>")


def _parts(thing: Any) -> Iterable[Any]:
    """What a thing is made of."""
    if isinstance(thing, (tuple, list)):
        return thing
    if isinstance(thing, Mapping):
        return [item for pair in sorted(thing.items(), key=lambda pair: str(pair[0])) for item in pair]
    if isinstance(thing, np.ndarray):  # of names or records too, as scikit-learn's classifiers have them
        return thing.tolist() if thing.dtype.hasobject else [str(thing.dtype), thing.shape, thing.tobytes().hex()]
    if isinstance(thing, nn.Module):
        modules = [(name, type(module).__qualname__, _settings(module)) for name, module in thing.named_modules()]
        return [modules, thing.state_dict()]
    if isinstance(thing, (partial, MethodType)):
        return thing.__reduce__()
    if isinstance(thing, CodeType):
        return [thing.co_code.hex(), thing.co_names, thing.co_consts]
    if isinstance(thing, FunctionType):
        closed_over = [cell.cell_contents for cell in thing.__closure__ or ()]
        return [thing.__code__, thing.__defaults__, thing.__kwdefaults__, closed_over]
    name = [getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)]
    return name if isinstance(thing, type) else [name, getattr(thing, "__dict__", None) or thing.__getstate__()]


def _settings(module: nn.Module) -> dict[str, Any]:
    """Heads, scales, windows, …: what a module computes with beside its weights."""
    public = {name: value for name, value in vars(module).items() if name[0] != "_" and name not in _NO_MATTER}
    return {name: value for name, value in public.items() if isinstance(value, (*_PLAIN, tuple, list))}
