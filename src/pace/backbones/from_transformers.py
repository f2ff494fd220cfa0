"""transformers: ViT, DeiT, DINOv2 (with registers), CLIP, SigLIP, BEiT, Swin 1 and 2, with and without a classifier.

Its models differ in names more than in shape, so they are read by shape: whatever has patch embeddings and a list of
blocks behind them.
"""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pace.backbones.attention import Windows
from pace.backbones.preprocessing import NORMALIZATIONS, Preprocessing
from pace.backbones.tower import Sizes, Tower, last_linear

# Normalisation and crop of the published weights, used when the model's own preprocessor file is not at hand.
_FAMILIES = {
    **dict.fromkeys(("vit", "beit", "siglip"), ("half", None)),
    "swin": ("imagenet", None),
    "clip": ("clip", 1.0),
}


def describe(model: Any) -> Tower | None:
    core = next((module for module in model.modules() if _patch_embedding(module) is not None), None)
    layers: Any = None if core is None else _layers(core)
    if core is None or layers is None or not hasattr(core.config, "image_size"):
        return None
    config, embeddings = core.config, core.embeddings
    swin = hasattr(layers[0], "blocks")
    blocks = [(block, stage) for stage, layer in enumerate(layers) for block in (layer.blocks if swin else [layer])]
    asked_to = "interpolate_pos_encoding" in inspect.signature(core.forward).parameters
    interpolates = asked_to or hasattr(embeddings, "interpolate_pos_encoding")  # DINOv2 does it unasked
    own_size = _pair(config.image_size)
    found = _preprocessor_file(getattr(model.config, "_name_or_path", ""))
    found_size = found.get("crop_size") or found.get("size")
    usual_size = _pair(found_size) if found_size and interpolates else own_size
    has_cls = hasattr(embeddings, "cls_token") or hasattr(embeddings, "class_embedding")
    prefix = has_cls + hasattr(embeddings, "distillation_token") + getattr(config, "num_register_tokens", 0)
    names = ("classifier", "cls_classifier", "distillation_classifier")
    heads = [head for name in names if isinstance(head := getattr(model, name, None), nn.Module)]
    classifiers = [layer for head in heads for layer in last_linear(head)]
    head = getattr(core, "head", None)  # SigLIP's pooling, which its classifiers do without
    # CLIP's norm comes after pooling; where a norm is over all tokens, it is called layernorm or belongs to SigLIP.
    norm = getattr(core, "layernorm", None) or (core.post_layernorm if config.model_type.startswith("siglip") else None)

    def run(images: Tensor) -> Any:
        options = {"interpolate_pos_encoding": True} if asked_to and tuple(images.shape[2:]) != own_size else {}
        output = (model if classifiers else core)(images, return_dict=True, **options)
        if classifiers:
            return output.logits
        tokens, pooled = output.last_hidden_state, output.pooler_output
        if pooled is None or hasattr(getattr(core, "pooler", None), "dense"):  # ViT's dense layer is no classifier's
            pooled = tokens[:, 0] if has_cls else tokens.mean(1)
        return model.visual_projection(pooled) if hasattr(model, "visual_projection") else pooled

    def windows(block: Any, _: tuple[int, int]) -> Windows:
        return Windows(_pair(block.window_size), _pair(block.shift_size), pad_first=True)

    return Tower(
        model,
        blocks=[block for block, _ in blocks],
        dims=[config.embed_dim * 2**stage if swin else config.hidden_size for _, stage in blocks],
        sizes=Sizes(usual_size, _pair(config.patch_size), "ceil" if swin else "floor" if interpolates else "fixed"),
        prefix=prefix,
        has_cls=has_cls,
        run=run,
        norm=norm,
        classifiers=classifiers,
        pool=head if not classifiers and hasattr(head, "probe") else None,
        merges=[stage for _, stage in blocks] if swin else (),
        windows=windows if swin else None,
        preprocessing=_preprocessing(config.model_type, found),
    )


def _patch_embedding(module: nn.Module) -> Any:
    embeddings = getattr(module, "embeddings", None)
    return getattr(embeddings, "patch_embeddings", None) or getattr(embeddings, "patch_embedding", None)


def _layers(core: Any) -> nn.ModuleList | None:
    owners = (core, getattr(core, "encoder", None))
    places = [getattr(owner, name, None) for owner in owners for name in ("layers", "layer")]
    return next((place for place in places if isinstance(place, nn.ModuleList) and len(place)), None)


def _pair(size: Any) -> tuple[int, int]:
    """Height and width of a size as configurations have it: a number, a pair, or named sides."""
    if isinstance(size, dict):
        edge = size.get("shortest_edge")
        return (edge, edge) if edge else (size["height"], size["width"])
    return (int(size[0]), int(size[1])) if isinstance(size, (tuple, list)) else (int(size), int(size))


def _preprocessor_file(name: str) -> dict[str, Any]:
    """The preprocessor's settings, from the folder or the download cache that the weights came from, if any."""
    path: Any = Path(name) / "preprocessor_config.json"
    if name and not Path(name).is_dir():
        path = import_module("huggingface_hub").try_to_load_from_cache(name, path.name)  # never the network
    if not name or not isinstance(path, (str, Path)) or not Path(path).is_file():
        return {}
    found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return found if found.get("do_center_crop") else {**found, "crop_size": None}


def _preprocessing(model_type: str, found: dict[str, Any]) -> Preprocessing:
    family, ratio = _FAMILIES.get(model_type.partition("_")[0], ("imagenet", 0.875))
    mean, std = NORMALIZATIONS[family]
    resize, crop = found.get("size"), found.get("crop_size")
    if crop and resize:
        ratio = min(1.0, _pair(crop)[0] / _pair(resize)[0])
    elif resize:
        ratio = 1.0 if isinstance(resize, dict) and "shortest_edge" in resize else None
    return Preprocessing(
        mean=tuple(found.get("image_mean", mean)),
        std=tuple(found.get("image_std", std)),
        interpolation="bilinear" if found.get("resample") == 2 else "bicubic",  # PIL's numbers
        crop_ratio=ratio,
    )
