"""The paper's figures, one function each. Every one returns a matplotlib `Figure` and leaves pyplot alone."""

try:
    import matplotlib  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("figures need matplotlib: pip install 'pace-xai[figures]'", name="matplotlib") from error

from pace.showing.figures.bounds import bound
from pace.showing.figures.classes import class_concepts
from pace.showing.figures.gallery import concept_gallery
from pace.showing.figures.levels import three_levels
from pace.showing.figures.mapping import concept_map
from pace.showing.figures.numbers import number_of_concepts
from pace.showing.figures.overlays import overlay
from pace.showing.figures.sheet import save
from pace.showing.figures.theta import theta_bars

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
