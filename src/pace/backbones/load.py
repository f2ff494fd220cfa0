"""A model from a name or a file."""

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
        - a timm model, ``"vit_small_patch14_reg4_dinov2"``, or with ``timm:`` before it;
        - a Hugging Face id, ``"facebook/dinov2-small"``;
        - a folder that transformers or timm saved a model in;
        - a ``.safetensors`` file of weights for the timm architecture `model`. Weights for another image size or
          patch size are resampled.
        Names are downloaded by the library they belong to, unless it has them already; files are not.
    normalize
        The mean and deviation that a timm model's images are brought to: "imagenet", "half" (from -1 to 1) or "clip". By
        default what the file of `pace.backbones.finetune` says, or timm says of its own weights of that name, which need
        not be true of a file of other weights.
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
        loaded = _timm(_known(text.removeprefix("timm:")), {"pretrained": True} | options)
    if normalize is not None:
        _normalize(loaded, normalize, text)
    return loaded.eval()


def _normalize(model: Any, how: str, name: str) -> None:
    if how not in NORMALIZATIONS:
        raise ValueError(f"normalize: expected {', '.join(NORMALIZATIONS)}; found {how}")
    if not hasattr(model, "pretrained_cfg"):
        raise ValueError(f"normalize: {name} is no timm model; its own configuration says what it expects")
    normalize_with(model, *NORMALIZATIONS[how])


def _weights(path: Path, model: str | None, options: dict[str, Any]) -> nn.Module:
    if path.suffix != ".safetensors":
        raise ValueError(f"{path}: expected a .safetensors file; other formats can run code when they are read")
    if model is None:
        raise ValueError(f"{path}: which architecture is this? Pass model=, a timm name such as 'vit_base_patch16_224'")
    with safe_open(path, "pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118, not a dict
        trained_with = _trained_with(file.metadata() or {})
    classes = next((shapes[key][0] for key in ("head.weight", "head.fc.weight") if key in shapes), 0)
    overlay = {"file": str(path), "custom_load": False, "num_classes": classes}
    overlay |= trained_with
    try:
        # timm's own loading translates names and resamples position embeddings to the size asked for.
        return _timm(
            _known(model.removeprefix("timm:")),
            {"num_classes": classes} | options | {"pretrained": True, "pretrained_cfg_overlay": overlay},
        )
    except RuntimeError as error:
        raise ValueError(f"{path}: not the weights of {model}: {' '.join(str(error).split())[:300]}") from error


def _trained_with(metadata: dict[str, str]) -> dict[str, tuple[float, ...]]:
    """Mean and deviation that `finetune` wrote into a file; other files may say anything there, or nothing."""
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
    timm = import_module("timm")
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), 3)
        raise ValueError(f"{name}: timm knows no such model" + (f"; near are {', '.join(near)}" if near else ""))
    return name


def _transformers(name: str, options: dict[str, Any]) -> nn.Module:
    """The class that the configuration names, so that a classifier comes along if there is one."""
    transformers = import_module("transformers")
    local = {"local_files_only": True} if options.get("local_files_only") else {}
    architectures = transformers.AutoConfig.from_pretrained(name, **local).architectures or ["AutoModel"]
    loader = getattr(transformers, architectures[0], transformers.AutoModel)
    model: nn.Module = loader.from_pretrained(name, **options)
    return model
