"""Load a model by name or from a file, and put it at the layer to explain."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from pace.backbones import birds_vit, color_vit
from pace.backbones.backbone import Backbone, Head
from pace.backbones.finetuning import load_finetuned
from pace.backbones.from_weights import is_torchvision, known, load_weights, torchvision_vit
from pace.backbones.libraries import may_be_told, normalize_with
from pace.backbones.preprocessing import NORMALIZATIONS
from pace.backbones.weight_files import FORMATS
from pace.files import expect, read_json, reading

Layer = int | tuple[int, ...] | Literal["auto"]
COLOR = "color"
CHECKPOINT = "model.safetensors"  # of a run of `pace finetune`
_SHIPPED = {COLOR: color_vit.load, "birds": birds_vit.load}  # the models that come with the package


def load(
    name: str | os.PathLike[str], *, model: str | None = None, normalize: str | None = None, **options: Any
) -> nn.Module:
    """A pretrained vision transformer, in eval mode.

    Parameters
    ----------
    name
        A timm or torchvision model, ``"vit_small_patch14_reg4_dinov2"`` or ``"vit_b_16"``, or a Hugging Face id,
        ``"facebook/dinov2-small"``, which that library downloads unless it has it already; a folder in which
        transformers or timm saved a model; or a file of weights (.safetensors, .pt, .pth, .bin, .ckpt).
    model
        What the weights in a file are of, as timm, torchvision or open_clip call it. By default recognised: timm's ViT,
        DINO, DINOv2, DeiT, MAE, torchvision's ViT, and CLIP.
    normalize
        How pixels are normalised for a timm or torchvision model: "imagenet", "half" (from -1 to 1) or "clip". By default
        as a file of `finetune` says, or as usual for weights of that name, which may be wrong for others.
    options
        For the library's own constructor: ``img_size=224``, ``num_classes=102``, …
    """
    text, path = os.fspath(name), _path(name)
    if path.is_file():
        loaded: nn.Module = load_weights(path, model, options)
    elif path.is_dir():
        loaded = _folder(path, options)
    elif path.suffix in FORMATS or path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise FileNotFoundError(f"{text}: no such file of weights or folder of a model")
    elif text.startswith("timm/"):
        loaded = _timm(f"hf-hub:{text}", options)
    elif "/" in text:
        loaded = _transformers(text, options)
    elif is_torchvision(text):
        loaded = _torchvision(text, options)
    else:
        loaded = _timm(known(text), options)
    if normalize is not None:
        if normalize not in NORMALIZATIONS:
            raise ValueError(f"normalize: expected {', '.join(NORMALIZATIONS)}; found {normalize}")
        if not may_be_told(loaded):
            raise ValueError(f"normalize: only for timm and torchvision; {text} says itself how images are normalised")
        normalize_with(loaded, *NORMALIZATIONS[normalize])
    return loaded.eval()


def _path(name: str | os.PathLike[str]) -> Path:
    """Where a file or folder of that name would be."""
    text = os.path.expanduser(name)  # Path.expanduser raises for a user there is not
    if not text or len(os.path.basename(text)) > 255:
        raise ValueError(f"model: expected a name, a file or a folder; found {text[:40]!r}")
    return Path(text)


def _folder(path: Path, options: dict[str, Any]) -> Any:
    config = path / "config.json"
    if not config.is_file():
        raise FileNotFoundError(f"{config}: expected in the folder of a model saved by transformers or timm")
    if "architecture" in read_json(config, dict, "save the model again"):
        return _timm(f"local-dir:{path}", options)
    return _transformers(str(path), {"local_files_only": True} | options)


def _timm(name: str, options: dict[str, Any]) -> Any:
    return import_module("timm").create_model(name, **{"pretrained": True} | options)


def _torchvision(name: str, options: dict[str, Any]) -> Any:
    models, size, swin = import_module("torchvision").models, options.get("img_size"), name.startswith("swin")
    if swin and size is not None:
        raise ValueError(f"img_size: {name} takes images of any size; leave it out")
    published, pretrained = models.get_model_weights(name).DEFAULT, options.get("pretrained", True)
    how = published.transforms()
    if pretrained and not swin:
        model = torchvision_vit(published.get_state_dict(check_hash=True), size)
    else:
        more = {} if swin else {"image_size": size or how.crop_size[0]}
        model = models.get_model(name, weights=published if pretrained else None, **more)
    model.pretrained_cfg = {  # as timm keeps it
        "mean": tuple(how.mean),
        "std": tuple(how.std),
        "interpolation": how.interpolation.value,
        "crop_pct": how.crop_size[0] / how.resize_size[0],
        "label_names": tuple(published.meta["categories"]),
    }
    return model


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
        The block to explain, or two, as `Backbone` takes them; "auto" leaves it to `choose_layer`. None is "auto", or the
        suitable block of "color".
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
    path = _path(choice.name)
    folder = path.parent if path.name == CHECKPOINT else path
    if (folder / "run.json").is_file():
        return _finetuned(folder, choice)
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


def _finetuned(folder: Path, choice: ModelChoice) -> tuple[nn.Module, tuple[str, ...]]:
    """The model of a run of `pace finetune`."""
    file, remedy = folder / "run.json", "fine-tune again"
    record = read_json(file, {"command": str}, remedy)
    if (command := record.get("command")) != "finetune":
        raise ValueError(f"{choice.name} is a run of `pace {command}`; expected one of `pace finetune`")
    if choice.normalize is not None:
        raise ValueError(f"normalize: {choice.name} was fine-tuned with its own normalisation; leave it out")
    with reading(file, remedy):
        expect(record, {"model": {"name": str, "architecture": str | None, "image_size": int | None}})
    first = ModelChoice(*(record["model"][name] for name in ("name", "architecture", "image_size")))
    if Path(first.name).suffix not in FORMATS:
        model, _ = open_model(first, pretrained=False)
    elif first.architecture is None:  # the first weights may be gone by now
        model = load(folder / CHECKPOINT)
    else:
        model, _ = open_model(replace(first, name=first.architecture, architecture=None), pretrained=False)
    found = load_finetuned(model, folder / CHECKPOINT)
    return found.model, found.class_names


def usual_device() -> torch.device:
    """A GPU, of Apple too, if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")


def open_backbone(
    model: nn.Module,
    choice: ModelChoice,
    device: torch.device,
    choose_layer: Callable[[nn.Module], int | tuple[int, int]] | None = None,
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
    if by_name and "label_names" in (noted := getattr(model, "pretrained_cfg", None) or {}):
        return tuple(noted["label_names"])
    if by_name and noted:
        from timm.data.imagenet_info import ImageNetInfo, infer_imagenet_subset

        if subset := infer_imagenet_subset(model):
            return tuple(ImageNetInfo(subset).label_descriptions())
    return None
