"""Load a model by name or from a file, and put it at the layer to explain."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import nn

from pace.backbones import birds_vit, color_vit
from pace.backbones.backbone import Backbone, Head
from pace.backbones.libraries import normalize_with
from pace.backbones.preprocessing import NORMALIZATIONS

Layer = int | Literal["auto"]
COLOR = "color"
_SHIPPED = {COLOR: color_vit.load, "birds": birds_vit.load}  # the models that come with the package


def load(
    name: str | os.PathLike[str], *, model: str | None = None, normalize: str | None = None, **options: Any
) -> nn.Module:
    """A pretrained vision transformer, in eval mode.

    Parameters
    ----------
    name
        A timm model, ``"vit_small_patch14_reg4_dinov2"``, or a Hugging Face id, ``"facebook/dinov2-small"``, which
        that library downloads unless it has it already; a folder in which transformers or timm saved a model; or a
        ``.safetensors`` file of weights for the timm architecture `model`, resampled to another image or patch size.
    normalize
        How pixels are normalised for a timm model: "imagenet", "half" (from -1 to 1) or "clip". By default as a file of
        `finetune` says, or as timm says for its own weights of that name, which may be wrong for other weights.
    options
        For the library's own constructor: ``img_size=224``, ``num_classes=102``, …
    """
    text, path = os.fspath(name), Path(name).expanduser()
    if path.is_file():
        loaded: nn.Module = _weights(path, model, options)
    elif path.is_dir():
        loaded = _folder(path, options)
    elif path.suffix == ".safetensors" or path.is_absolute() or text.startswith(".") or text.count("/") > 1:
        raise FileNotFoundError(f"{text}: no such file of weights or folder of a model")
    elif text.startswith("timm/"):
        loaded = _timm(f"hf-hub:{text}", options)
    elif "/" in text:
        loaded = _transformers(text, options)
    else:
        loaded = _timm(_known(text), options)
    if normalize is not None:
        if normalize not in NORMALIZATIONS:
            raise ValueError(f"normalize: expected {', '.join(NORMALIZATIONS)}; found {normalize}")
        if not hasattr(loaded, "pretrained_cfg"):
            raise ValueError(f"normalize: only for timm models; {text} says itself how images are normalised")
        normalize_with(loaded, *NORMALIZATIONS[normalize])
    return loaded.eval()


def _weights(path: Path, model: str | None, options: dict[str, Any]) -> Any:
    if path.suffix != ".safetensors":
        raise ValueError(f"{path}: expected a .safetensors file; other formats can run code when they are read")
    if model is None:
        raise ValueError(f"{path}: which architecture is this? Pass model=, a timm name such as 'vit_base_patch16_224'")
    with safe_open(path, "pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118, not a dict
        finetuned = json.loads((file.metadata() or {}).get("pace", "{}"))
    classes = next((shapes[key][0] for key in ("head.weight", "head.fc.weight") if key in shapes), 0)
    overlay = {"file": str(path), "custom_load": False, "num_classes": classes}
    overlay |= {key: tuple(finetuned["preprocessing"][key]) for key in ("mean", "std") if finetuned}
    try:
        # timm's own loading translates names and resamples position embeddings to the size asked for.
        return _timm(_known(model), {"num_classes": classes} | options | {"pretrained_cfg_overlay": overlay})
    except RuntimeError as error:
        raise ValueError(f"{path}: not the weights of {model}: {' '.join(str(error).split())[:300]}") from error


def _folder(path: Path, options: dict[str, Any]) -> Any:
    config = path / "config.json"
    if not config.is_file():
        raise FileNotFoundError(f"{config}: expected in the folder of a model saved by transformers or timm")
    if "architecture" in json.loads(config.read_text(encoding="utf-8")):
        return _timm(f"local-dir:{path}", options)
    return _transformers(str(path), {"local_files_only": True} | options)


def _timm(name: str, options: dict[str, Any]) -> Any:
    return import_module("timm").create_model(name, **{"pretrained": True} | options)


def _known(name: str) -> str:
    timm = import_module("timm")
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), 3)
        raise ValueError(f"{name}: timm has no such model" + (f"; did you mean {', '.join(near)}?" if near else ""))
    return name


def _transformers(name: str, options: dict[str, Any]) -> Any:
    """Of the class that the configuration names, so that its classifier is loaded too."""
    transformers = import_module("transformers")
    local = options.get("local_files_only", False)
    architectures = transformers.AutoConfig.from_pretrained(name, local_files_only=local).architectures
    loader = getattr(transformers, (architectures or ["AutoModel"])[0], transformers.AutoModel)
    return loader.from_pretrained(name, **options)


@dataclass(frozen=True)
class ModelChoice:
    """A model and its layer, as a user of the command line or the benchmark names them.

    name, architecture, image_size, normalize
        As `load` takes them (`architecture` is its `model`); "color" and "birds" are the models that come with the package.
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
    """The model, and its class names if they are known. Without `pretrained`, a timm name gives random weights."""
    if choice.name in _SHIPPED:
        for option in ("architecture", "image_size", "normalize"):
            if getattr(choice, option) is not None:
                raise ValueError(f"{option}: the model {choice.name} has its own; leave it out")
        shipped = _SHIPPED[str(choice.name)]()
        return shipped.model, shipped.class_names
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
        assert choose_layer is not None
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
