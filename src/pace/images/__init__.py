"""Images: datasets in their official layouts, any folder, the generated Color set, preparing and perturbing images."""

from pace.images.cars import Cars
from pace.images.color import COLOR_NAMES, Color
from pace.images.cub import CUB
from pace.images.decoding import UnreadableImageError, decode
from pace.images.flower import Flower
from pace.images.folder import Folder
from pace.images.imageset import ImageFiles, ImageSet, UnreadableImagesError
from pace.images.opening import open_images
from pace.images.perturb import AUGMENT_SEED, STAGES, Crops, Perturb, Perturbation
from pace.images.preparation import PreprocessingLike, normalize, prepare, prepare_points, to_float

__all__ = [
    "AUGMENT_SEED",
    "COLOR_NAMES",
    "CUB",
    "STAGES",
    "Cars",
    "Color",
    "Crops",
    "Flower",
    "Folder",
    "ImageFiles",
    "ImageSet",
    "Perturb",
    "Perturbation",
    "PreprocessingLike",
    "UnreadableImageError",
    "UnreadableImagesError",
    "decode",
    "normalize",
    "open_images",
    "prepare",
    "prepare_points",
    "to_float",
]
