"""The weights of one image model in a file, without what training scripts put around them."""

from __future__ import annotations

import json
import pickle
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

FORMATS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")

Weights = dict[str, Tensor]

# Where training scripts put the weights of a checkpoint; running averages come first, since they are what is published.
_PLACES = ("state_dict_ema", "model_ema", "ema", "teacher", "state_dict", "model", "module", "student")

# The first layer of timm and all that follows it (DINO, DeiT, MAE), of torchvision, and CLIP's CLS token. What precedes
# such a name is a wrapper's prefix, like "module.", "model." or "backbone.".
TIMM, TORCHVISION, CLIP = "patch_embed.proj.weight", "conv_proj.weight", "visual.class_embedding"
_TRANSFORMERS = ("embeddings.patch_embeddings.projection.weight", "embeddings.patch_embedding.weight")


def read_weights(path: Path) -> tuple[Weights, str, dict[str, Any]]:
    """The weights without prefixes, the name they had in the checkpoint, and what `finetune` noted with them."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            notes = json.loads((file.metadata() or {}).get("pace", "{}"))
            return _image_model({name: file.get_tensor(name) for name in file.keys()}, path), "", notes  # noqa: SIM118
    if path.suffix not in FORMATS:
        raise ValueError(f"{path}: expected weights in a file that ends in {', '.join(FORMATS)}")
    content, place = _unpickled(path), ""
    while isinstance(content, Mapping):
        inner = next((name for name in _PLACES if isinstance(content.get(name), Mapping)), None)
        if inner is None:
            break
        content, place = content[inner], inner
    if isinstance(content, Mapping):
        content = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    if not content or not isinstance(content, dict):
        raise ValueError(f"{path}: no weights found in it; expected what torch.save(model.state_dict(), …) writes")
    return _image_model(content, path), place, {}


def _unpickled(path: Path) -> Any:
    how = "where it was made, torch.save(model.state_dict(), 'weights.pt') saves the weights alone"
    damaged = f"{path}: not a file of PyTorch, or a damaged one"
    try:
        with torch.serialization.safe_globals([Namespace]):  # the options of many a training script
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        try:
            found = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        except Exception:  # no archive at all
            raise ValueError(damaged) from error
        own = ", ".join(sorted(found, key=lambda name: name[:6] == "torch.")[:3])
        raise ValueError(
            f"{path}: holds more than weights ({own}), which can run code when it is read; {how}"
        ) from error
    except (RuntimeError, EOFError, ValueError) as error:
        if "TorchScript" in str(error):
            raise ValueError(f"{path}: a TorchScript archive can run code when it is read; {how}") from error
        raise ValueError(damaged) from error


def _image_model(weights: Weights, path: Path) -> Weights:
    """The weights of the vision transformer among them, without the prefixes of wrappers."""
    weights = {name.replace("_orig_mod.", ""): value for name, value in weights.items()}
    if any(".lora_" in name for name in weights):
        raise ValueError(f"{path}: has LoRA weights; save the model that model.merge_and_unload() returns")
    found = (re.fullmatch(rf"(|.*\.)({CLIP}|{TIMM}|{TORCHVISION})", name) for name in weights)
    prefixes = [match[1] for match in found if match]
    if not prefixes and any(name.endswith(_TRANSFORMERS) for name in weights):
        raise ValueError(f"{path}: weights of a transformers model; give the folder that has its config.json too")
    averaged = [prefix for prefix in prefixes if re.search(r"\b(ema|teacher)", prefix)]
    prefix = min(averaged or prefixes, key=len, default="")
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
