"""What several figures are made of: tiles of patches, bars of θ, and the choice of what to show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Affine2D, Transform
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from pace.explainer import PACE
from pace.explanation import Array, Explanation
from pace.images.imageset import ImageSet
from pace.images.preparation import PreprocessingLike
from pace.observations import Observations
from pace.showing.figures.sheet import BODY, INK, MUTED, PALETTE, RULE, SMALL, Look, Sheet, look, width_of
from pace.showing.patches import Images, Pictures, Pixels, patch_box

Grid = tuple[int, int]

_SEEN = 0.005  # share that is not written as 0.00


class Bar(NamedTuple):
    """One row of a bar chart of θ."""

    label: str
    value: float
    low: float
    high: float
    look: Look


# -- what to show -----------------------------------------------------------------------------------------------------


def pictures_of(images: Images, preprocessing: PreprocessingLike | None, observations: Observations) -> Pictures:
    pictures = Pictures(images, preprocessing)
    if len(pictures) != len(observations):
        raise ValueError(f"images: expected the {len(observations)} that were observed; found {len(pictures)}")
    return pictures


def grid_of(of: Observations | Explanation) -> Grid:
    if of.grid is None:
        raise ValueError("the layout of the patches is unknown; pass grid=(rows, columns) to Observations")
    return of.grid


def shares(model: PACE) -> Array:
    """The part (K,) of all patches that each concept holds, weighted as the model weighs them."""
    weights = np.nan_to_num(np.asarray(model.concept_weights_, np.float64))
    part: Array = weights / max(weights.sum(), np.finfo(np.float64).tiny)
    return part


def in_use(model: PACE) -> Array:
    """The concepts that are not empty, in order; all, if all are."""
    used: Array = np.setdiff1d(np.arange(len(model.means_)), model.empty_concepts_)
    return used if len(used) else np.arange(len(model.means_))


def chosen(concepts: int | Sequence[int] | Array | None, usual: Array, total: int) -> list[int]:
    """The concepts asked for, of `total`, or the usual ones."""
    found = [int(k) for k in np.atleast_1d(usual if concepts is None else concepts)]
    wrong = [k for k in found if not 0 <= k < total]
    if wrong or not found:
        raise ValueError(f"concepts: expected some of 0 to {total - 1}; found {wrong or 'none'}")
    return found


def names_of(class_names: Sequence[str] | None, images: object, n_classes: int) -> list[str]:
    """One name a class: those given, those of the image set where they fit, or numbers."""
    if class_names is None and isinstance(images, ImageSet) and len(images.class_names or ()) == n_classes:
        class_names = images.class_names
    if class_names is None:
        return [f"class {number}" for number in range(n_classes)]
    if len(class_names) < n_classes:
        raise ValueError(f"class_names: expected {n_classes}; found {len(class_names)}")
    return [str(name) for name in class_names]


def label_width(concepts: Sequence[int]) -> float:
    """Points that the longest of the names "Concept k" takes."""
    return max(width_of(f"Concept {k}", BODY, "bold") for k in concepts)


def nearest(model: PACE, observations: Observations, concept: int, n: int) -> list[tuple[int, int]]:
    """(image, patch) of the patches closest to μ_k, each of another image as long as there are enough images.

    Neighbouring patches are much alike, and five of one image say less than one of each of five.
    """
    asked = n
    while True:
        found = model.nearest_patches(observations, concept, asked)
        first = np.sort(np.unique(found.images, return_index=True)[1])
        if len(first) >= min(n, len(observations)) or len(found.images) < asked:
            break
        asked *= 8
    rest = np.setdiff1d(np.arange(len(found.images)), first)
    order = np.sort(np.concatenate([first, rest])[:n])
    return [(int(found.images[i]), int(found.patches[i])) for i in order]


def looks_like(colors: Array) -> list[Look]:
    """Looks for concepts by the mean colours (n, 3), 0 … 255, of their patches.

    Each gets the colour of the palette that suits it best, so that a concept of green patches is not drawn in blue.
    Hatches go by position. More concepts than the palette has colours are told apart by position alone.
    """
    looks = [look(position) for position in range(len(colors))]
    if len(colors) > len(PALETTE):
        return looks
    wanted, offered = (_tone(np.asarray(of, np.float64)) for of in (colors, [_rgb(color) for color in PALETTE]))
    cost = np.linalg.norm(wanted[:, None] - offered[None], axis=2)
    return [own._replace(color=PALETTE[best]) for own, best in zip(looks, linear_sum_assignment(cost)[1], strict=True)]


def _rgb(color: str) -> Array:
    return 255 * np.array(to_rgb(color))


def _tone(colors: Array) -> Array:
    """Hue before brightness: dark green is green."""
    brightness = colors.mean(1, keepdims=True)
    return np.hstack([colors - brightness, 0.8 * brightness])


# -- drawing ----------------------------------------------------------------------------------------------------------


def fitted(size: Sequence[int], width: float, height: float) -> tuple[float, float]:
    """Width and height of (height, width) pixels made as large as the room allows."""
    scale = min(width / size[1], height / size[0])
    return size[1] * scale, size[0] * scale


def show(sheet: Sheet, pixels: Array, x: float, y: float, width: float, height: float) -> Transform:
    """A picture in the middle of its room. What is drawn on it later is given in its pixels, with the transform returned.

    A hairline goes around it, which white images need.
    """
    wide, high = fitted(pixels.shape, width, height)
    left, top = x + (width - wide) / 2, y + (height - high) / 2
    # "antialiased" leaves enlarged pixels squares, so that a patch is not sharper on paper than the model saw it.
    sheet.paper.imshow(pixels, extent=(left, left + wide, top + high, top), aspect="auto", interpolation="antialiased")
    sheet.paper.add_patch(Rectangle((left, top), wide, high, fill=False, edgecolor=RULE, linewidth=0.5))
    scale = Affine2D().scale(wide / pixels.shape[1], high / pixels.shape[0])
    return scale.translate(left, top) + sheet.paper.transData


def show_patch(
    sheet: Sheet, pictures: Pictures, where: tuple[int, int], grid: Grid, margin: int, x: float, y: float, side: float
) -> None:
    """A patch among its neighbours, framed in black and white, which can be seen on any picture."""
    image, patch = where
    size = pictures[image].shape[:2]
    place = show(sheet, pictures.patch(image, patch, grid, margin), x, y, side, side)
    if margin:
        window, box = patch_box(patch, grid, size, margin), patch_box(patch, grid, size)
        corner, wide, high = (box.left - window.left, box.top - window.top), box.right - box.left, box.bottom - box.top
        for color, line in (("white", 1.8), (INK, 0.8)):
            frame = Rectangle(corner, wide, high, fill=False, edgecolor=color, linewidth=line, transform=place)
            sheet.paper.add_patch(frame)


def theta_rows(
    explanation: Explanation, image: int, concepts: Sequence[int], looks: Sequence[Look], level: float, rest: bool
) -> list[Bar]:
    """θ of some concepts of an image and, with `rest`, of all others together (sums of Dirichlet shares are Beta too).

    Others are counted if the image shows them. Without any there is no such row, unless what little each has adds up.
    """
    part = explanation[image]
    low, high = part.interval(level)
    rows = [
        Bar(f"Concept {k}", float(part.theta[0, k]), float(low[0, k]), float(high[0, k]), style)
        for k, style in zip(concepts, looks, strict=True)
    ]
    others = np.setdiff1d(np.arange(explanation.n_concepts), concepts)
    shown = len(np.setdiff1d(part.shown_concepts(0), concepts))
    if rest and len(others) and (shown or part.theta[0, others].sum() >= _SEEN):
        gamma = part.gamma.astype(np.float64)
        pooled = np.array([[gamma[0, others].sum(), gamma[0, list(concepts)].sum()]])
        summed = Explanation(pooled / pooled.sum(), pooled)
        low, high = summed.interval(level)
        name = plural(shown, "other") if shown else "the rest"
        rows.append(Bar(name, float(summed.theta[0, 0]), float(low[0, 0]), float(high[0, 0]), Look(RULE, "")))
    return rows


def show_bars(
    sheet: Sheet, bars: Sequence[Bar], x: float, y: float, width: float, row: float, labels: float, scale: float
) -> None:
    """Bars with their credible intervals from 0 to `scale`, labelled on the left, with their values on the right."""
    values = width_of("0.00", SMALL) + 4
    span = width - labels - values
    axes = sheet.place(x + labels, y, span, row * len(bars))
    axes.set(xlim=(0, scale), ylim=(len(bars), 0))
    axes.plot([0, 0], [0, len(bars)], color=MUTED, linewidth=0.6, clip_on=False)
    for position, bar in enumerate(bars):
        middle = position + 0.5
        axes.barh(
            middle,
            bar.value,
            0.62,
            color=bar.look.color,
            hatch=bar.look.hatch,
            edgecolor="white",
            linewidth=0,
            zorder=2,
        )
        across = [bar.low, bar.low, bar.low, bar.high, bar.high, bar.high]
        down = [middle - 0.18, middle + 0.18, middle, middle, middle - 0.18, middle + 0.18]
        rim = [withStroke(linewidth=2, foreground="white")]  # seen on dark bars too
        axes.plot(across, down, color=INK, linewidth=0.9, clip_on=False, path_effects=rim, zorder=3)
        top = y + row * middle - SMALL * 0.5
        sheet.write(x + labels - 4, top, bar.label, size=SMALL, align="right")
        sheet.write(x + labels + span * bar.high / scale + 4, top, f"{bar.value:.2f}", size=SMALL, color=MUTED)


def bar_room(panels: Sequence[Sequence[Bar]]) -> tuple[float, float]:
    """What panels side by side share: the width of their labels, and a scale on which the longest interval fits."""
    bars = [bar for panel in panels for bar in panel]
    return max(width_of(bar.label, SMALL) for bar in bars) + 4, max(bar.high for bar in bars) or 1.0


def faded(pixels: Pixels) -> Array:
    """Grey and light: a ground on which colours can be read."""
    grey = pixels.astype(np.float64) @ np.array([0.2989, 0.587, 0.114])
    light: Array = np.repeat((130 + grey * 125 / 255)[:, :, None], 3, 2).astype(np.uint8)
    return light


def percent(share: float) -> str:
    if 0 < share < 0.001:
        return "< 0.1 %"
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"


def plural(count: int, thing: str) -> str:
    return f"{count} {thing}" + ("" if count == 1 else "s")


def predicted(observations: Observations) -> Array | None:
    """The class ŷ_m of every image; None without predictions."""
    if observations.predictions is None:
        return None
    found = observations.predictions[:]
    classes: Array = np.asarray(found.cpu() if isinstance(found, Tensor) else found).argmax(1)
    return classes
