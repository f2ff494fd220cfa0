"""Curves: the bound over the epochs, and the bound against the number of concepts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pace.explainer import PACE
from pace.showing.figures.drawing import plural
from pace.showing.figures.layout import PALETTE, SMALL, Layout, own_style

_MARGIN, _LEFT, _WIDTH = 4.0, 44.0, 240.0
_RIGHT = _WIDTH - _MARGIN - 4
_NEAR = 3  # concepts more or fewer than were found
_TERMS = (
    ("total", "Bound L", PALETTE[7], "-"),
    ("embedding", "L_e: the embeddings", PALETTE[0], "-"),
    ("faithfulness", "L_f: the predictions", PALETTE[5], "--"),
    ("stability", "L_s: stability", PALETTE[2], "-."),
)


@own_style()
def bound(model: PACE) -> Figure:
    """L = L_e + L_f + L_s per image after every epoch, a panel for each term, on its own scale.

    Terms that the model was fitted without (L_f without predictions, L_s without perturbed views) are left out.
    """
    bounds = model.lower_bounds_
    if not bounds:
        raise ValueError("the model has no epochs yet; there is no bound to show")
    curves = {name: np.array([getattr(value, name) for value in bounds]) for name, *_ in _TERMS}
    panels = [term for term in _TERMS if term[0] in ("total", "embedding") or curves[term[0]].any()]
    if len(panels) == 2:  # L_e is all there is
        panels = panels[1:]
    block = 78.0
    layout = Layout(_WIDTH, 2 * _MARGIN + len(panels) * block + 10)
    epochs = np.arange(1, len(bounds) + 1)
    for position, (name, title, color, dashes) in enumerate(panels):
        y, curve = _MARGIN + position * block, curves[name]
        ends = _short(curve[-1]) if len(curve) == 1 else f"{_short(curve[0])} → {_short(curve[-1])}"
        layout.write(_LEFT, y, title, bold=True)
        layout.note(_WIDTH - _MARGIN, y + 0.5, ends, align="right")
        axes = _panel(layout, y + 13, 52.0, _short)
        axes.plot(epochs, curve, color=color, linestyle=dashes, linewidth=1.3, clip_on=False, zorder=3)
        axes.plot(epochs[-1:], curve[-1:], marker="o", markersize=3.5, color=color, clip_on=False, zorder=3)
        axes.set_xlim(min(1, epochs[-1] - 1), epochs[-1])
        axes.tick_params(labelbottom=position == len(panels) - 1)
    layout.note(_RIGHT, layout.height - _MARGIN - SMALL - 1, "batch" if model.n_steps_ else "epoch", align="right")
    return layout


@own_style()
def number_of_concepts(model: PACE) -> Figure:
    """How far the bound lies below its best, in nats, for every number of concepts that was tried, and near the one found.

    The model has to be fitted with ``n_concepts="auto"``, or pruned.
    """
    selection = model.selection_
    if selection is None:
        raise ValueError(
            "the number of concepts was given, not found; there is a curve after n_concepts='auto' or prune=True"
        )
    numbers, below = selection.numbers.numpy(), (selection.bounds - selection.bounds.max()).numpy()
    near = abs(numbers - selection.n_concepts) <= _NEAR
    panels = [("All numbers tried", numbers, below)]
    if not near.all():
        panels.append((f"{numbers[near].min()} to {numbers[near].max()} concepts", numbers[near], below[near]))
    block = 88.0
    layout = Layout(_WIDTH, 2 * _MARGIN + 14 + len(panels) * block + 8)
    found = f"{plural(selection.n_concepts, 'concept')}, found in {selection.images} images"
    layout.write(_MARGIN, _MARGIN, found, bold=True)
    layout.note(_RIGHT, _MARGIN + 0.5, "nats below the best", align="right")
    for position, (title, x, y) in enumerate(panels):
        top = _MARGIN + 14 + position * block
        layout.note(_LEFT, top, title)
        axes = _panel(layout, top + 12, 58.0, lambda value: f"{value:,.0f}".replace("-", "−"))
        marker = "o" if len(x) <= 2 * _NEAR + 1 else ""
        axes.plot(x, y, color=PALETTE[0], linewidth=1.3, marker=marker, markersize=2.5, clip_on=False, zorder=3)
        best = x == selection.n_concepts
        axes.plot(x[best], y[best], marker="D", markersize=4.5, color=PALETTE[5], clip_on=False, zorder=4)
        axes.set_xlim(x[0] - (len(x) == 1), x[-1] + (len(x) == 1))
    layout.note(_RIGHT, layout.height - _MARGIN - SMALL - 1, "concepts", align="right")
    return layout


def _panel(layout: Layout, y: float, height: float, write: Callable[[float], str]) -> Axes:
    axes = layout.panel(_LEFT, y, _RIGHT - _LEFT, height, frame=True)
    axes.margins(y=0.1)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.5)
    return axes


def _short(value: float) -> str:
    """Short enough for a tick: four digits that count."""
    digits = max(0, 3 - int(np.floor(np.log10(max(abs(value), 1e-3)))))
    text = f"{value:,.{min(digits, 4)}f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text).replace("-", "−")
