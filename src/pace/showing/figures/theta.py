"""θ of images as bars with credible intervals."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from pace.explanation import Explanation
from pace.showing.figures.pieces import bar_room, chosen, show_bars, theta_rows
from pace.showing.figures.sheet import MUTED, SMALL, Look, Sheet, drawn, look

_MARGIN, _GAP, _ROW, _WIDTH, _COLUMNS = 4.0, 16.0, 11.0, 152.0, 3


@drawn
def theta_bars(
    explanation: Explanation,
    shown: Sequence[int] | None = None,
    *,
    concepts: Sequence[int] | None = None,
    n_concepts: int = 6,
    level: float = 0.9,
    titles: Sequence[str] | None = None,
) -> Figure:
    """Concept shares θ of some images, by default the first six, each with the largest concepts it shows or with those given.

    `titles` name the images shown. A concept looks the same in every panel.
    """
    rows = range(min(6, len(explanation))) if shown is None else [range(len(explanation))[m] for m in shown]
    heads = [f"image {m}" for m in rows] if titles is None else list(titles)
    if len(heads) != len(rows):
        raise ValueError(f"titles: expected {len(rows)}, one for each image shown; found {len(heads)}")
    wanted = [chosen(concepts, explanation.shown_concepts(m, n_concepts), explanation.n_concepts) for m in rows]
    looks: dict[int, Look] = {}
    for k in (k for own in wanted for k in own):
        looks.setdefault(k, look(len(looks)))
    bars = [
        theta_rows(explanation, m, own, [looks[k] for k in own], level, rest=True)
        for m, own in zip(rows, wanted, strict=True)
    ]
    labels, scale = bar_room(bars)
    columns = 2 if len(bars) == 4 else min(_COLUMNS, len(bars))
    block = 14 + _ROW * max(len(image) for image in bars)
    lines = -(-len(bars) // columns)
    sheet = Sheet(2 * _MARGIN + columns * (_WIDTH + _GAP) - _GAP, 2 * _MARGIN + lines * (block + 8) + 4)
    for position, (head, image) in enumerate(zip(heads, bars, strict=True)):
        line, column = divmod(position, columns)
        x, y = _MARGIN + column * (_WIDTH + _GAP), _MARGIN + line * (block + 8)
        sheet.write(x, y, head, bold=True, room=_WIDTH)
        show_bars(sheet, image, x, y + 12, _WIDTH, _ROW, labels, scale)
    note = f"θ, with {100 * level:.0f} % credible intervals"
    sheet.write(_MARGIN, sheet.height - _MARGIN - SMALL - 1, note, size=SMALL, color=MUTED)
    return sheet
