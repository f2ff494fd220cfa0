"""Find the vision transformer in a model, whatever is wrapped around it, and describe it as a `Tower`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pace.backbones import from_transformers, libraries
from pace.backbones.changes import replaced_forward
from pace.backbones.preprocessing import Channels
from pace.backbones.tower import Model, Tower, last_linear

CONVOLUTIONAL = (
    "a convolutional network, without tokens and attention to explain; "
    "a ViT, Swin or DINOv2 would serve, fine-tuned or with a probe on your labels"
)

# What each makes of a model: a `Tower`, or None if it is none of the library's vision transformers.
_LIBRARIES = {
    "timm": libraries.timm,
    "transformers": from_transformers.describe,
    "torchvision": libraries.torchvision,
    "open_clip": libraries.open_clip,
}


def describe(model: Any) -> Model:
    """A `Tower` for a model of a known library; an object that already follows `Model` is returned as it is."""
    if isinstance(model, Model):
        return model
    model = _unwrapped(model)
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected a torch module or an object with the methods of Model; found {kind}")
    tower = _tower(model) or _tower_inside(model)
    if tower is None:
        inside = next((name for name, part in model.named_modules() if _tower(part) is not None), None)
        hint = f"pass model.{inside}, with head=… for its predictions" if inside else "describe it with Tower"
        if not inside and _is_convolutional(model):
            raise ValueError(f"model: {kind} is {CONVOLUTIONAL}")
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
    """Without the wrappers of torch.compile, PEFT, parallel training and averaged weights."""
    if hasattr(model, "get_base_model"):
        return _unwrapped(model.get_base_model())
    inside = next((getattr(model, name, None) for name in ("_orig_mod", "module") if hasattr(model, name)), None)
    return _unwrapped(inside) if isinstance(inside, nn.Module) else model


def _tower_inside(model: nn.Module) -> Tower | None:
    """Of ``nn.Sequential(normalise, transformer, …)`` or a Lightning module around one transformer.

    The normalisation becomes preprocessing. A linear layer behind a transformer without a classifier is the classifier.
    """
    if not isinstance(model, nn.Sequential) and "LightningModule" not in {
        base.__name__ for base in type(model).__mro__
    }:
        return None
    parts = list(model.children())
    found = [(part, tower) for part in parts if (tower := _tower(_unwrapped(part))) is not None]
    if len(found) != 1:
        return None
    (transformer, tower), normalizers = found[0], [part for part in parts if _normalization(part) is not None]
    if normalizers:
        mean, std = _normalization(normalizers[0])  # type: ignore[misc]
        tower = replace(tower, preprocessing=replace(tower.preprocessing, mean=mean, std=std))
    others = [part for part in parts if part is not transformer and part not in normalizers]
    unknown = [part for part in others if next(part.parameters(), None) is not None]
    classifiers = [layer for part in unknown for layer in last_linear(part)]
    if tower.classifiers or len(classifiers) != 1:
        return tower

    def run(images: Tensor) -> Tensor:
        with ExitStack() as stack:
            for part in normalizers:
                stack.enter_context(replaced_forward(part, lambda pixels: pixels))
            output: Tensor = model(images)
        return output

    return replace(tower, model=model, run=run, classifiers=classifiers)


def _normalization(part: nn.Module) -> tuple[Channels, Channels] | None:
    """Mean and deviation of the three colours, if that is what a module without weights has."""
    pair = [getattr(part, name, None) for name in ("mean", "std")]
    if any(value is None or callable(value) for value in pair) or list(part.children()):
        return None
    mean, std = (tuple(torch.as_tensor(value, dtype=torch.float64).flatten().tolist()) for value in pair)
    scale = 255 if max(mean, default=0) > 1 else 1  # pixels up to 255
    scaled = (tuple(value / scale for value in values) for values in (mean, std))
    return tuple(scaled) if len(mean) == len(std) == 3 else None  # type: ignore[return-value]


def _is_convolutional(model: nn.Module) -> bool:
    kinds = [type(part).__name__.lower() for part in model.modules()]
    return sum("conv" in kind for kind in kinds) > 2 and not any("attention" in kind for kind in kinds)
