"""open_clip: the visual towers of its models, its own VisionTransformer and timm's. Their output, the image embedding
that is compared with texts, is the pooled feature."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from pace.backbones import from_timm
from pace.backbones.preprocessing import NORMALIZATIONS, Preprocessing
from pace.backbones.tower import Sizes, Tower


def describe(model: Any) -> Tower | None:
    visual = getattr(model, "visual", model)
    if hasattr(visual, "trunk"):
        tower = from_timm.describe(visual.trunk)
        return tower and replace(tower, model=visual, classifiers=(), preprocessing=_preprocessing(visual))
    if hasattr(visual, "transformer") and hasattr(visual, "conv1"):
        return _vit(visual)
    return None


def _vit(visual: Any) -> Tower:
    def run(images: Tensor) -> Tensor:
        output: Tensor | tuple[Tensor, Tensor] = visual(images)
        return output[0] if isinstance(output, tuple) else output

    blocks = list(visual.transformer.resblocks)
    norm_on_tokens = visual.attn_pool is None and not visual.final_ln_after_pool
    return Tower(
        visual,
        blocks=blocks,
        dims=[visual.conv1.out_channels] * len(blocks),
        sizes=Sizes(tuple(visual.image_size), tuple(visual.patch_size), "fixed"),
        prefix=1,
        has_cls=True,
        run=run,
        norm=visual.ln_post if norm_on_tokens else None,
        preprocessing=_preprocessing(visual),
    )


def _preprocessing(visual: Any) -> Preprocessing:
    """As open_clip's factory notes it at the tower; for a tower made by hand, as CLIP has it."""
    found, (mean, std) = getattr(visual, "preprocess_cfg", None) or {}, NORMALIZATIONS["clip"]
    return Preprocessing(
        mean=tuple(found.get("mean", mean)),
        std=tuple(found.get("std", std)),
        interpolation="bilinear" if found.get("interpolation") == "bilinear" else "bicubic",
        crop_ratio=None if found.get("resize_mode") == "squash" else 1.0,
    )
