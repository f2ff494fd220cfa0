"""The small vision transformer that comes with the package, trained on Color: small enough for any CPU."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import torch
from torch import nn

from pace.backbones.finetuning import Finetuned, load_finetuned

SIZE = 112  # pixels; 14 x 14 patches of 8, the grid of a ViT-B/16 at 224
LAYER = 0  # the block PACE explains: later ones mix the neighbours' colours into each token


def new_model(seed: int = 0) -> nn.Module:
    """The architecture with random weights.

    Without position embeddings, since the classes do not depend on where a colour is. LayerScale lets the blocks start
    as small corrections to the patch embedding, as in DINOv2, so that each token keeps describing its own patch.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = {"img_size": SIZE, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 1, "mlp_ratio": 2}
        kind = import_module("timm.models.vision_transformer").VisionTransformer
        model: nn.Module = kind(**shape, init_values=1e-4, pos_embed="none", num_classes=2)
    # Where Backbone looks up how images are prepared: the whole image, from -1 to 1.
    model.pretrained_cfg = {  # type: ignore[assignment]
        "architecture": "pace_color_vit",
        "input_size": (3, SIZE, SIZE),
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "interpolation": "bilinear",
        "crop_pct": 1.0,
    }
    return model


def load() -> Finetuned:
    """The trained model, in eval mode, with the names of its classes."""
    return load_finetuned(new_model(), Path(__file__).parent / "color_vit.safetensors")


def load_model() -> nn.Module:
    """The trained model, in eval mode."""
    return load().model
