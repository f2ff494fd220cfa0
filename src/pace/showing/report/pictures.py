"""The pictures of a report: the pixels the model saw, small enough to fit into one file."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import ceil, sqrt
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pace.images import PreprocessingLike
from pace.showing.patches import Grid, Images, Pictures, patch_box

if TYPE_CHECKING:
    from PIL.Image import Image

MIME = "image/webp"
TILE = 64  # side, in pixels, of a picture in the contact sheet
_SIDES = (224, 192, 160, 128, 96, 64, 48)  # longer side of a picture; the first that fits is taken
_TRIED = 16  # pictures from which the size of all is estimated


class ContactSheet(NamedTuple):
    """All pictures as small tiles of one image, row by row, so that a list of them is decoded at once."""

    file: bytes
    columns: int
    rows: int


def read_pictures(images: Images, count: int, preprocessing: PreprocessingLike | None, name: str) -> list[Image]:
    """One picture for each of `count` images, none larger than a report shows; `name` is the argument's, for errors."""
    from PIL import Image

    seen = Pictures(images, preprocessing, expected=count, name=name)
    pictures = []
    for index in range(count):
        pixels = seen[index]
        if pixels.shape != seen[0].shape:
            raise ValueError(
                f"{name}: image {index} has {pixels.shape[1]} x {pixels.shape[0]} pixels and image 0 "
                f"{seen[0].shape[1]} x {seen[0].shape[0]}; pass preprocessing=backbone.preprocessing"
            )
        pictures.append(_at_most(Image.fromarray(pixels), _SIDES[0]))
    return pictures


def encode(pictures: Sequence[Image], budget: int) -> list[bytes]:
    """The pictures as WebP files of together at most `budget` bytes, as large as fits."""
    sample = pictures[:: ceil(len(pictures) / _TRIED)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # the encoder releases the interpreter lock

        def files(of: Sequence[Image], side: int) -> list[bytes]:
            return list(pool.map(lambda picture: _webp(_at_most(picture, side), quality=75), of))

        for side in _SIDES:
            if sum(map(len, files(sample, side))) * len(pictures) > budget * len(sample):
                continue
            encoded = files(pictures, side)
            if sum(map(len, encoded)) <= budget:
                return encoded
    raise ValueError(
        f"images: {len(pictures)} pictures do not fit into the report, which stays under 20 MB; show fewer of them"
    )


def contact_sheet(pictures: Sequence[Image]) -> ContactSheet:
    """Every picture as a square tile, cropped to its centre."""
    from PIL import Image, ImageOps

    columns = ceil(sqrt(len(pictures)))
    rows = ceil(len(pictures) / columns)
    sheet = Image.new("RGB", (columns * TILE, rows * TILE))
    for index, picture in enumerate(pictures):
        tile = ImageOps.fit(picture, (TILE, TILE), Image.Resampling.LANCZOS)
        sheet.paste(tile, (index % columns * TILE, index // columns * TILE))
    return ContactSheet(_webp(sheet, quality=60), columns, rows)


def mean_colour(pictures: Sequence[Image], patches: Sequence[tuple[int, int]], grid: Grid) -> list[int]:
    """Red, green and blue, 0 to 255, of some patches given as (picture, patch)."""
    means = [
        np.asarray(pictures[index].crop(patch_box(patch, grid, pictures[index].size[::-1])), np.float64).mean((0, 1))
        for index, patch in patches
    ]
    return [round(value) for value in np.mean(means, 0)]


def _at_most(picture: Image, side: int) -> Image:
    from PIL import Image, ImageOps

    if max(picture.size) <= side:
        return picture
    return ImageOps.contain(picture, (side, side), Image.Resampling.LANCZOS)


def _webp(picture: Image, quality: int) -> bytes:
    file = io.BytesIO()
    picture.save(file, "WEBP", quality=quality, method=2)
    return file.getvalue()
