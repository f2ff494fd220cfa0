"""The concepts of a dataset, each with its nearest patches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from pace.explainer import PACE
from pace.images.preparation import PreprocessingLike
from pace.observations import Observations
from pace.showing.figures.pieces import (
    chosen,
    grid_of,
    in_use,
    label_width,
    nearest,
    percent,
    pictures_of,
    plural,
    shares,
    show_patch,
)
from pace.showing.figures.sheet import MUTED, SMALL, Sheet, drawn
from pace.showing.patches import Images

_MARGIN, _GAP, _TILE = 4.0, 20.0, 34.0


@drawn
def concept_gallery(
    model: PACE,
    images: Images,
    observations: Observations,
    *,
    preprocessing: PreprocessingLike | None = None,
    concepts: Sequence[int] | None = None,
    n_concepts: int = 24,
    n_patches: int = 5,
    margin: int = 1,
) -> Figure:
    """Concepts by use, most used first, with the share of patches they hold and the patches nearest to their mean.

    By default the `n_concepts` most used ones; concepts that hold nothing are counted below, not shown.
    """
    pictures, grid, use = pictures_of(images, preprocessing, observations), grid_of(observations), shares(model)
    used = in_use(model)
    wanted = chosen(concepts, used[np.argsort(-use[used], kind="stable")[:n_concepts]], len(use))
    columns = min(2, len(wanted))
    lines = -(-len(wanted) // columns)
    label = label_width(wanted) + 8
    block = label + n_patches * (_TILE + 3) - 3
    sheet = Sheet(2 * _MARGIN + columns * (block + _GAP) - _GAP, 2 * _MARGIN + lines * (_TILE + 6) + SMALL + 2)
    for position, k in enumerate(wanted):
        column, line = divmod(position, lines)
        x, y = _MARGIN + column * (block + _GAP), _MARGIN + line * (_TILE + 6)
        sheet.write(x, y, f"Concept {k}", bold=True)
        sheet.write(x, y + 10, percent(float(use[k])), size=SMALL, color=MUTED)
        for tile, where in enumerate(nearest(model, observations, k, n_patches)):
            show_patch(sheet, pictures, where, grid, margin, x + label + tile * (_TILE + 3), y, _TILE)
    more, empty = len(np.setdiff1d(used, wanted)), len(use) - len(used)
    notes = [plural(len(wanted), "concept"), *([f"{more} more in use"] if more else [])]
    notes += [f"{empty} of {len(use)} stayed empty"] if empty else []
    sheet.write(_MARGIN, sheet.height - _MARGIN - SMALL, " · ".join(notes), size=SMALL, color=MUTED)
    return sheet
