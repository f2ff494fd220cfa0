"""What a model expects to be done to an image before it sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Channels = tuple[float, ...]

NORMALIZATIONS: dict[str, tuple[Channels, Channels]] = {  # mean and standard deviation
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}


@dataclass(frozen=True)
class Preprocessing:
    """Resize, crop the centre to `size`, then (x − mean) / std, on the scale 0 … 1.

    `crop_ratio` is the part of the resized image that the crop keeps; None squashes the whole image into `size`.
    """

    size: tuple[int, int] = (224, 224)
    mean: Channels = NORMALIZATIONS["imagenet"][0]
    std: Channels = NORMALIZATIONS["imagenet"][1]
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    crop_ratio: float | None = 0.875
