"""Image files to RGB: whatever a file holds, the pixels come out as a person would see them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # no other decoder sees an untrusted file
_ORIENTATION = 0x0112  # in EXIF data


class UnreadableImageError(ValueError):
    """A file that is not an image, or a damaged one."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)  # both are kept in `args`, so that the error can be sent between processes
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f'{self.path} cannot be read as an image: {self.reason}; leave such files out with on_error="skip"'


def decode(path: Path) -> Tensor:
    """The picture in a file as a uint8 RGB tensor (3, h, w), upright.

    Greyscale is repeated over the channels, transparency is put on white, palettes and CMYK are converted, EXIF
    orientation is applied, and 16-bit values are scaled to 8 bits. Colour profiles are ignored, as in the pipelines that
    trained the usual models.
    """
    from PIL import Image

    try:
        with Image.open(path, formats=_FORMATS) as image:
            image.load()
            return upright(image)
    except Exception as error:  # decoders raise nearly anything on damaged data: OSError, SyntaxError, struct.error, …
        raise UnreadableImageError(path, " ".join(str(error).split()) or type(error).__name__) from error


def upright(image: Image) -> Tensor:
    """A Pillow image as `decode` gives those in files."""
    from PIL import ImageOps

    rgb = _to_rgb(image)
    with suppress(Exception):  # damaged metadata of any kind; the picture itself is fine
        rgb.getexif()[_ORIENTATION] = image.getexif().get(_ORIENTATION, 1)
        rgb = ImageOps.exif_transpose(rgb)
    # Channels stay last in memory: that is how they were decoded, and resizing is fastest that way.
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1)


def _to_rgb(image: Image) -> Image:
    from PIL import Image as images

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        # Pillow clips 16 bits at 255 instead of scaling. 65535 / 257 = 255.
        values = np.asarray(image, dtype=np.float64) / 257
        return images.fromarray(np.rint(values).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"{image.mode} pixels (32 bits) have no agreed brightness range; save it with 8 or 16 bits")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return images.alpha_composite(images.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")
