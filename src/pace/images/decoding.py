"""Image files to RGB: whatever a file holds, the pixels come out as they are meant to be seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})


class UnreadableImageError(ValueError):
    """One file that is no image, or a damaged one."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path} cannot be read as an image: {reason}")


def decode(path: Path, reduced: bool = False) -> Tensor:
    """The picture in a file as a uint8 RGB tensor (3, h, w), upright.

    Greyscale is repeated over the channels, transparency is laid on white, palettes and CMYK are converted, EXIF
    orientation is applied, and 16-bit values are scaled to 8 bits. Colour profiles are ignored, as the pipelines that
    trained the usual models do. ``reduced`` reads every byte but lets JPEG decode at an eighth of the size: that finds
    all damage at a fraction of the cost.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            if reduced:
                image.draft(None, (1, 1))
            image.load()
            pixels = np.array(_upright(_to_rgb(image), _orientation(image)))
    except MemoryError:
        raise
    except Exception as error:  # decoders raise nearly anything on damaged data: OSError, SyntaxError, struct.error, …
        raise UnreadableImageError(path, _reason(error)) from error
    # Channels stay last in memory: that is how they were decoded, and resizing is fastest so.
    return torch.from_numpy(pixels).permute(2, 0, 1)


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


def _orientation(image: Image) -> int:
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception:  # damaged metadata of any kind; the picture itself is fine
        return 1


def _upright(image: Image, orientation: int) -> Image:
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(turns[orientation]) if orientation in turns else image


def _reason(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "no known image format"
    if isinstance(error, FileNotFoundError):
        return "no such file"
    return " ".join(str(error).split()) or type(error).__name__
