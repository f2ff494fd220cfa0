"""Pictures as people have them: a file, a Pillow image, an array, a tensor, or a list of these."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pace.images.datasets import open_images
from pace.images.decoding import decode, upright
from pace.images.imageset import ImageFiles, ImageSet, OnError, short_hash


def images_from(
    given: Any, data_root: str | os.PathLike[str] | None = None, split: str = "train", on_error: OnError = "raise"
) -> Any:
    """An `ImageSet` of a file, a folder, a dataset's name, an image or a list; batches, which are prepared, as a tensor."""
    if isinstance(given, (str, os.PathLike)):
        file = Path(given).expanduser()
        return ImageFiles(Path(), [str(file)]) if file.is_file() else open_images(given, data_root, split, on_error)
    if isinstance(given, np.ndarray) and given.ndim == 4:
        return torch.from_numpy(given).permute(0, 3, 1, 2)
    if hasattr(given, "getbands") or (isinstance(given, (Tensor, np.ndarray)) and given.ndim in (2, 3)):
        given = [given]
    return GivenImages(given) if isinstance(given, (list, tuple)) and given else given


class GivenImages(ImageSet):
    """Images in memory, or files named one by one."""

    def __init__(self, images: Sequence[Any]) -> None:
        self.given = list(images)
        super().__init__([_name(image, number) for number, image in enumerate(images)], None, None)

    def __getitem__(self, index: int) -> Tensor:
        pixels = pixels_of(self.given[index], f"image {index}")
        return (pixels * 255).round().to(torch.uint8) if pixels.is_floating_point() else pixels

    def _keep(self, positions: list[int]) -> None:
        super()._keep(positions)
        self.given = [self.given[position] for position in positions]

    def fingerprint(self) -> str:
        return short_hash(self[index].numpy().tobytes() for index in range(len(self)))


def _name(image: Any, number: int) -> str:
    is_file = isinstance(image, (str, os.PathLike))
    return os.fspath(image) if is_file else str(getattr(image, "filename", "")) or f"image {number}"


def pixels_of(image: Any, name: str = "images") -> Tensor:
    """One image as a tensor (3, h, w), uint8 or float in [0, 1]; `name` is what errors speak of."""
    if isinstance(image, (str, os.PathLike)):
        return decode(Path(image).expanduser())
    if hasattr(image, "getbands"):
        return upright(image)
    pixels = image.detach().cpu() if isinstance(image, Tensor) else torch.from_numpy(np.array(image))
    if not isinstance(image, Tensor) and pixels.ndim == 3:
        pixels = pixels.permute(2, 0, 1)
    if pixels.ndim == 2 or (pixels.ndim == 3 and len(pixels) == 1):  # grey
        pixels = pixels.expand(3, *pixels.shape[-2:])
    if pixels.ndim != 3 or pixels.shape[0] != 3:
        wanted = "a tensor (3, height, width) or an array (height, width, 3)"
        raise ValueError(f"{name}: expected {wanted} each; found {type(image).__name__} {tuple(np.shape(image))}")
    if pixels.dtype != torch.uint8 and not (pixels.is_floating_point() and 0 <= pixels.min() <= pixels.max() <= 1):
        found = f"{pixels.dtype}, {float(pixels.min()):.3g} to {float(pixels.max()):.3g}"
        raise ValueError(f"{name}: expected uint8 or floats in [0, 1]; found {found}")
    return pixels
