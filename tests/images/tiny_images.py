"""Images small enough to make by the dozen."""

from __future__ import annotations

from pathlib import Path

from PIL import Image


def write_image(path: Path, value: int, size: tuple[int, int] = (6, 4)) -> None:
    """A plain image, recognisable by its grey value; `size` is (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value, value)).save(path, quality=100)
