"""PACE: probabilistic concept explainers for vision transformers.

images → backbones → observations → model → explanation

Names are imported on first use, so ``import pace`` costs nothing and needs no optional library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Backbone": "pace.backbones",
    "Observations": "pace.observations",
    "PACE": "pace.explainer",
    "Explanation": "pace.explanation",
    "ablate": "pace.ablation",
    "shortcuts": "pace.ablation",
}

__all__ = ["PACE", "Backbone", "Explanation", "Observations", "__version__", "ablate", "shortcuts"]

if TYPE_CHECKING:
    from pace.ablation import ablate, shortcuts
    from pace.backbones import Backbone
    from pace.explainer import PACE
    from pace.explanation import Explanation
    from pace.observations import Observations


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'pace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
