"""Color, the paper's synthetic dataset: four colours on black, so that the true concepts are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pace.images.generated import Generated
from pace.images.imageset import short_hash

COLOR_NAMES = ("black", "red", "yellow", "green", "blue")
PALETTE = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 1]], dtype=np.float32)
CLASS_COLORS = ((1, 2), (3, 4))  # class 0 is red and yellow, class 1 green and blue; both have black

_RECIPE = 1  # part of the fingerprint: raise it whenever the same settings would give other images


class Color(Generated):
    """Generated images, class 0 (red, yellow) and class 1 (green, blue), both with black.

    An image starts as 2 × 2 cells, each one of the class's two colours or black, with equal chance (four black cells
    are drawn again). They are up-sampled bilinearly, and Gaussian noise is added to every pixel and channel. Image j of a
    class depends on (seed, class, j) alone.

    Parameters
    ----------
    split : "train" (80 %) or "test" (20 %), the same share of both classes
    n_per_class : images of a class in both splits together
    size : height and width in pixels
    noise : standard deviation, where 1 is the whole range from black to full colour
    """

    def __init__(
        self, split: str = "train", n_per_class: int = 1000, size: int = 224, seed: int = 0, noise: float = 0.1
    ) -> None:
        titles = ["/".join(COLOR_NAMES[color] for color in colors) for colors in CLASS_COLORS]
        super().__init__(split, n_per_class, size, seed, noise, titles)

    def _draw(self, index: int) -> tuple[NDArray[np.int64], np.random.Generator]:
        """The 2 × 2 cells of an image, and the generator its noise comes from."""
        label, generator = self._generator(index)
        choices = np.array([0, *CLASS_COLORS[label]])
        while True:
            cells = choices[generator.integers(3, size=(2, 2))]
            if cells.any():
                return cells, generator

    def __getitem__(self, index: int) -> Tensor:
        cells, generator = self._draw(index)
        centres = (np.arange(self.size) + 0.5) / self.size
        pixels = _shade(cells, centres, centres)
        pixels += self.noise * generator.standard_normal(pixels.shape, dtype=np.float32)
        return torch.from_numpy(np.rint(pixels.clip(0, 1) * 255).astype(np.uint8)).permute(2, 0, 1)

    def patch_colors(
        self, index: int, grid: tuple[int, int] = (14, 14), box: Sequence[float] | None = None
    ) -> NDArray[np.int64]:
        """The true colour of every patch, an index into `COLOR_NAMES`, as a (rows, columns) array.

        It is the colour at the patch's centre before noise; between cells, the nearest of the image's own colours.
        ``box`` (left, top, right, bottom, in pixels) selects a part of the image.
        """
        left, top, right, bottom = (edge / self.size for edge in box or (0, 0, self.size, self.size))
        rows, columns = grid
        y = top + (bottom - top) * (np.arange(rows) + 0.5) / rows
        x = left + (right - left) * (np.arange(columns) + 0.5) / columns
        cells, _ = self._draw(index)
        colors = np.unique(cells)
        distances = ((_shade(cells, y, x)[:, :, None] - PALETTE[colors]) ** 2).sum(-1)
        nearest: NDArray[np.int64] = colors[distances.argmin(-1)]
        return nearest

    def fingerprint(self) -> str:
        return short_hash(["Color", _RECIPE, self.size, self.seed, self.noise, *self.names])


def _shade(cells: NDArray[np.int64], y: NDArray[np.floating], x: NDArray[np.floating]) -> NDArray[np.float32]:
    """Noise-free colours (len(y), len(x), 3) at relative positions 0 … 1.

    Bilinear with cell centres at ¼ and ¾, as image libraries up-sample: constant outside the centres.
    """
    down = (2 * y - 0.5).clip(0, 1)[:, None, None]
    right = (2 * x - 0.5).clip(0, 1)[None, :, None]
    corners = PALETTE[cells]
    above = (1 - right) * corners[0, 0] + right * corners[0, 1]
    below = (1 - right) * corners[1, 0] + right * corners[1, 1]
    shades: NDArray[np.float32] = ((1 - down) * above + down * below).astype(np.float32)
    return shades
