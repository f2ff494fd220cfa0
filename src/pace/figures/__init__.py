"""The paper's figures, one function each. Every one returns a matplotlib `Figure` and leaves pyplot alone."""

try:
    import matplotlib  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("figures need matplotlib: pip install 'pace-xai[figures]'", name="matplotlib") from error

from pace.figures.bounds import bound
from pace.figures.classes import class_concepts
from pace.figures.gallery import concept_gallery
from pace.figures.levels import three_levels
from pace.figures.mapping import concept_map
from pace.figures.numbers import number_of_concepts
from pace.figures.overlays import overlay
from pace.figures.sheet import save
from pace.figures.theta import theta_bars

__all__ = [
    "bound",
    "class_concepts",
    "concept_gallery",
    "concept_map",
    "number_of_concepts",
    "overlay",
    "save",
    "theta_bars",
    "three_levels",
]
