"""Patches as pixels: the images as the model saw them, and where their patches lie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pace.explanation import Explanation
from pace.images.imageset import ImageSet
from pace.images.preparation import PreprocessingLike, prepare
from pace.observations import Observations

Grid = tuple[int, int]
Pixels = npt.NDArray[np.uint8]  # (height, width, 3)

# A set, or images already as the model saw them: a uint8 or [0, 1] tensor (M, 3, H, W), or an array (M, H, W, 3).
Images = ImageSet | Tensor | npt.NDArray[Any] | Sequence[Any]

_KEPT = 512  # prepared images in the cache: a figure asks for the same few again and again


class Box(NamedTuple):
    """Pixels from (left, top) up to, and without, (right, bottom)."""

    left: int
    top: int
    right: int
    bottom: int


class Pictures:
    """M images as the model saw them: ``pictures[m]`` is a uint8 array (H, W, 3), made when it is asked for.

    An `ImageSet` is resized and cropped as `observe` does it, which needs the model's `preprocessing`
    (``backbone.preprocessing``). So is a list of images (each (h, w, 3), or a tensor (3, h, w)) of any size; without
    `preprocessing` a list must hold images that are prepared already. A batch, tensor (M, 3, H, W) or array (M, H, W, 3),
    is taken as it is, since `observe` takes batches as they are. `name` is the argument that errors speak of.
    """

    def __init__(
        self,
        images: Images,
        preprocessing: PreprocessingLike | None = None,
        expected: int | None = None,
        name: str = "images",
    ) -> None:
        if isinstance(images, (Tensor, np.ndarray)):
            preprocessing = None
        elif not isinstance(images, (ImageSet, list, tuple)):
            raise ValueError(f"{name}: expected an ImageSet, a batch or a list; found {type(images).__name__}")
        elif isinstance(images, ImageSet) and preprocessing is None:
            raise ValueError(
                "preprocessing: needed to show an ImageSet as the model saw it; pass backbone.preprocessing"
            )
        if expected not in (None, len(images)):
            raise ValueError(f"{name}: expected {expected}, one for each that was observed; found {len(images)}")
        self._images, self._preprocessing, self._name = images, preprocessing, name
        self._prepared = lru_cache(_KEPT)(self._prepare)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, image: int) -> Pixels:
        if not -len(self) <= image < len(self):
            raise IndexError(f"image {image} of {len(self)}")
        return self._prepared(int(image) % len(self))

    def _prepare(self, image: int) -> Pixels:
        pixels = _channels_first(self._images[image], self._name)
        if self._preprocessing is not None:
            pixels = prepare(pixels, self._preprocessing)
        if pixels.dtype != torch.uint8:
            pixels = (pixels.float().clamp(0, 1) * 255).round().to(torch.uint8)
        shown: Pixels = pixels.permute(1, 2, 0).cpu().contiguous().numpy()
        shown.flags.writeable = False  # it is cached
        return shown

    def patch(self, image: int, patch: int, grid: Grid, margin: int = 0) -> Pixels:
        """One patch, cut out with `margin` patches around it; see `patch_box`."""
        pixels = self[image]
        box = patch_box(patch, grid, pixels.shape[:2], margin)
        return pixels[box.top : box.bottom, box.left : box.right]


def seen(images: Images, preprocessing: PreprocessingLike | None = None) -> npt.NDArray[np.uint8]:
    """The pixels (M, H, W, 3) that the model saw; see `Pictures`."""
    pictures = Pictures(images, preprocessing)
    return np.stack([pictures[image] for image in range(len(pictures))])


def grid_of(of: Observations | Explanation) -> Grid:
    """Rows and columns of the patches."""
    if of.grid is None:
        raise ValueError("the layout of the patches is unknown; pass grid=(rows, columns) to Observations")
    return of.grid


def patch_box(patch: int, grid: Grid, size: Sequence[int], margin: int = 0) -> Box:
    """Where patch number `patch` (row by row, prefix tokens not counted) lies in an image of (height, width) `size`.

    With `margin`, that many patches on each side are shown too. At the border the window moves inwards instead of
    shrinking, so that all windows of a grid have the same size. Patches divide the image evenly, to the pixel.
    """
    rows, columns = grid
    if not 0 <= patch < rows * columns:
        raise IndexError(f"patch {patch} of {rows} x {columns}")
    row, column = divmod(int(patch), columns)
    top, bottom = _span(row, rows, size[0], margin)
    left, right = _span(column, columns, size[1], margin)
    return Box(left, top, right, bottom)


def _span(position: int, count: int, pixels: int, margin: int) -> tuple[int, int]:
    wide = min(2 * margin + 1, count)
    first = min(max(position - margin, 0), count - wide)
    return round(first * pixels / count), round((first + wide) * pixels / count)


def _channels_first(image: Any, name: str) -> Tensor:
    """One image as a tensor (3, h, w), uint8 or float in [0, 1]."""
    pixels = image.detach() if isinstance(image, Tensor) else torch.from_numpy(np.array(image))
    if not isinstance(image, Tensor) and pixels.ndim == 3:
        pixels = pixels.permute(2, 0, 1)
    if pixels.ndim != 3 or pixels.shape[0] != 3:
        wanted = "a tensor (3, height, width) or an array (height, width, 3)"
        raise ValueError(f"{name}: expected {wanted} each; found {type(image).__name__} {tuple(np.shape(image))}")
    if pixels.dtype == torch.uint8:
        return pixels
    if not pixels.is_floating_point() or not 0 <= float(pixels.min()) <= float(pixels.max()) <= 1:
        found = f"{pixels.dtype}, {float(pixels.min()):.3g} to {float(pixels.max()):.3g}"
        raise ValueError(f"{name}: expected uint8 or floats in [0, 1]; found {found}")
    return pixels
