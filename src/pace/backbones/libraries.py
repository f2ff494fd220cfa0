"""The vision transformers of timm, torchvision and open_clip as a `Tower`; for transformers, see `from_transformers`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from pace.backbones.attention import Windows
from pace.backbones.preprocessing import NORMALIZATIONS, Channels, Preprocessing
from pace.backbones.tower import Sizes, Tower, last_linear


def _is_swin(model: Any) -> bool:
    return any(base.__name__ in ("SwinTransformer", "SwinTransformerV2") for base in type(model).__mro__)


def _preprocessing(config: dict[str, Any], usual: Preprocessing) -> Preprocessing:
    """As a configuration of timm or open_clip has it, or as `usual`."""
    squash = "squash" in (config.get("crop_mode"), config.get("resize_mode"))
    return Preprocessing(
        mean=tuple(config.get("mean", usual.mean)),
        std=tuple(config.get("std", usual.std)),
        interpolation="bilinear" if config.get("interpolation") == "bilinear" else "bicubic",
        crop_ratio=None if squash else config.get("crop_pct", usual.crop_ratio),
    )


# timm: VisionTransformer and its relatives (DeiT, DINOv2, CLIP and SigLIP towers, EVA, BEiT), Swin 1 and 2.


def timm(model: Any) -> Tower | None:
    swin = _is_swin(model)
    if not swin and not all(hasattr(model, name) for name in ("patch_embed", "blocks", "norm", "num_prefix_tokens")):
        return None
    embed, config, heads = model.patch_embed, _config(model), model.get_classifier()
    heads = heads if isinstance(heads, tuple) else (heads,)  # DeiT has two
    rule: Any = "fixed" if embed.strict_img_size else "ceil" if getattr(embed, "dynamic_img_pad", False) else "multiple"
    size = embed.img_size or config.get("input_size", (3, 224, 224))[1:]
    common: dict[str, Any] = {
        "sizes": Sizes(tuple(size), tuple(embed.feat_ratio(as_scalar=False)), rule),
        "norm": None if isinstance(model.norm, nn.Identity) else model.norm,
        "classifiers": [layer for head in heads for layer in last_linear(head)],
        "preprocessing": _preprocessing(config, Preprocessing()),
    }
    if swin:
        return Tower(
            model,
            blocks=[block for stage in model.layers for block in stage.blocks],
            dims=[block.dim for stage in model.layers for block in stage.blocks],
            merges=[number for number, stage in enumerate(model.layers) for _ in stage.blocks],
            windows=lambda block, _: Windows(block.window_size, block.shift_size, pad_first=False),
            **common,
        )
    pool = getattr(model, "attn_pool", None)
    return Tower(
        model,
        blocks=list(model.blocks),
        dims=[model.embed_dim] * len(model.blocks),
        prefix=model.num_prefix_tokens,
        has_cls=getattr(model, "cls_token", None) is not None,
        pool=pool if hasattr(pool, "latent") else None,
        **common,
    )


def _config(model: Any) -> dict[str, Any]:
    """timm's configuration of the pretrained weights, where the model has one."""
    return getattr(model, "pretrained_cfg", None) or {}


def may_be_told(model: Any) -> bool:
    """Whether the model's library leaves it to `normalize_with` how pixels are normalised."""
    return type(model).__module__.partition(".")[0] in ("timm", "torchvision")


def normalize_with(model: Any, mean: Channels, std: Channels) -> None:
    """Say what a model's weights were trained with, where its library cannot know."""
    model.pretrained_cfg = {**_config(model), "mean": tuple(mean), "std": tuple(std)}


# torchvision: VisionTransformer, SwinTransformer 1 and 2. Its models do not say how images are prepared for them, unless
# `load` noted it; what most of its weights were trained with is assumed.


def torchvision(model: Any) -> Tower | None:
    if _is_swin(model):
        return _torchvision_swin(model)
    if not (hasattr(model, "conv_proj") and hasattr(model, "encoder")):
        return None
    return Tower(
        model,
        blocks=list(model.encoder.layers),
        dims=[model.hidden_dim] * len(model.encoder.layers),
        sizes=Sizes((model.image_size, model.image_size), (model.patch_size, model.patch_size), "fixed"),
        prefix=1,
        has_cls=True,
        norm=model.encoder.ln,
        classifiers=last_linear(model.heads),
        preprocessing=_preprocessing(_config(model), Preprocessing(interpolation="bilinear")),
    )


def _torchvision_swin(model: Any) -> Tower:
    stages = model.features[1::2]  # after the patch embedding, and with merging layers between them
    blocks = [block for stage in stages for block in stage]
    size = (256, 256) if hasattr(blocks[0].attn, "logit_scale") else (224, 224)

    def windows(block: Any, grid: tuple[int, int]) -> Windows:
        (height, width), (down, right) = block.attn.window_size, block.attn.shift_size
        shift = (down if grid[0] > height else 0, right if grid[1] > width else 0)  # a window that covers all stays put
        return Windows((height, width), shift, pad_first=True)

    return Tower(
        model,
        blocks=blocks,
        dims=[block.norm1.normalized_shape[0] for block in blocks],
        sizes=Sizes(size, model.features[0][0].stride, "floor"),
        norm=model.norm,
        classifiers=last_linear(model.head),
        merges=[number for number, stage in enumerate(stages) for _ in stage],
        windows=windows,
        preprocessing=_preprocessing(_config(model), Preprocessing()),
    )


# open_clip: the visual towers of its models, its own VisionTransformer and timm's. Their output, the image embedding
# that is compared with texts, is the pooled feature.


def open_clip(model: Any) -> Tower | None:
    visual = getattr(model, "visual", model)
    # As open_clip's factory notes it at the tower; for a tower made by hand, as CLIP has it.
    usual = Preprocessing((224, 224), *NORMALIZATIONS["clip"], crop_ratio=1.0)
    preprocessing = _preprocessing(getattr(visual, "preprocess_cfg", None) or {}, usual)
    if hasattr(visual, "trunk"):
        tower = timm(visual.trunk)
        return tower and replace(tower, model=visual, classifiers=(), preprocessing=preprocessing)
    if not (hasattr(visual, "transformer") and hasattr(visual, "conv1")):
        return None

    def run(images: Tensor) -> Tensor:
        output: Tensor | tuple[Tensor, Tensor] = visual(images)
        return output[0] if isinstance(output, tuple) else output

    blocks = list(visual.transformer.resblocks)
    return Tower(
        visual,
        blocks=blocks,
        dims=[visual.conv1.out_channels] * len(blocks),
        sizes=Sizes(tuple(visual.image_size), tuple(visual.patch_size), "fixed"),
        prefix=1,
        has_cls=True,
        run=run,
        norm=visual.ln_post if visual.attn_pool is None and not visual.final_ln_after_pool else None,
        preprocessing=preprocessing,
    )
