"""The small vision transformers that come with the package, for any CPU: what `color_vit` and `birds_vit` share."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

SIZE = 112  # pixels; 14 x 14 patches of 8, the grid of a ViT-B/16 at 224


def random_vit(name: str, seed: int, **shape: Any) -> nn.Module:
    """A timm ViT of this shape with random weights, which a file of weights then replaces."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = import_module("timm.models.vision_transformer").VisionTransformer
        model: nn.Module = kind(img_size=SIZE, patch_size=8, mlp_ratio=2, **shape)
    # Where Backbone looks up how images are prepared: the whole image, from -1 to 1.
    model.pretrained_cfg = {  # type: ignore[assignment]
        "architecture": name,
        "input_size": (3, SIZE, SIZE),
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "interpolation": "bilinear",
        "crop_pct": 1.0,
    }
    return model
