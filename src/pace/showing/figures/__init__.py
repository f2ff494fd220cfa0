"""The paper's figures and a few more, one function each. All return a matplotlib `Figure` and leave pyplot alone."""

try:
    import matplotlib  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("figures need matplotlib: pip install 'pace-xai[figures]'", name="matplotlib") from error

from pace.showing.figures.classes import class_concepts
from pace.showing.figures.curves import bound, number_of_concepts
from pace.showing.figures.gallery import concept_gallery
from pace.showing.figures.layout import save
from pace.showing.figures.levels import three_levels
from pace.showing.figures.maps import concept_map
from pace.showing.figures.overlays import overlay
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
