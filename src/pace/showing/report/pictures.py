"""The pictures of a report: the pixels the model saw, small enough to travel in one file."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import ceil, sqrt
from typing import TYPE_CHECKING

import numpy as np

from pace.images import PreprocessingLike
from pace.showing.patches import Images, Pictures, patch_box

if TYPE_CHECKING:
    from PIL.Image import Image

MIME = "image/webp"
TILE = 64  # longer side, in pixels, of a picture in the contact sheet
_SIDES = (224, 192, 160, 128, 96, 64, 48)  # longer side of a picture; the first that fits is taken
_TRIED = 16  # pictures from which the size of all is foretold
_SHEET_SIDE = 8192  # a sheet's columns and rows stay well under WebP's 16,383 pixels


@dataclass(frozen=True)
class Sheet:
    """All pictures as small tiles of one image, row by row, so that a list of them is decoded at once."""

    file: bytes
    columns: int
    rows: int


def read_pictures(images: Images, count: int, preprocessing: PreprocessingLike | None, name: str) -> list[Image]:
    """One picture for each of `count` images, none larger than a report shows; `name` is the argument's, for errors."""
    from PIL import Image

    try:
        seen = Pictures(images, preprocessing)
    except ValueError as error:  # which speaks of "images", whichever argument they came from
        raise ValueError(str(error).replace("images:", f"{name}:", 1)) from None
    if len(seen) != count:
        raise ValueError(f"{name}: expected one for each of {count} observations; found {len(seen)}")
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
    some = pictures[:: ceil(len(pictures) / _TRIED)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # the encoder releases the interpreter lock
        for side in _SIDES:
            small = partial(_webp_at_most, side)
            if sum(map(len, pool.map(small, some))) * len(pictures) > budget * len(some):
                continue
            files = list(pool.map(small, pictures))
            if sum(map(len, files)) <= budget:
                return files
    raise ValueError(
        f"images: {len(pictures)} pictures do not fit into the report, which stays under 20 MB; show fewer of them"
    )


def contact_sheet(pictures: Sequence[Image]) -> Sheet:
    """Every picture as a square tile, cut to its centre where it is not square."""
    from PIL import Image, ImageOps

    columns = ceil(sqrt(len(pictures)))
    if columns * TILE > _SHEET_SIDE:
        raise ValueError(f"images: a report shows at most {(_SHEET_SIDE // TILE) ** 2}; found {len(pictures)}")
    rows = ceil(len(pictures) / columns)
    sheet = Image.new("RGB", (columns * TILE, rows * TILE))
    for index, picture in enumerate(pictures):
        tile = ImageOps.fit(picture, (TILE, TILE), Image.Resampling.LANCZOS)
        sheet.paste(tile, (index % columns * TILE, index // columns * TILE))
    return Sheet(_webp(sheet, quality=60), columns, rows)


def mean_colour(pictures: Sequence[Image], patches: Sequence[tuple[int, int]], grid: tuple[int, int]) -> list[int]:
    """Red, green and blue, 0 to 255, of some patches given as (picture, patch)."""
    total = np.zeros(3)
    for index, patch in patches:
        picture = pictures[index]
        box = patch_box(patch, grid, (picture.height, picture.width))
        total += np.asarray(picture.crop((box.left, box.top, box.right, box.bottom)), np.float64).mean((0, 1))
    return [round(value) for value in total / len(patches)]


def _at_most(picture: Image, side: int) -> Image:
    from PIL import Image

    longer = max(picture.size)
    if longer <= side:
        return picture
    width, height = (max(1, round(length * side / longer)) for length in picture.size)
    return picture.resize((width, height), Image.Resampling.LANCZOS)


def _webp_at_most(side: int, picture: Image) -> bytes:
    return _webp(_at_most(picture, side), quality=75)


def _webp(picture: Image, quality: int) -> bytes:
    file = io.BytesIO()
    picture.save(file, "WEBP", quality=quality, method=2)
    return file.getvalue()
