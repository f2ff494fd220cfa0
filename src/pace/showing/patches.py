"""Patches as pixels: the images as the model saw them, and where their patches lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pace.explanation import Array, Explanation
from pace.images.given import pixels_of
from pace.images.imageset import ImageSet
from pace.images.preparation import PreprocessingLike, resize_and_crop
from pace.observations import Observations

Grid = tuple[int, int]
Pixels = npt.NDArray[np.uint8]  # (height, width, 3)

# A set, or images already as the model saw them: a uint8 or [0, 1] tensor (M, 3, H, W), or an array (M, H, W, 3).
Images = ImageSet | Tensor | npt.NDArray[Any] | Sequence[Any]


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
            raise ValueError("preprocessing: needed to show an ImageSet; pass backbone.preprocessing")
        if expected not in (None, len(images)):
            raise ValueError(f"{name}: expected {expected}, one for each that was observed; found {len(images)}")
        self._images, self._preprocessing, self._name = images, preprocessing, name

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, image: int) -> Pixels:
        pixels = pixels_of(self._images[image], self._name)
        if self._preprocessing is not None:
            pixels = resize_and_crop(pixels, self._preprocessing)
        if pixels.dtype != torch.uint8:
            pixels = (pixels.float() * 255).round().to(torch.uint8)
        shown: Pixels = pixels.permute(1, 2, 0).cpu().numpy()
        return shown


def seen(images: Images, preprocessing: PreprocessingLike | None = None) -> npt.NDArray[np.uint8]:
    """The pixels (M, H, W, 3) that the model saw; see `Pictures`."""
    pictures = Pictures(images, preprocessing)
    return np.stack([pictures[image] for image in range(len(pictures))])


def grid_of(of: Observations | Explanation) -> Grid:
    """Rows and columns of the patches."""
    if of.grid is None:
        raise ValueError("the layout of the patches is unknown; pass grid=(rows, columns) to Observations")
    return of.grid


def patch_box(patch: int, grid: Grid, size: Sequence[int], margin: int = 0) -> tuple[slice, slice]:
    """Rows and columns of pixels of patch number `patch` (row by row, prefix tokens not counted).

    `size` is (height, width) of the image. With `margin`, that many patches on each side are included. At the border the
    window moves inwards instead of shrinking, so that all windows of a grid have the same size.
    """
    rows, columns = grid
    if not 0 <= patch < rows * columns:
        raise IndexError(f"patch {patch} of {rows} x {columns}")
    row, column = divmod(int(patch), columns)
    return _span(row, rows, size[0], margin), _span(column, columns, size[1], margin)


def _span(position: int, count: int, pixels: int, margin: int) -> slice:
    wide = min(2 * margin + 1, count)
    first = min(max(position - margin, 0), count - wide)
    return slice(round(first * pixels / count), round((first + wide) * pixels / count))


def mean_color(pictures: Sequence[Any] | Pictures, patches: Sequence[tuple[int, int]], grid: Grid) -> Array:
    """Red, green and blue (3,), 0 to 255, of some patches given as (picture, patch)."""
    images = [(np.asarray(pictures[m]), patch) for m, patch in patches]
    return np.mean([pixels[patch_box(patch, grid, pixels.shape)].mean((0, 1)) for pixels, patch in images], 0)  # type: ignore[no-any-return]
