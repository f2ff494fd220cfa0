"""Do the concepts of patches agree with what is known to be there: colours on Color, parts on CUB?

A patch's concept is its largest φ.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pace.metrics.agreement import Tables
from pace.metrics.declare import Array, Measure, metric
from pace.metrics.inputs import as_array, patches_of


@metric(
    title="Colour recovery",
    better="higher",
    range=(0, 1),
    meaning="Agreement (normalised mutual information) of a patch's concept with its true colour.",
)
def colour_recovery(phi: Any, colours: Any, prefix_tokens: int = 0) -> Measure:
    """NMI (arithmetic mean) over all patches; `colours` (M, rows, columns) or (M, patches) as `Color.patch_colors` gives them.

    Splitting a colour over several concepts costs a little, mixing colours in one concept a lot.
    """
    return _colour_tables(phi, colours, prefix_tokens).mutual_information()


@metric(
    title="Colour accuracy",
    better="higher",
    range=(0, 1),
    meaning="Share of patches with the right colour when every colour is given one concept of its own.",
)
def colour_accuracy(phi: Any, colours: Any, prefix_tokens: int = 0) -> Measure:
    """Colours and concepts are matched one to one, as well as can be, over all patches. Further concepts count as wrong."""
    from scipy.optimize import linear_sum_assignment

    tables = _colour_tables(phi, colours, prefix_tokens)

    def values(weights: Array) -> Array:
        joint = tables.joint(weights)
        return np.array([table[linear_sum_assignment(table, maximize=True)].sum() for table in joint])

    return Measure(tables.images, values)


@metric(
    title="Colour purity",
    better="higher",
    range=(0, 1),
    meaning="Share of patches with the right colour when every concept is named after the colour it is most often.",
)
def colour_purity(phi: Any, colours: Any, prefix_tokens: int = 0) -> Measure:
    """Many concepts may share a colour, so it rises with K: read it beside `colour_recovery`."""
    tables = _colour_tables(phi, colours, prefix_tokens)
    return Measure(tables.images, lambda weights: tables.joint(weights).max(2).sum(1))


@metric(
    title="Part consistency",
    better="higher",
    range=(0, 1),
    meaning="Agreement (normalised mutual information) of concept and body part over the patches that hold a visible part.",
)
def part_consistency(phi: Any, parts: Any, prefix_tokens: int = 0) -> Measure:
    """NMI (arithmetic mean); `parts` (M, n_parts) has the patch that holds each part, −1 where it cannot be seen.

    Patches count row by row without prefix tokens; `part_patches` finds them. A patch with two parts counts twice.
    """
    concepts, places = patches_of(phi, prefix_tokens), as_array(parts)
    if places.ndim != 2 or len(places) != len(concepts) or places.dtype.kind not in "iu":
        raise ValueError(
            f"parts: expected patch numbers of shape ({len(concepts)}, parts); found {places.dtype} {places.shape}"
        )
    if places.min(initial=-1) < -1 or places.max(initial=-1) >= concepts.shape[1]:
        raise ValueError(
            f"parts: expected patches -1 to {concepts.shape[1] - 1}; found {places.min()} to {places.max()}"
        )
    if not (places >= 0).any():
        raise ValueError("parts: no part is visible in any image")
    image, part = np.nonzero(places >= 0)
    leading = concepts.argmax(2)[image, places[image, part]]
    return Tables(len(concepts), image, leading, part).mutual_information()


def part_patches(points: Any, size: tuple[int, int], grid: tuple[int, int]) -> Array:
    """The patch (M, n_parts) that holds each point, −1 for points that are not visible or lie outside the image.

    points (M, n_parts, 3): x, y in pixels of the model's input (see `pace.images.prepare_points`), and whether it is visible.
    size: height and width of the model's input. grid: rows and columns of its patches.
    """
    array = as_array(points).astype(np.float64)
    if array.ndim != 3 or array.shape[2] != 3:
        raise ValueError(f"points: expected shape (images, parts, 3): x, y, visible; found {array.shape}")
    column = np.floor(array[:, :, 0] * grid[1] / size[1])
    row = np.floor(array[:, :, 1] * grid[0] / size[0])
    inside = (array[:, :, 2] > 0) & (row >= 0) & (row < grid[0]) & (column >= 0) & (column < grid[1])
    found: Array = np.where(inside, row * grid[1] + column, -1).astype(np.int64)
    return found


def _colour_tables(phi: Any, colours: Any, prefix_tokens: int) -> Tables:
    concepts, truth = patches_of(phi, prefix_tokens), as_array(colours)
    images, patches, _ = concepts.shape
    if truth.ndim not in (2, 3) or len(truth) != images or truth[0].size != patches:
        raise ValueError(
            f"colours: expected {images} images of {patches} patches, the tokens of phi after {prefix_tokens} prefix tokens; "
            f"found {truth.shape}"
        )
    image = np.repeat(np.arange(images), patches)
    return Tables(images, image, concepts.argmax(2).ravel(), truth.ravel())
