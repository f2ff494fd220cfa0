"""Load a model by name, or from a file or folder."""

from __future__ import annotations

import difflib
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from pace.backbones.from_timm import normalize_with
from pace.backbones.preprocessing import NORMALIZATIONS


def load(
    name: str | os.PathLike[str], *, model: str | None = None, normalize: str | None = None, **options: Any
) -> nn.Module:
    """A pretrained vision transformer, in eval mode.

    Parameters
    ----------
    name
        - a timm model, ``"vit_small_patch14_reg4_dinov2"``, optionally with ``timm:`` before it;
        - a Hugging Face id, ``"facebook/dinov2-small"``;
        - a folder in which transformers or timm saved a model;
        - a ``.safetensors`` file of weights for the timm architecture `model`; weights for another image size or patch
          size are resampled.
        Names are downloaded by the library they belong to, unless it has them already; files need no network.
    normalize
        How pixels are normalised for a timm model: "imagenet", "half" (from -1 to 1) or "clip". By default as the file
        of `pace.backbones.finetune` says, or as timm says for its own weights of that name, which may be wrong for a
        file of other weights.
    options
        For the library's own constructor: ``img_size=224``, ``num_classes=102``, …
    """
    text, path = os.fspath(name), Path(name).expanduser()
    if path.is_file():
        loaded = _weights(path, model, options)
    elif path.is_dir():
        loaded = _folder(path, options)
    elif path.suffix == ".safetensors" or path.is_absolute() or text.startswith(".") or text.count("/") > 1:
        raise FileNotFoundError(f"{text}: no such file of weights or folder of a model")
    elif text.startswith("timm/"):
        loaded = _timm(f"hf-hub:{text}", {"pretrained": True} | options)
    elif "/" in text:
        loaded = _transformers(text, options)
    else:
        loaded = _timm(_known(text), {"pretrained": True} | options)
    if normalize is not None:
        if normalize not in NORMALIZATIONS:
            raise ValueError(f"normalize: expected {', '.join(NORMALIZATIONS)}; found {normalize}")
        if not hasattr(loaded, "pretrained_cfg"):
            raise ValueError(f"normalize: only for timm models; {text} says itself how images are normalised")
        normalize_with(loaded, *NORMALIZATIONS[normalize])
    return loaded.eval()


def _weights(path: Path, model: str | None, options: dict[str, Any]) -> nn.Module:
    if path.suffix != ".safetensors":
        raise ValueError(f"{path}: expected a .safetensors file; other formats can run code when they are read")
    if model is None:
        raise ValueError(f"{path}: which architecture is this? Pass model=, a timm name such as 'vit_base_patch16_224'")
    with safe_open(path, "pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118, not a dict
        normalization = _normalization(file.metadata() or {})
    classes = next((shapes[key][0] for key in ("head.weight", "head.fc.weight") if key in shapes), 0)
    overlay = {"file": str(path), "custom_load": False, "num_classes": classes, **normalization}
    try:
        # timm's own loading translates names and resamples position embeddings to the size asked for.
        return _timm(
            _known(model),
            {"num_classes": classes} | options | {"pretrained": True, "pretrained_cfg_overlay": overlay},
        )
    except RuntimeError as error:
        raise ValueError(f"{path}: not the weights of {model}: {' '.join(str(error).split())[:300]}") from error


def _normalization(metadata: dict[str, str]) -> dict[str, tuple[float, ...]]:
    """Mean and deviation as `finetune` writes them into a file; other files may have anything there."""
    try:
        found = json.loads(metadata["pace"])["preprocessing"]
        return {name: tuple(map(float, found[name])) for name in ("mean", "std")}
    except (KeyError, TypeError, ValueError):
        return {}


def _folder(path: Path, options: dict[str, Any]) -> nn.Module:
    config = path / "config.json"
    if not config.is_file():
        raise FileNotFoundError(f"{config}: expected in the folder of a model saved by transformers or timm")
    if "architecture" in json.loads(config.read_text(encoding="utf-8")):
        return _timm(f"local-dir:{path}", {"pretrained": True} | options)
    return _transformers(str(path), {"local_files_only": True} | options)


def _timm(name: str, options: dict[str, Any]) -> nn.Module:
    model: nn.Module = import_module("timm").create_model(name, **options)
    return model


def _known(name: str) -> str:
    name, timm = name.removeprefix("timm:"), import_module("timm")
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), 3)
        raise ValueError(f"{name}: timm has no such model" + (f"; did you mean {', '.join(near)}?" if near else ""))
    return name


def _transformers(name: str, options: dict[str, Any]) -> nn.Module:
    """Of the class that the configuration names, so that its classifier is loaded too."""
    transformers = import_module("transformers")
    local = {"local_files_only": True} if options.get("local_files_only") else {}
    architectures = transformers.AutoConfig.from_pretrained(name, **local).architectures or ["AutoModel"]
    loader = getattr(transformers, architectures[0], transformers.AutoModel)
    model: nn.Module = loader.from_pretrained(name, **options)
    return model
