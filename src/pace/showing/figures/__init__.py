"""The paper's figures and a few more, one function each. All return a matplotlib `Figure` and leave pyplot alone."""

try:
    import matplotlib  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("figures need matplotlib: pip install 'pace-xai[figures]'", name="matplotlib") from error

from pace.showing.figures.concepts import class_concepts, concept_gallery, overlay, theta_bars
from pace.showing.figures.drawing import save
from pace.showing.figures.fitting import bound, concept_map, number_of_concepts
from pace.showing.figures.levels import three_levels

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
