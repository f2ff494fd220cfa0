"""torchvision: VisionTransformer, SwinTransformer 1 and 2. Its models do not say how images are prepared for them;
what most of its weights were trained with is assumed."""

from __future__ import annotations

from typing import Any

from pace.backbones.attention import Windows
from pace.backbones.preprocessing import Preprocessing
from pace.backbones.tower import Sizes, Tower, classifier_of


def describe(model: Any) -> Tower | None:
    if hasattr(model, "conv_proj") and hasattr(model, "encoder"):
        return _vit(model)
    if any(base.__name__ == "SwinTransformer" for base in type(model).__mro__):
        return _swin(model)
    return None


def _vit(model: Any) -> Tower:
    size = (model.image_size, model.image_size)
    return Tower(
        model,
        blocks=list(model.encoder.layers),
        dims=[model.hidden_dim] * len(model.encoder.layers),
        sizes=Sizes(size, (model.patch_size, model.patch_size), "fixed"),
        prefix=1,
        has_cls=True,
        norm=model.encoder.ln,
        classifiers=classifier_of(model.heads),
        preprocessing=Preprocessing(interpolation="bilinear"),
    )


def _swin(model: Any) -> Tower:
    """`features` is the patch embedding, then stages of blocks with a merging layer between them."""
    blocks = [(block, stage) for stage, blocks in enumerate(model.features[1::2]) for block in blocks]
    embed = model.features[0][0]
    size = (256, 256) if hasattr(blocks[0][0].attn, "logit_scale") else (224, 224)
    return Tower(
        model,
        blocks=[block for block, _ in blocks],
        dims=[block.norm1.normalized_shape[0] for block, _ in blocks],
        sizes=Sizes(size, embed.stride, "floor"),
        norm=model.norm,
        classifiers=classifier_of(model.head),
        merges=[stage for _, stage in blocks],
        windows=_windows,
    )


def _windows(block: Any, grid: tuple[int, int]) -> Windows:
    (height, width), (down, right) = block.attn.window_size, block.attn.shift_size
    shift = (down if grid[0] > height else 0, right if grid[1] > width else 0)  # a window that covers all stays put
    return Windows((height, width), shift, pad_first=True)
