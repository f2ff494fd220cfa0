"""timm: VisionTransformer and its relatives (DeiT, DINOv2, CLIP and SigLIP towers, EVA, BEiT), Swin 1 and 2."""

from __future__ import annotations

from typing import Any

from torch import nn

from pace.backbones.attention import Windows
from pace.backbones.preprocessing import Channels, Preprocessing
from pace.backbones.tower import Sizes, Tower, classifier_of


def describe(model: Any) -> Tower | None:
    if all(hasattr(model, name) for name in ("patch_embed", "blocks", "norm", "num_prefix_tokens", "embed_dim")):
        return _vit(model)
    if any(base.__name__ in ("SwinTransformer", "SwinTransformerV2") for base in type(model).__mro__):
        return _swin(model)
    return None


def _vit(model: Any) -> Tower:
    pool = getattr(model, "attn_pool", None)
    return Tower(
        model,
        blocks=list(model.blocks),
        dims=[model.embed_dim] * len(model.blocks),
        sizes=_sizes(model),
        prefix=model.num_prefix_tokens,
        has_cls=getattr(model, "cls_token", None) is not None,
        norm=None if isinstance(model.norm, nn.Identity) else model.norm,
        classifiers=_classifiers(model),
        pool=pool if hasattr(pool, "latent") else None,
        preprocessing=_preprocessing(model),
    )


def _swin(model: Any) -> Tower:
    blocks = [(block, stage) for stage, layer in enumerate(model.layers) for block in layer.blocks]
    return Tower(
        model,
        blocks=[block for block, _ in blocks],
        dims=[block.dim for block, _ in blocks],
        sizes=_sizes(model),
        norm=model.norm,
        classifiers=_classifiers(model),
        merges=[stage for _, stage in blocks],
        windows=lambda block, _: Windows(block.window_size, block.shift_size, pad_first=False),
        preprocessing=_preprocessing(model),
    )


def _sizes(model: Any) -> Sizes:
    embed = model.patch_embed
    rule: Any = "fixed" if embed.strict_img_size else "ceil" if getattr(embed, "dynamic_img_pad", False) else "multiple"
    size = embed.img_size or _pretrained(model).get("input_size", (3, 224, 224))[1:]
    return Sizes(tuple(size), tuple(embed.feat_ratio(as_scalar=False)), rule)


def _classifiers(model: Any) -> list[nn.Module]:
    heads = model.get_classifier()  # DeiT has two
    return [layer for head in (heads if isinstance(heads, tuple) else (heads,)) for layer in classifier_of(head)]


def _pretrained(model: Any) -> dict[str, Any]:
    """The configuration of the pretrained weights, where the model was made with one."""
    return getattr(model, "pretrained_cfg", None) or {}


def normalize_with(model: Any, mean: Channels, std: Channels) -> None:
    """What the model's weights were trained with, where timm cannot know."""
    model.pretrained_cfg = {**_pretrained(model), "mean": tuple(mean), "std": tuple(std)}


def _preprocessing(model: Any) -> Preprocessing:
    found, plain = _pretrained(model), Preprocessing()
    return Preprocessing(
        mean=tuple(found.get("mean", plain.mean)),
        std=tuple(found.get("std", plain.std)),
        interpolation="bilinear" if found.get("interpolation") == "bilinear" else "bicubic",
        crop_ratio=None if found.get("crop_mode") == "squash" else found.get("crop_pct", plain.crop_ratio),
    )
