"""Which library a model comes from, found out rather than asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pace.backbones import from_open_clip, from_timm, from_torchvision, from_transformers
from pace.backbones.tower import Model, Tower

_LIBRARIES: dict[str, Callable[[Any], Tower | None]] = {
    "timm": from_timm.describe,
    "transformers": from_transformers.describe,
    "torchvision": from_torchvision.describe,
    "open_clip": from_open_clip.describe,
}


def find(model: Any) -> Model:
    """The model as `Backbone` sees it."""
    if isinstance(model, Model):
        return model
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected a torch module or an object with the methods of Model; found {_kind(model)}")
    model = _unwrapped(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError("model: TorchScript cannot be looked into; pass the module that it was made from")
    tower = _described(model)
    if tower is None:
        inside = next((name for name, part in model.named_modules() if _described(part) is not None), None)
        hint = (
            f"there is a vision transformer in it: pass model.{inside}, with head=… for its predictions"
            if inside
            else "describe your own with pace.backbones.Tower"
        )
        raise ValueError(f"model: no vision transformer of {', '.join(_LIBRARIES)} found in {_kind(model)}; {hint}")
    return tower


def _described(model: nn.Module) -> Tower | None:
    """A library's model or a subclass of one, if it is a vision transformer."""
    origins = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    return next((tower for name in _LIBRARIES if name in origins and (tower := _LIBRARIES[name](model))), None)


def _unwrapped(model: Any) -> Any:
    """Without what torch.compile, PEFT and parallel training wrap around a model."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        else:
            return model


def _kind(model: Any) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"
