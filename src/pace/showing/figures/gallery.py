"""The concepts of a dataset, each with its typical patches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from pace.explainer import PACE
from pace.images.preparation import PreprocessingLike
from pace.observations import Observations
from pace.showing.figures.drawing import chosen, label_width, percent, plural, show_patches
from pace.showing.figures.layout import SMALL, Layout, own_style
from pace.showing.patches import Images, Pictures, grid_of
from pace.showing.summary import typical_patches, use_of

_MARGIN, _GAP, _TILE, _BETWEEN = 4.0, 20.0, 34.0, 3.0


@own_style()
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
    pictures, grid = Pictures(images, preprocessing, expected=len(observations)), grid_of(observations)
    use = use_of(model.concept_weights_)
    wanted = chosen(concepts, use.order[:n_concepts], len(use.shares))
    typical = typical_patches(model.means_[wanted], observations, n_patches)
    columns = min(2, len(wanted))
    lines = -(-len(wanted) // columns)
    label = label_width(wanted) + 8
    block = label + n_patches * (_TILE + _BETWEEN) - _BETWEEN
    layout = Layout(2 * _MARGIN + columns * (block + _GAP) - _GAP, 2 * _MARGIN + lines * (_TILE + 6) + SMALL + 2)
    for position, k in enumerate(wanted):
        column, line = divmod(position, lines)
        x, y = _MARGIN + column * (block + _GAP), _MARGIN + line * (_TILE + 6)
        layout.write(x, y, f"Concept {k}", bold=True)
        layout.note(x, y + 10, percent(float(use.shares[k])))
        show_patches(layout, pictures, typical.pairs(position), grid, margin, x + label, y, _TILE, _BETWEEN)
    more, empty = len(np.setdiff1d(use.order, wanted)), len(use.used) - len(use.order)
    notes = [plural(len(wanted), "concept"), *([f"{more} more in use"] if more else [])]
    notes += [f"{empty} of {len(use.used)} stayed empty"] if empty else []
    layout.note(_MARGIN, layout.height - _MARGIN - SMALL, " · ".join(notes))
    return layout
