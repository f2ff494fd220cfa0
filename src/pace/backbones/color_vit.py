"""The small vision transformer trained on Color."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from pace.backbones.finetuning import Finetuned, load_finetuned
from pace.backbones.shipped import SIZE as SIZE
from pace.backbones.shipped import random_vit

LAYER = 0  # the block PACE explains: later ones mix the neighbours' colours into each token


def new_model(seed: int = 0) -> nn.Module:
    """The architecture with random weights.

    Without position embeddings, since the classes do not depend on where a colour is. LayerScale lets the blocks start
    as small corrections to the patch embedding, as in DINOv2, so that each token keeps describing its own patch.
    """
    shape = {"embed_dim": 32, "depth": 3, "num_heads": 1, "init_values": 1e-4, "pos_embed": "none", "num_classes": 2}
    return random_vit("pace_color_vit", seed, **shape)


def load() -> Finetuned:
    """The trained model, in eval mode, with the names of its classes."""
    return load_finetuned(new_model(), Path(__file__).with_suffix(".safetensors"))


def load_model() -> nn.Module:
    """The trained model, in eval mode."""
    return load().model
