"""The concepts in use, those of classes as the paper shows them, and those of single images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure

from pace.explainer import PACE
from pace.explanation import Array, Explanation
from pace.images.preparation import PreprocessingLike
from pace.naming import class_titles, hidden_among
from pace.observations import Observations
from pace.showing import summary
from pace.showing.figures import drawing
from pace.showing.figures.drawing import HEAD, INK, MARGIN, PATCHES, ROW_WIDTH, SMALL, TILE, Fill, Layout, own_style
from pace.showing.patches import Images, Pictures, Pixels, grid_of

_CLASS_CONCEPTS, _CLASSES = 3, 3  # of each class; of all
_PICTURE, _HEAD, _SCALE = 112.0, 22.0, 34.0  # points of an overlay
# Darker is more, in print too.
_HEAT = LinearSegmentedColormap.from_list("heat", colormaps["OrRd"](np.linspace(0, 0.7, 64)))


@own_style()
def concept_gallery(
    model: PACE,
    images: Images,
    observations: Observations,
    *,
    preprocessing: PreprocessingLike | None = None,
    concepts: Sequence[int] | None = None,
    n_concepts: int = 24,
) -> Figure:
    """Concepts by use, most used first, with the share of patches they hold and the patches nearest to their mean.

    By default the `n_concepts` most used ones; those that hold nothing, or are hidden, are counted below, not shown.
    """
    pictures, grid = Pictures(images, preprocessing, expected=len(observations)), grid_of(observations)
    use, names = summary.use_of(model.concept_weights_), model.names_
    listed = [k for k in use.order if not names[k].hidden]
    wanted = drawing.chosen(concepts, listed[:n_concepts], len(use.shares))
    typical = summary.typical_patches(model.means_[wanted], observations, PATCHES)
    columns = min(2, len(wanted))
    lines = -(-len(wanted) // columns)
    gap, pitch = 20.0, TILE + 6
    layout = Layout(2 * MARGIN + columns * (ROW_WIDTH + gap) - gap, 2 * MARGIN + lines * pitch + SMALL + 2)
    for position, k in enumerate(wanted):
        column, line = divmod(position, lines)
        x, y = MARGIN + column * (ROW_WIDTH + gap), MARGIN + line * pitch
        share, name = f"{use.shares[k]:.1%}", drawing.title(names[k])
        drawing.show_concept(layout, name, [share], pictures, typical[position], grid, x, y)
    merged, hidden = sum(name.into is not None for name in names), len(use.order) - len(listed)
    more, empty = len(np.setdiff1d(listed, wanted)), len(use.used) - len(use.order) - merged
    notes = [drawing.plural(len(wanted), "concept"), *([f"{more} more in use"] if more else [])]
    notes += [f"{count} {what}" for count, what in ((hidden, "hidden"), (merged, "merged into others")) if count]
    notes += [f"{empty} of {len(use.used)} stayed empty"] if empty else []
    layout.note(MARGIN, layout.height - MARGIN - SMALL, " · ".join(notes))
    return layout


@own_style()
def class_concepts(
    model: PACE,
    images: Images,
    observations: Observations,
    classes: int | Sequence[int] | None = None,
    *,
    preprocessing: PreprocessingLike | None = None,
    class_names: Sequence[str] | None = None,
) -> Figure:
    """The concepts that speak for a class, at most three, each with the patches of all images nearest to its mean.

    A class is what the transformer predicts. Its top concepts are those that add most to its score over the other
    classes in its own images: mean θ_k of the images predicted as n, times `PACE.evidence_`. That
    alone would choose concepts that never occur in the class, θ alone the background that all classes share. Beside
    them, the image of the class that they add most to.

    `classes` are shown in the order given; by default the three with most images.
    """
    labels = summary.predicted_classes(observations)
    if labels is None or model.label_head_.shape[1] == 0:
        raise ValueError("classes need predictions, in the observations and when the model was fitted")
    pictures, grid = Pictures(images, preprocessing, expected=len(observations)), grid_of(observations)
    names = class_titles(summary.class_names(class_names, images, observations.n_classes))
    largest = np.argsort(-np.bincount(labels), kind="stable")[:_CLASSES]
    wanted = [int(n) for n in (largest[np.isin(largest, labels)] if classes is None else np.atleast_1d(classes))]
    missing = [n for n in wanted if n not in labels]
    if missing or not wanted:
        raise ValueError(f"classes: expected some that images are predicted as; found {missing or 'none'}")
    theta, evidence = np.asarray(model.transform(observations), np.float64), model.evidence_
    called = model.names_
    used = summary.use_of(model.concept_weights_).used & ~hidden_among(called)
    top = [
        [k for k, _ in summary.class_concepts(theta[labels == n], evidence[:, n], used, _CLASS_CONCEPTS)]
        for n in wanted
    ]
    typical = iter(summary.typical_patches(model.means_[[k for found in top for k in found]], observations, PATCHES))

    pitch = TILE + 4
    picture = max(2, *map(len, top)) * pitch - 4
    rows_x = MARGIN + picture + 12
    layout = Layout(rows_x + ROW_WIDTH + MARGIN, 2 * MARGIN + len(wanted) * (picture + 28) - 14)
    for position, (n, concepts) in enumerate(zip(wanted, top, strict=True)):
        y = MARGIN + position * (picture + 28)
        own = np.flatnonzero(labels == n)
        layout.write(MARGIN, y, names[n], size=HEAD, bold=True, room=layout.width - 2 * MARGIN - 60)
        layout.note(layout.width - MARGIN, y + 2, drawing.plural(len(own), "image"), align="right")
        best = own[(theta[own][:, concepts] @ evidence[concepts, n]).argmax()]
        drawing.show(layout, pictures[best], MARGIN, y + 14, picture, picture)
        if not concepts:
            layout.note(rows_x, y + 15, "No concept in use speaks for this class.")
        for line, k in enumerate(concepts):
            shares = [f"θ {theta[own, k].mean():.2f} in this class", f"θ {theta[:, k].mean():.2f} in all images"]
            notes = [*shares, f"speaks for it {evidence[k, n]:+.2f}".replace("-", "−")]
            drawing.show_concept(
                layout, drawing.title(called[k]), notes, pictures, next(typical), grid, rows_x, y + 14 + line * pitch
            )
    return layout


@own_style()
def overlay(
    images: Images,
    explanation: Explanation,
    image: int,
    concepts: int | Sequence[int] | None = None,
    *,
    preprocessing: PreprocessingLike | None = None,
    n_concepts: int = 3,
    level: float = 0.9,
    title: str | None = None,
) -> Figure:
    """φ of one concept or several over an image, beside the image itself; a line goes around φ ≥ 0.5.

    `concepts` is one concept, several, or None for those with the largest θ in the image. `images` are those that were
    explained, in the same order.
    """
    pixels = Pictures(images, preprocessing, expected=len(explanation))[image]
    wanted = drawing.chosen(concepts, explanation.shown_concepts(image, n_concepts), explanation.n_concepts)
    low, high = (end[0] for end in explanation[image].interval(level))
    gap, columns = 8.0, min(4, len(wanted) + 1)
    lines = -(-(len(wanted) + 1) // columns)
    tall = _PICTURE * min(1.0, pixels.shape[0] / pixels.shape[1])
    block = _HEAD + tall + gap
    layout = Layout(2 * MARGIN + columns * (_PICTURE + gap) + _SCALE, 2 * MARGIN + lines * block - gap)
    layout.write(MARGIN, MARGIN, title or f"image {range(len(explanation))[image]}", bold=True, room=_PICTURE)
    drawing.show(layout, pixels, MARGIN, MARGIN + _HEAD, _PICTURE, tall)
    for position, k in enumerate(wanted, 1):
        line, column = divmod(position, columns)
        x, y = MARGIN + column * (_PICTURE + gap), MARGIN + line * block
        layout.write(x, y, drawing.title(explanation.names[k]), bold=True, room=_PICTURE)
        interval = f"{level:.0%} in [{low[k]:.2f}, {high[k]:.2f}]"
        layout.note(x, y + 10, f"θ {explanation.theta[image, k]:.2f}, {interval}", room=_PICTURE)
        _show_heat(layout, pixels, explanation.patch_map(image, k), x, y + _HEAD, tall)
    x, y = layout.width - MARGIN - _SCALE + 4, MARGIN + _HEAD + tall * 0.1
    scale = ScalarMappable(Normalize(0, 1), _HEAT)
    layout.colorbar(scale, cax=layout.panel(x, y, 6, tall * 0.8), ticks=[0, 0.5, 1])
    layout.write(x, y - 11, "φ", color=drawing.MUTED)
    return layout


def _show_heat(layout: Layout, pixels: Pixels, heat: Array, x: float, y: float, tall: float) -> None:
    """The image in grey, multiplied by the colours of `heat` (rows, columns), so that what it shows stays visible."""
    colors = _HEAT(drawing.on_pixels(np.asarray(heat, np.float64), pixels))[:, :, :3]
    place = drawing.show(layout, (drawing.faded(pixels) * colors).astype(np.uint8), x, y, _PICTURE, tall)
    for color, thickness in (("white", 1.7), (INK, 0.8)):
        drawing.show_borders(layout, np.pad(heat >= 0.5, 1), pixels, place, color, thickness)


@own_style()
def theta_bars(
    explanation: Explanation,
    shown: Sequence[int] | None = None,
    *,
    concepts: Sequence[int] | None = None,
    n_concepts: int = 6,
    level: float = 0.9,
) -> Figure:
    """Concept shares θ of some images, by default the first six: of the `concepts` given, or of each image's largest.

    A concept looks the same in every panel.
    """
    rows = range(min(6, len(explanation))) if shown is None else [range(len(explanation))[m] for m in shown]
    wanted = [drawing.chosen(concepts, explanation.shown_concepts(m, n_concepts), explanation.n_concepts) for m in rows]
    fills: dict[int, Fill] = {}
    names = explanation.names
    for k in (k for own in wanted for k in own):
        fills.setdefault(k, drawing.fill(len(fills)))
    bars = [
        drawing.theta_bars_of(explanation, m, {k: fills[k] for k in own}, level, names)
        for m, own in zip(rows, wanted, strict=True)
    ]
    scale = max(bar.high for image in bars for bar in image)
    row, width, gap, columns = 11.0, 152.0, 16.0, 2 if len(bars) == 4 else min(3, len(bars))
    block = 22 + row * max(len(image) for image in bars)
    lines = -(-len(bars) // columns)
    layout = Layout(2 * MARGIN + columns * (width + gap) - gap, 2 * MARGIN + lines * block + 4)
    for position, (m, image) in enumerate(zip(rows, bars, strict=True)):
        line, column = divmod(position, columns)
        x, y = MARGIN + column * (width + gap), MARGIN + line * block
        layout.write(x, y, f"image {m}", bold=True)
        drawing.show_bars(layout, image, x, y + 12, width, row, scale)
    layout.note(MARGIN, layout.height - MARGIN - SMALL - 1, f"θ, with {level:.0%} credible intervals")
    return layout
