"""Which patch of a picture shows what a patch of its perturbed view shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def matching_patches(crops: Any, grid: tuple[int, int]) -> npt.NDArray[np.int64]:
    """(M, patches): for each patch of a perturbed view, the patch of the picture that shows what is at its centre.

    crops (M, 4): left, top, right, bottom of what the view shows, as shares of the picture; left > right where it is mirrored.
    """
    boxes = np.asarray(crops, np.float64)
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise ValueError(f"crops: expected (images, 4): left, top, right, bottom; found {boxes.shape}")

    def along(start: npt.NDArray[Any], stop: npt.NDArray[Any], cells: int) -> npt.NDArray[np.int64]:
        centres = (np.arange(cells) + 0.5) / cells
        places = start[:, None] + centres * (stop - start)[:, None]
        whole: npt.NDArray[np.int64] = np.floor(places * cells).astype(np.int64)
        return whole.clip(0, cells - 1)  # rounding may put the edge outside

    left, top, right, bottom = boxes.T
    row, column = along(top, bottom, grid[0]), along(left, right, grid[1])
    return (row[:, :, None] * grid[1] + column[:, None]).reshape(len(boxes), -1)
