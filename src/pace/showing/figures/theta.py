"""θ of images as bars with credible intervals."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from pace.explanation import Explanation
from pace.showing.figures.drawing import chosen, shared_scale, show_bars, theta_bars_of
from pace.showing.figures.layout import SMALL, Fill, Layout, fill, own_style

_MARGIN, _GAP, _ROW, _WIDTH, _COLUMNS = 4.0, 16.0, 11.0, 152.0, 3


@own_style()
def theta_bars(
    explanation: Explanation,
    shown: Sequence[int] | None = None,
    *,
    concepts: Sequence[int] | None = None,
    n_concepts: int = 6,
    level: float = 0.9,
    titles: Sequence[str] | None = None,
) -> Figure:
    """Concept shares θ of some images, by default the first six: of the `concepts` given, or of each image's largest.

    `titles` name the images shown. A concept looks the same in every panel.
    """
    rows = range(min(6, len(explanation))) if shown is None else [range(len(explanation))[m] for m in shown]
    heads = [f"image {m}" for m in rows] if titles is None else list(titles)
    if len(heads) != len(rows):
        raise ValueError(f"titles: expected {len(rows)}, one for each image shown; found {len(heads)}")
    wanted = [chosen(concepts, explanation.shown_concepts(m, n_concepts), explanation.n_concepts) for m in rows]
    fills: dict[int, Fill] = {}
    for k in (k for own in wanted for k in own):
        fills.setdefault(k, fill(len(fills)))
    bars = [
        theta_bars_of(explanation, m, own, [fills[k] for k in own], level) for m, own in zip(rows, wanted, strict=True)
    ]
    labels, scale = shared_scale(bars)
    columns = 2 if len(bars) == 4 else min(_COLUMNS, len(bars))
    block = 14 + _ROW * max(len(image) for image in bars)
    lines = -(-len(bars) // columns)
    layout = Layout(2 * _MARGIN + columns * (_WIDTH + _GAP) - _GAP, 2 * _MARGIN + lines * (block + 8) + 4)
    for position, (head, image) in enumerate(zip(heads, bars, strict=True)):
        line, column = divmod(position, columns)
        x, y = _MARGIN + column * (_WIDTH + _GAP), _MARGIN + line * (block + 8)
        layout.write(x, y, head, bold=True, room=_WIDTH)
        show_bars(layout, image, x, y + 12, _WIDTH, _ROW, labels, scale)
    layout.note(_MARGIN, layout.height - _MARGIN - SMALL - 1, f"θ, with {100 * level:.0f} % credible intervals")
    return layout
