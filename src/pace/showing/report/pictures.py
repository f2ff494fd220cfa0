"""The pictures of a report: the pixels the model saw, small enough to fit into one file."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import ceil, sqrt
from typing import Any

from PIL import Image, ImageOps

from pace.images import PreprocessingLike
from pace.showing.patches import Images, Pictures

MIME = "image/webp"
TILE = 64  # side, in pixels, of a picture in the contact sheet
_SIDES = (224, 192, 160, 128, 96, 64, 48)  # longer side of a picture; the first that fits is taken
_TRIED = 16  # pictures from which the size of all is estimated


def read_pictures(images: Images, count: int, preprocessing: PreprocessingLike | None, name: str) -> list[Image.Image]:
    """One picture for each of `count` images, none larger than a report shows; `name` is the argument's, for errors."""
    seen = Pictures(images, preprocessing, expected=count, name=name)
    pictures = [_at_most(Image.fromarray(seen[index]), _SIDES[0]) for index in range(count)]
    for index, picture in enumerate(pictures):
        if picture.size != pictures[0].size:
            (width, height), (first_width, first_height) = picture.size, pictures[0].size
            raise ValueError(
                f"{name}: image {index} has {width} x {height} pixels and image 0 {first_width} x {first_height}; "
                "pass preprocessing=backbone.preprocessing"
            )
    return pictures


def encode(pictures: Sequence[Image.Image], budget: int) -> list[str]:
    """The pictures as WebP in base64, as large as fits into `budget` characters, with a line break after each."""
    sample = pictures[:: ceil(len(pictures) / _TRIED)]
    with ThreadPoolExecutor() as pool:  # the encoder releases the interpreter lock

        def texts(of: Sequence[Image.Image], side: int) -> list[str]:
            return list(pool.map(lambda picture: _webp(_at_most(picture, side), quality=75), of))

        for side in _SIDES:
            if sum(map(len, texts(sample, side))) * len(pictures) > budget * len(sample):
                continue
            encoded = texts(pictures, side)
            if sum(map(len, encoded)) + len(encoded) <= budget:
                return encoded
    raise ValueError(f"images: {len(pictures)} pictures do not fit into the report's 20 MB; show fewer of them")


def contact_sheet(pictures: Sequence[Image.Image]) -> dict[str, Any]:
    """All pictures as small square tiles of one picture, which is decoded at once."""
    columns = ceil(sqrt(len(pictures)))
    rows = ceil(len(pictures) / columns)
    sheet = Image.new("RGB", (columns * TILE, rows * TILE))
    for index, picture in enumerate(pictures):
        tile = ImageOps.fit(picture, (TILE, TILE), Image.Resampling.LANCZOS)
        sheet.paste(tile, (index % columns * TILE, index // columns * TILE))
    return {"base64": _webp(sheet, quality=60), "columns": columns, "rows": rows}


def _at_most(picture: Image.Image, side: int) -> Image.Image:
    if max(picture.size) <= side:
        return picture
    return ImageOps.contain(picture, (side, side), Image.Resampling.LANCZOS)


def _webp(picture: Image.Image, quality: int) -> str:
    file = io.BytesIO()
    picture.save(file, "WEBP", quality=quality, method=2)
    return b64encode(file.getvalue()).decode()
