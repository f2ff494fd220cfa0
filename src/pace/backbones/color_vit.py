"""The demo's vision transformer: timm's own class, small enough to ship and to run on any CPU."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import torch
from torch import nn

SIZE = 112  # pixels; 14 x 14 patches of 8, the grid of a ViT-B/16 at 224
PATCH = 8
WIDTH = 32
DEPTH = 3
HEADS = 1
LAYER = 0  # whose tokens PACE explains: later ones have mixed their neighbours' colours into their own

WEIGHTS = Path(__file__).parent / "color_vit.safetensors"


def new_model(seed: int = 0) -> nn.Module:
    """The architecture with random weights.

    There are no position embeddings: the classes do not depend on where a colour is. LayerScale lets the blocks begin as
    small corrections to the patch embedding, as in DINOv2, so that a token goes on saying what its own patch shows.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = import_module("timm.models.vision_transformer").VisionTransformer(
            img_size=SIZE,
            patch_size=PATCH,
            embed_dim=WIDTH,
            depth=DEPTH,
            num_heads=HEADS,
            mlp_ratio=2,
            init_values=1e-4,
            pos_embed="none",
            num_classes=2,
        )
    # Where pace.Backbone looks for how images are to be prepared: the whole image, from -1 to 1.
    model.pretrained_cfg = {  # type: ignore[assignment]
        "architecture": "pace_color_vit",
        "input_size": (3, SIZE, SIZE),
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "interpolation": "bilinear",
        "crop_pct": 1.0,
    }
    return model


def load_model() -> nn.Module:
    """The trained model that is shipped, in eval mode."""
    from pace.backbones import load_finetuned

    return load_finetuned(new_model(), WEIGHTS).model


def class_names() -> tuple[str, ...]:
    """What the model's outputs stand for."""
    from pace.backbones.checkpoints import read_checkpoint

    return tuple(read_checkpoint(WEIGHTS)[1]["class_names"])
