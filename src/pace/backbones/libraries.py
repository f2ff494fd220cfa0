"""Recognise which library a model comes from, and describe it as a `Tower`; for transformers, see `from_transformers`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pace.backbones import from_transformers
from pace.backbones.attention import Windows
from pace.backbones.preprocessing import NORMALIZATIONS, Channels, Preprocessing
from pace.backbones.tower import Model, Sizes, Tower, last_linear, replaced_forward


def describe(model: Any) -> Model:
    """A `Tower` for a model of a known library; an object that already follows `Model` is returned as it is."""
    if isinstance(model, Model):
        return model
    model = _unwrapped(model)
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected a torch module or an object with the methods of Model; found {kind}")
    tower = _tower(model) or _tower_inside(model)
    if tower is None:
        inside = next((name for name, part in model.named_modules() if _tower(part) is not None), None)
        hint = f"pass model.{inside}, with head=… for its predictions" if inside else "describe it with Tower"
        if not inside and _is_convolutional(model):
            hint = "a ViT, Swin or DINOv2 would serve, fine-tuned or with a probe on your labels"
            raise ValueError(
                f"model: {kind} is a convolutional network, without tokens and attention to explain; {hint}"
            )
        raise ValueError(f"model: {kind} is not a vision transformer of {', '.join(_LIBRARIES)}; {hint}")
    return tower


def describe_tower(model: nn.Module) -> Tower:
    """The same for training, which needs to know the modules."""
    tower = describe(model)
    if not isinstance(tower, Tower):
        raise ValueError(f"model: {type(model).__name__} does not show its modules, so it cannot be trained")
    return tower


def _tower(model: nn.Module) -> Tower | None:
    """For a library's model or a subclass of one, if it is a vision transformer."""
    origins = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    return next((tower for name in _LIBRARIES if name in origins and (tower := _LIBRARIES[name](model))), None)


def _unwrapped(model: Any) -> Any:
    """Without the wrappers of torch.compile, PEFT, parallel training and averaged weights."""
    if hasattr(model, "get_base_model"):
        return _unwrapped(model.get_base_model())
    inside = next((getattr(model, name, None) for name in ("_orig_mod", "module") if hasattr(model, name)), None)
    return _unwrapped(inside) if isinstance(inside, nn.Module) else model


def _tower_inside(model: nn.Module) -> Tower | None:
    """Of ``nn.Sequential(normalise, transformer, …)`` or a Lightning module around one transformer.

    The normalisation becomes preprocessing. A linear layer behind a transformer without a classifier is the classifier.
    """
    if not isinstance(model, nn.Sequential) and "LightningModule" not in {
        base.__name__ for base in type(model).__mro__
    }:
        return None
    parts = list(model.children())
    found = [(part, tower) for part in parts if (tower := _tower(_unwrapped(part))) is not None]
    if len(found) != 1:
        return None
    (transformer, tower), normalizers = found[0], [part for part in parts if _normalization(part) is not None]
    if normalizers:
        mean, std = _normalization(normalizers[0])  # type: ignore[misc]
        tower = replace(tower, preprocessing=replace(tower.preprocessing, mean=mean, std=std))
    others = [part for part in parts if part is not transformer and part not in normalizers]
    unknown = [part for part in others if next(part.parameters(), None) is not None]
    classifiers = [layer for part in unknown for layer in last_linear(part)]
    if tower.classifiers or len(classifiers) != 1:
        return tower

    def run(images: Tensor) -> Tensor:
        with ExitStack() as stack:
            for part in normalizers:
                stack.enter_context(replaced_forward(part, lambda pixels: pixels))
            output: Tensor = model(images)
        return output

    return replace(tower, model=model, run=run, classifiers=classifiers)


def _normalization(part: nn.Module) -> tuple[Channels, Channels] | None:
    """Mean and deviation of the three colours, if that is what a module without weights has."""
    pair = [getattr(part, name, None) for name in ("mean", "std")]
    if any(value is None or callable(value) for value in pair) or list(part.children()):
        return None
    mean, std = (tuple(torch.as_tensor(value, dtype=torch.float64).flatten().tolist()) for value in pair)
    scale = 255 if max(mean, default=0) > 1 else 1  # pixels up to 255
    scaled = (tuple(value / scale for value in values) for values in (mean, std))
    return tuple(scaled) if len(mean) == len(std) == 3 else None  # type: ignore[return-value]


def _is_convolutional(model: nn.Module) -> bool:
    kinds = [type(part).__name__.lower() for part in model.modules()]
    return sum("conv" in kind for kind in kinds) > 2 and not any("attention" in kind for kind in kinds)


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


def _timm(model: Any) -> Tower | None:
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


def _torchvision(model: Any) -> Tower | None:
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


def _open_clip(model: Any) -> Tower | None:
    visual = getattr(model, "visual", model)
    # As open_clip's factory notes it at the tower; for a tower made by hand, as CLIP has it.
    usual = Preprocessing((224, 224), *NORMALIZATIONS["clip"], crop_ratio=1.0)
    preprocessing = _preprocessing(getattr(visual, "preprocess_cfg", None) or {}, usual)
    if hasattr(visual, "trunk"):
        tower = _timm(visual.trunk)
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


_LIBRARIES = {
    "timm": _timm,
    "transformers": from_transformers.describe,
    "torchvision": _torchvision,
    "open_clip": _open_clip,
}
