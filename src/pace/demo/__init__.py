"""PACE on generated images, with the small vision transformer that is shipped: no data, no network."""

from pace.backbones.birds_vit import load_model
from pace.demo.running import DemoResult, run

__all__ = ["DemoResult", "load_model", "run"]
