"""A small vision transformer trained on Birds, for when parts, and not only colours, are to be explained on any CPU."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import torch
from torch import nn

from pace.backbones.finetuning import Finetuned, load_finetuned
from pace.images.birds import CLASS_KINDS

SIZE = 112  # pixels; 14 x 14 patches of 8, the grid of a ViT-B/16 at 224
LAYER = (
    4  # the last, which the demo explains: on images of seeds 50 to 53 parts and kinds are told better than in block 3
)


def new_model(seed: int = 0) -> nn.Module:
    """The architecture with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = {"img_size": SIZE, "patch_size": 8, "embed_dim": 96, "depth": 5, "num_heads": 3, "mlp_ratio": 2}
        kind = import_module("timm.models.vision_transformer").VisionTransformer
        model: nn.Module = kind(**shape, num_classes=len(CLASS_KINDS))
    # Where Backbone looks up how images are prepared: the whole image, from -1 to 1.
    model.pretrained_cfg = {  # type: ignore[assignment]
        "architecture": "pace_birds_vit",
        "input_size": (3, SIZE, SIZE),
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "interpolation": "bilinear",
        "crop_pct": 1.0,
    }
    return model


def load() -> Finetuned:
    """The trained model, in eval mode, with the names of its classes."""
    return load_finetuned(new_model(), Path(__file__).parent / "birds_vit.safetensors")


def load_model() -> nn.Module:
    """The trained model, in eval mode."""
    return load().model
