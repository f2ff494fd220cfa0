"""Recognise which library a model comes from, and describe it as a `Tower`."""

from __future__ import annotations

from typing import Any

from torch import nn

from pace.backbones import from_open_clip, from_timm, from_torchvision, from_transformers
from pace.backbones.tower import Model, Tower

_LIBRARIES = {
    "timm": from_timm.describe,
    "transformers": from_transformers.describe,
    "torchvision": from_torchvision.describe,
    "open_clip": from_open_clip.describe,
}


def describe(model: Any) -> Model:
    """A `Tower` for a model of a known library; an object that already follows `Model` is returned as it is."""
    if isinstance(model, Model):
        return model
    model = _unwrapped(model)
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected a torch module or an object with the methods of Model; found {kind}")
    tower = _tower(model)
    if tower is None:
        inside = next((name for name, part in model.named_modules() if _tower(part) is not None), None)
        hint = f"pass model.{inside}, with head=… for its predictions" if inside else "describe it with Tower"
        raise ValueError(f"model: {kind} is not a vision transformer of {', '.join(_LIBRARIES)}; {hint}")
    return tower


def describe_tower(model: nn.Module) -> Tower:
    """The same for training, which needs to know the modules."""
    tower = describe(model)
    if not isinstance(tower, Tower):
        raise ValueError(f"model: {type(model).__name__} does not show its modules, so it cannot be trained")
    return tower


def _tower(model: nn.Module) -> Tower | None:
    """For a library's model or a subclass of one, if it is a vision transformer."""
    origins = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    return next((tower for name in _LIBRARIES if name in origins and (tower := _LIBRARIES[name](model))), None)


def _unwrapped(model: Any) -> Any:
    """Without the wrappers of torch.compile, PEFT and parallel training."""
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return _unwrapped(model.module)
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        return _unwrapped(model._orig_mod)
    return _unwrapped(model.get_base_model()) if hasattr(model, "get_base_model") else model
