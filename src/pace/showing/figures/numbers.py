"""How many concepts: the bound against their number."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pace.explainer import PACE
from pace.explanation import Array
from pace.showing.figures.sheet import BODY, MUTED, PALETTE, SMALL, Sheet, drawn

_MARGIN, _LEFT, _PANEL, _BLOCK, _WIDTH = 4.0, 44.0, 58.0, 88.0, 240.0
_NEAR = 3  # concepts more or fewer than were found


@drawn
def number_of_concepts(model: PACE) -> Figure:
    """What the bound loses with other numbers of concepts than the one that was found: all that were tried, and those near it.

    In nats, of the images that were looked at. The model has to be fitted with ``n_concepts="auto"``, or pruned.
    """
    selection = model.selection_
    if selection is None:
        raise ValueError(
            "the number of concepts was given, not found; there is a curve after n_concepts='auto' or prune=True"
        )
    numbers, below = selection.numbers.numpy(), (selection.bounds - selection.bounds.max()).numpy()
    near = abs(numbers - selection.n_concepts) <= _NEAR
    panels = [("All numbers that were tried", numbers, below)]
    if not near.all():
        panels.append((f"{numbers[near].min()} to {numbers[near].max()} concepts", numbers[near], below[near]))
    sheet = Sheet(_WIDTH, 2 * _MARGIN + 14 + len(panels) * _BLOCK + 8)
    found = f"{selection.n_concepts} concepts" if selection.n_concepts > 1 else "1 concept"
    sheet.write(_MARGIN, _MARGIN, f"{found}, found in {selection.images} images", size=BODY, bold=True)
    sheet.write(_WIDTH - _MARGIN - 4, _MARGIN + 0.5, "nats below the best", size=SMALL, color=MUTED, align="right")
    for position, (title, x, y) in enumerate(panels):
        _panel(sheet, _MARGIN + 14 + position * _BLOCK, title, x, y, selection.n_concepts)
    bottom = sheet.height - _MARGIN - SMALL - 1
    sheet.write(_WIDTH - _MARGIN - 4, bottom, "concepts", size=SMALL, color=MUTED, align="right")
    return sheet


def _panel(sheet: Sheet, top: float, title: str, numbers: Array, below: Array, found: int) -> None:
    sheet.write(_LEFT, top, title, size=SMALL, color=MUTED)
    axes = sheet.place(_LEFT, top + 12, _WIDTH - _LEFT - _MARGIN - 4, _PANEL, frame=True)
    marker = "o" if len(numbers) <= 2 * _NEAR + 1 else ""
    axes.plot(numbers, below, color=PALETTE[0], linewidth=1.3, marker=marker, markersize=2.5, clip_on=False, zorder=3)
    axes.plot(found, below[numbers == found], marker="D", markersize=4.5, color=PALETTE[5], clip_on=False, zorder=4)
    axes.set_xlim(numbers[0] - (len(numbers) == 1), numbers[-1] + (len(numbers) == 1))
    axes.margins(y=0.1)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}".replace("-", "−")))
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.5)
