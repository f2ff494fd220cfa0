"""PACE from beginning to end on Color images made on the spot and the small vision transformer that is shipped.

Needs no data and no network.
"""

from pace.backbones.color_vit import load_model
from pace.demo.running import DemoResult, run

__all__ = ["DemoResult", "load_model", "run"]
