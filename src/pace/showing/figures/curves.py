"""The bound by term over the epochs."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pace.explainer import PACE
from pace.showing.figures.sheet import BODY, MUTED, PALETTE, SMALL, Sheet, drawn

_MARGIN, _LEFT, _PANEL, _BLOCK, _WIDTH = 4.0, 44.0, 52.0, 78.0, 240.0
_TERMS = (
    ("total", "Bound L", PALETTE[7], "-"),
    ("embedding", "L_e: the embeddings", PALETTE[0], "-"),
    ("faithfulness", "L_f: the predictions", PALETTE[5], "--"),
    ("stability", "L_s: stability", PALETTE[2], "-."),
)


@drawn
def bound(model: PACE) -> Figure:
    """L = L_e + L_f + L_s per image after every epoch, a panel for each term, on its own scale.

    Terms that the model was fitted without (L_f without predictions, L_s without perturbed views) are left out.
    """
    bounds = model.lower_bounds_
    if not bounds:
        raise ValueError("the model has no epochs yet; there is no bound to show")
    curves = {name: np.array([getattr(value, name) for value in bounds]) for name, *_ in _TERMS}
    panels = [term for term in _TERMS if term[0] in ("total", "embedding") or curves[term[0]].any()]
    if len(panels) == 2:  # the whole is the only term
        panels = panels[1:]
    sheet = Sheet(_WIDTH, 2 * _MARGIN + len(panels) * _BLOCK + 10)
    steps = np.arange(1, len(bounds) + 1)
    for position, (name, title, color, dashes) in enumerate(panels):
        y = _MARGIN + position * _BLOCK
        curve = curves[name]
        ends = _number(curve[-1]) if len(curve) == 1 else f"{_number(curve[0])} → {_number(curve[-1])}"
        sheet.write(_LEFT, y, title, size=BODY, bold=True)
        sheet.write(_WIDTH - _MARGIN, y + 0.5, ends, size=SMALL, color=MUTED, align="right")
        axes = sheet.place(_LEFT, y + 13, _WIDTH - _LEFT - _MARGIN - 4, _PANEL, frame=True)
        axes.plot(steps, curve, color=color, linestyle=dashes, linewidth=1.3, clip_on=False, zorder=3)
        axes.plot(steps[-1:], curve[-1:], marker="o", markersize=3.5, color=color, clip_on=False, zorder=3)
        axes.set_xlim(min(1, steps[-1] - 1), steps[-1])
        axes.margins(y=0.08)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(3))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.5)
        axes.tick_params(labelbottom=position == len(panels) - 1)
    unit = "batch" if model.n_steps_ else "epoch"
    sheet.write(_WIDTH - _MARGIN - 4, sheet.height - _MARGIN - SMALL - 1, unit, size=SMALL, color=MUTED, align="right")
    return sheet


def _number(value: float) -> str:
    """Short enough for a tick: four digits that count."""
    digits = max(0, 3 - int(np.floor(np.log10(max(abs(value), 1e-3)))))
    text = f"{value:,.{min(digits, 4)}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−")
