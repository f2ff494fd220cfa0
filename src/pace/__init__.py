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
    "Words": "pace.words",
    "Explanation": "pace.explanation",
    "ModelExplainer": "pace.model_explainer",
    "ablate": "pace.ablation",
    "compare": "pace.comparing",
    "explain_model": "pace.model_explainer",
    "load_run": "pace.cli.opening",  # runs are the command line's folders
    "shortcuts": "pace.ablation",
}
_PARTS = ("backbones", "baselines", "benchmark", "demo", "extract", "images", "metrics", "observing", "showing")

__all__ = [
    "PACE",
    "Backbone",
    "Explanation",
    "ModelExplainer",
    "Observations",
    "Words",
    "__version__",
    "ablate",
    "compare",
    "explain_model",
    "load_run",
    "shortcuts",
]

if TYPE_CHECKING:
    from pace.ablation import ablate, shortcuts
    from pace.backbones import Backbone
    from pace.cli.opening import load_run
    from pace.comparing import compare
    from pace.explainer import PACE
    from pace.explanation import Explanation
    from pace.model_explainer import ModelExplainer, explain_model
    from pace.observations import Observations
    from pace.words import Words


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _PARTS:
        return import_module(f"pace.{name}")
    raise AttributeError(f"module 'pace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_PARTS])
