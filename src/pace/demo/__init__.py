"""The embedded default: Color images made on the spot, a small vision transformer that tells their classes apart, and PACE.

Needs no data, no network and no weights beyond the ones shipped here, which ``scripts/train_color_vit.py`` trained.
"""

from pace.backbones.color_vit import class_names, load_model, new_model
from pace.demo.running import DemoResult, run
from pace.demo.truth import stability_of_true_colours, true_colours

__all__ = [
    "DemoResult",
    "class_names",
    "load_model",
    "new_model",
    "run",
    "stability_of_true_colours",
    "true_colours",
]
