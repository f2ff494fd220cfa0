"""Images: datasets in their official layouts, any folder, the generated Color and Birds, preparing and perturbing images."""

from pace.images.birds import Birds
from pace.images.color import COLOR_NAMES, Color
from pace.images.datasets import CUB, Cars, Flower, Folder, open_images
from pace.images.decoding import UnreadableImageError, decode
from pace.images.imageset import ImageFiles, ImageSet
from pace.images.perturb import AUGMENT_SEED, ByName, Perturb, Perturbation
from pace.images.preparation import PreprocessingLike, normalize, prepare, prepare_points, to_float

__all__ = [
    "AUGMENT_SEED",
    "COLOR_NAMES",
    "CUB",
    "Birds",
    "ByName",
    "Cars",
    "Color",
    "Flower",
    "Folder",
    "ImageFiles",
    "ImageSet",
    "Perturb",
    "Perturbation",
    "PreprocessingLike",
    "UnreadableImageError",
    "decode",
    "normalize",
    "open_images",
    "prepare",
    "prepare_points",
    "to_float",
]
