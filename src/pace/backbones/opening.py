"""Open a model the way a user names it: weights, class names, the layer to explain, and how images are prepared.

The command line and the benchmark both open their models here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from pace.backbones import color_vit
from pace.backbones.backbone import Backbone, Head
from pace.backbones.loading import load

Layer = int | Literal["auto"]
COLOR = "color"  # the name of the model that comes with the package


@dataclass(frozen=True)
class ModelChoice:
    """A model and its layer.

    name, architecture, image_size, normalize
        As `load` takes them (`architecture` is its `model`); "color" is the model that comes with the package.
    layer
        The block to explain; "auto" leaves it to `choose_layer`. None is "auto", or the suitable block of "color".
    attention_layer, count_cls
        As `Backbone` takes them. With an automatic layer, the last block's attention is used.
    """

    name: str | os.PathLike[str]
    architecture: str | None = None
    image_size: int | None = None
    normalize: str | None = None
    layer: Layer | None = None
    attention_layer: int | None = None
    count_cls: bool = False


def open_model(choice: ModelChoice, pretrained: bool = True) -> tuple[nn.Module, tuple[str, ...] | None]:
    """The model, and the names of its classes if they are known.

    Without `pretrained`, a timm model by name has random weights, for others to be loaded into it.
    """
    if choice.name == COLOR:
        for option in ("architecture", "image_size", "normalize"):
            if getattr(choice, option) is not None:
                raise ValueError(f"{option}: the model color has its own; leave it out")
        return color_vit.load_model(), color_vit.class_names()
    path = Path(choice.name).expanduser()
    if choice.architecture is None and path.is_file() and path.suffix == ".safetensors":
        raise ValueError(f"architecture: needed for {choice.name}, as timm calls it, e.g. vit_base_patch16_224")
    if choice.architecture is not None and not path.is_file():
        raise FileNotFoundError(f"architecture: only for a file of weights, and there is no file {choice.name}")
    by_name = not path.exists() and "/" not in str(choice.name)
    options: dict[str, Any] = {} if choice.image_size is None else {"img_size": choice.image_size}
    if by_name and not pretrained:
        options["pretrained"] = False
    try:
        model = load(choice.name, model=choice.architecture, normalize=choice.normalize, **options)
    except Exception as error:
        if type(error) in (ValueError, FileNotFoundError, ModuleNotFoundError):
            raise  # these already say what is wrong with the name or the file
        # Whatever the libraries raise: no network, no such repository, a damaged file.
        raise ValueError(f"model: {choice.name} cannot be loaded: {' '.join(str(error).split())}") from error
    return model, _class_names(model, by_name)


def open_backbone(
    model: nn.Module,
    choice: ModelChoice,
    device: torch.device,
    choose_layer: Callable[[nn.Module], int] | None = None,
    head: Head | None = None,
) -> Backbone:
    """`model` on the device, at the layer of `choice`. `choose_layer` is asked for an automatic one."""
    model = model.float().to(device).eval().requires_grad_(False)
    layer, attention_layer = choice.layer, choice.attention_layer
    if layer is None:
        layer = color_vit.LAYER if choice.name == COLOR else "auto"
    if layer == "auto":
        if choose_layer is None:
            raise ValueError("layer: expected a number; there are no images to choose one by")
        layer, attention_layer = choose_layer(model), -1
    return Backbone(model, layer, head, choice.count_cls, attention_layer)


def _class_names(model: Any, by_name: bool) -> tuple[str, ...] | None:
    """Those of the model's configuration, or ImageNet's for timm's own weights."""
    labels = getattr(getattr(model, "config", None), "id2label", None)
    if labels and not all(str(name).startswith("LABEL_") for name in labels.values()):
        return tuple(str(labels[number]) for number in sorted(labels))
    if by_name and hasattr(model, "pretrained_cfg"):
        from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset

        if subset := infer_imagenet_subset(model):
            return tuple(ImageNetInfo(subset).label_descriptions())
    return None
