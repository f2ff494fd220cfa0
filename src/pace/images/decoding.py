"""Image files to RGB: whatever a file holds, the pixels come out as a person would see them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from math import ceil, sqrt
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch
from torch import Tensor

from pace.terminal import visible

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = {  # with their usual endings; no other decoder sees an untrusted file
    "AVIF": [".avif"],
    "BMP": [".bmp"],
    "GIF": [".gif"],
    "HEIF": [".heic", ".heif"],
    "JPEG": [".jpeg", ".jpg"],
    "PNG": [".png"],
    "PPM": [".pgm", ".ppm"],
    "TIFF": [".tif", ".tiff"],
    "WEBP": [".webp"],
}
_ORIENTATION = 0x0112  # in EXIF data
_USUAL = 89_478_485  # pixels that Pillow finds safe, unless told otherwise
_COPIED = {"AVIF", "HEIF", "PPM", "TIFF", "WEBP"}  # whose decoders take up to 17 bytes a pixel
_FEWER = 60_000_000  # pixels of these
_PLENTY = 25_000_000  # pixels; a larger picture is reduced by a whole number, since no model sees so many


class _Room:
    """How many pixels all threads together may decode at a time; a larger picture waits until it is alone."""

    def __init__(self, pixels: int) -> None:
        self._all = self._free = pixels
        self._freed = Condition()

    @contextmanager
    def taken(self, pixels: int) -> Iterator[None]:
        pixels = min(pixels, self._all)
        with self._freed:
            self._freed.wait_for(lambda: pixels <= self._free)
            self._free -= pixels
        try:
            yield
        finally:
            with self._freed:
                self._free += pixels
                self._freed.notify_all()


_ROWS = 16
_NARROW = 200  # times that one side may be as long as the other; all of it is enlarged before a model's part is cut out
_room = _Room(100_000_000)  # eight photos of a telephone
if hasattr(os, "register_at_fork"):  # what other threads had taken is free in a new process
    os.register_at_fork(after_in_child=lambda: _room.__init__(_room._all))  # type: ignore[misc]


class UnreadableImageError(ValueError):
    """A file that is not an image, a damaged one, or one that is too large."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)  # both are kept in `args`, so that the error can be sent between processes
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        why = visible(f"{self.path} cannot be read as an image: {self.reason}")
        return f'{why}; leave such files out with on_error="skip"'


@cache
def readable() -> dict[str, list[str]]:
    """The formats that can be read here, with their endings: HEIF if pillow-heif is installed, AVIF if Pillow has it."""
    from PIL import Image

    with suppress(ImportError):
        import pillow_heif  # type: ignore[import-not-found]

        pillow_heif.register_heif_opener()
    Image.init()
    return {name: endings for name, endings in _FORMATS.items() if name in Image.OPEN}


def open_image(file: Path | BinaryIO) -> Image:
    """Pillow's image, of which only the header has been read; refused if it has too many pixels.

    That is as many as Pillow finds safe, but fewer in formats that take more memory, unless its limit was changed.
    """
    from PIL import Image, UnidentifiedImageError

    limit, too_many = (
        Image.MAX_IMAGE_PIXELS,
        "has more than {:,} pixels; if you trust it, raise PIL.Image.MAX_IMAGE_PIXELS",
    )
    try:
        image = Image.open(file, formats=list(readable()))
    except Image.DecompressionBombError as error:  # twice as many
        raise ValueError(too_many.format(limit)) from error
    except UnidentifiedImageError as error:
        raise ValueError(f"cannot identify image file as one of {', '.join(readable())}") from error
    limit = _FEWER if limit == _USUAL and image.format in _COPIED else limit
    if limit and image.width * image.height > limit:
        image.close()
        raise ValueError(too_many.format(limit))
    if max(image.size) > _NARROW * min(image.size):
        image.close()
        found = f"{image.width} x {image.height} pixels"
        raise ValueError(f"it has {found}; one side may be up to {_NARROW} times as long as the other")
    return image


def decode(file: Path | BinaryIO) -> Tensor:
    """The picture in a file, on disk or in memory, as a uint8 RGB tensor (3, h, w), upright.

    Greyscale is repeated over the channels, transparency is put on white, palettes and CMYK are converted, EXIF
    orientation is applied, and 16-bit values are scaled to 8 bits. Colour profiles are ignored, as in the pipelines that
    trained the usual models. Pictures of more than 25 million pixels are reduced to fewer, JPEGs while they are decoded.
    """

    try:
        with open_image(file) as image, _room.taken(image.width * image.height):
            if (excess := _excess(image)) > 1:
                image.draft(None, (image.width // excess, image.height // excess))  # only JPEGs can
            image.load()
            return upright(image)
    except Exception as error:  # decoders raise nearly anything on damaged data: OSError, SyntaxError, struct.error, …
        path = file if isinstance(file, Path) else Path("picture")
        if path.suffix.lower() in _FORMATS["HEIF"] and "HEIF" not in readable():
            raise UnreadableImageError(path, "HEIC needs pillow-heif (pip install pillow-heif)") from error
        raise UnreadableImageError(path, " ".join(str(error).split()) or type(error).__name__) from error


def upright(image: Image) -> Tensor:
    """A Pillow image as `decode` gives those in files."""
    from PIL import ImageOps

    rgb = _to_rgb(image)
    with suppress(Exception):  # damaged metadata of any kind; the picture itself is fine
        if (turned := image.getexif().get(_ORIENTATION, 1)) != 1:
            rgb.getexif()[_ORIENTATION] = turned
            rgb = ImageOps.exif_transpose(rgb)
    # Channels stay last in memory: that is how they were decoded, and resizing is fastest that way.
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1)


def _to_rgb(image: Image) -> Image:
    from PIL import Image as images

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        # Pillow clips 16 bits at 255 instead of scaling. 65535 / 257 = 255.
        grey = np.empty((image.height, image.width), np.uint8)
        for top in range(0, image.height, _ROWS):  # a few at a time, to need little memory
            rows = image.crop((0, top, image.width, min(top + _ROWS, image.height)))
            grey[top : top + _ROWS] = np.rint(np.asarray(rows) / 257).clip(0, 255)
        image = images.fromarray(grey)
    if image.mode in ("I", "F"):
        raise ValueError(f"{image.mode} pixels (32 bits) have no agreed brightness range; save it with 8 or 16 bits")
    mode = "RGBA" if image.has_transparency_data else "RGB"
    if image.mode == "LA":
        image = _reduced(image)  # first, since it takes more memory as RGBA
    image = _reduced(image if image.mode == mode else image.convert(mode))
    if mode == "RGBA":
        image = images.alpha_composite(images.new("RGBA", image.size, "white"), image).convert("RGB")
    return image


def _reduced(image: Image) -> Image:
    return image if _excess(image) == 1 else image.reduce(_excess(image))


def _excess(image: Image) -> int:
    """By how much a picture's sides have to shrink."""
    return ceil(sqrt(image.width * image.height / _PLENTY))
