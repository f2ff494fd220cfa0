"""The concept map: where the concepts lie, how far they spread, and how much they are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Ellipse, Rectangle
from matplotlib.patheffects import withStroke

from pace.explainer import PACE
from pace.explanation import Array
from pace.showing.figures.pieces import percent, plural, shares
from pace.showing.figures.sheet import INK, MUTED, PALETTE, RULE, SMALL, Sheet, drawn, width_of

_MARGIN, _WIDTH, _FOOT = 4.0, 400.0, 20.0
_HEIGHTS = (120.0, 360.0)  # of the map, whatever the proportions of the plane
_LARGEST, _SMALLEST = 10.0, 1.8  # radius in points of the most used concept, and of one that is hardly used
_ANGLES = np.deg2rad(np.arange(0, 360, 22.5))
_DISTANCES = (0.5, 4.0, 9.0, 15.0, 22.0, 30.0, 40.0, 52.0, 66.0)
_LABEL_HEIGHT = SMALL * 1.05


class _Label(NamedTuple):
    concept: int
    x: float
    y: float
    inside: bool
    leader: bool


@drawn
def concept_map(model: PACE) -> Figure:
    """The means μ_k in the plane that spreads them most, with ellipses of one standard deviation of Σ_k.

    The plane is that of the first two principal components of the means, weighted by use; the caption says how much of
    their variance it shows. A disc's area is the concept's use. Concepts that hold nothing are small crosses,
    and only counted where they lie beyond all others.
    """
    use = shares(model)
    empty = np.zeros(len(use), bool)
    empty[model.empty_concepts_] = True
    means, spreads = np.asarray(model.means_, np.float64), _covariances(model)
    plane, explained = _plane(means, spreads, np.where(empty, 0.0, use))
    points = means @ plane
    flat = np.stack([plane.T @ spread @ plane for spread in spreads])

    at, scale, room = _on_paper(points, flat, ~empty)
    sheet = Sheet(_WIDTH, room[1] + 2 * _MARGIN + _FOOT)
    axes = sheet.place(_MARGIN, _MARGIN, *room)
    axes.set(xlim=(0, room[0]), ylim=(0, room[1]))
    axes.add_patch(Rectangle((0, 0), *room, fill=False, edgecolor=RULE, linewidth=0.8, clip_on=False))
    crowd = np.sqrt(max(1.0, (~empty).sum() / 30))  # many concepts are drawn smaller
    radius = np.maximum(_SMALLEST, _LARGEST / crowd * np.sqrt(use / max(use.max(), 1e-12)))
    used = [int(k) for k in np.argsort(-use, kind="stable") if not empty[k]]
    for k in used:
        variances, directions = np.linalg.eigh(flat[k])
        wide, high = 2 * scale * np.sqrt(np.maximum(variances[::-1], 0))
        angle = np.rad2deg(np.arctan2(directions[1, 1], directions[0, 1]))
        ellipse = Ellipse(tuple(at[k]), wide, high, angle=angle, facecolor=PALETTE[0], alpha=0.05, linewidth=0)
        rim = Ellipse(
            tuple(at[k]), wide, high, angle=angle, fill=False, edgecolor=PALETTE[0], alpha=0.35, linewidth=0.5
        )
        axes.add_patch(ellipse)
        axes.add_patch(rim)
    for k in used:
        axes.add_patch(
            Circle(tuple(at[k]), radius[k], facecolor=PALETTE[0], edgecolor="white", linewidth=0.6, zorder=3)
        )
    inside = ((at >= 0) & (at <= room)).all(1)
    axes.plot(*at[empty & inside].T, "x", color=MUTED, markersize=3, markeredgewidth=0.6, zorder=2)
    labels = _placed(at, radius, used, room)
    for label in labels:
        if label.leader:
            line = np.array([at[label.concept], (label.x, label.y)]).T
            axes.plot(*line, color=MUTED, linewidth=0.4, zorder=2)
        axes.text(
            label.x, label.y, str(label.concept), ha="center", va="center_baseline", fontsize=SMALL, zorder=4,
            color="white" if label.inside else INK, fontweight="bold" if label.inside else "normal", parse_math=False,
            path_effects=[] if label.inside else [withStroke(linewidth=1.5, foreground="white")],
        )  # fmt: skip
    note = f"disc: mean μ, area by use (largest {percent(float(use.max()))}) · ellipse: one standard deviation"
    near, far = int((empty & inside).sum()), int((empty & ~inside).sum())
    note += f" · ×: empty ({near})" if near else ""
    note += f" · {far} empty, off the map" if far else ""
    unnamed = len(used) - len(labels)
    second = f"first two principal components, {percent(explained)} of the variance of the means"
    second += f" · {plural(unnamed, 'small concept')} without number for want of room" if unnamed else ""
    sheet.write(_MARGIN, sheet.height - _FOOT - 1, note, size=SMALL, color=MUTED, room=_WIDTH - 2 * _MARGIN)
    sheet.write(_MARGIN, sheet.height - _FOOT + 8, second, size=SMALL, color=MUTED, room=_WIDTH - 2 * _MARGIN)
    return sheet


def _plane(means: Array, spreads: Sequence[Array], use: Array) -> tuple[Array, float]:
    """(d, 2) orthonormal directions, and the share of the means' variance that lies in them."""
    weights = use if use.any() else np.ones(len(use))
    weights = weights / weights.sum()
    centred = (means - weights @ means) * np.sqrt(weights)[:, None]
    between, within = centred.T @ centred, np.zeros((means.shape[1],) * 2)
    for weight, spread in zip(weights, spreads, strict=True):
        within += weight * spread
    total = float(np.trace(between))
    # A little of the spread decides where the means leave a direction open: one or two concepts, or all on a line.
    tilt = 1e-6 * (total or 1.0) / float(np.trace(within))
    directions = np.linalg.eigh(between + tilt * within)[1][:, ::-1][:, :2]
    directions *= np.where(directions[np.abs(directions).argmax(0), np.arange(directions.shape[1])] < 0, -1.0, 1.0)
    plane = np.zeros((len(between), 2))
    plane[:, : directions.shape[1]] = directions
    return plane, float(np.trace(plane.T @ between @ plane)) / total if total > 0 else 1.0


def _covariances(model: PACE) -> Sequence[Array]:
    """Σ_k (d, d) of every concept, whatever the family keeps."""
    kept = np.asarray(model.covariances_)
    if model.covariance == "tied":
        return [kept] * len(model.means_)
    return [np.diag(variances) for variances in kept] if model.covariance == "diag" else kept  # type: ignore[return-value]


def _on_paper(points: Array, spreads: Array, used: Array) -> tuple[Array, float, Array]:
    """Points of the sheet (K, 2), how many of them make one unit, and the width and height of the map."""
    reach = np.where(used[:, None], np.sqrt(np.maximum(np.diagonal(spreads, axis1=1, axis2=2), 0)), 0)
    shown = used if used.any() else np.ones_like(used)  # empty concepts may be far away
    low, high = (points - reach)[shown].min(0), (points + reach)[shown].max(0)
    extent, border = np.maximum(high - low, 1e-9 * max(float(np.abs(points).max()), 1e-12)), 2 * (_LARGEST + 4)
    width = _WIDTH - 2 * _MARGIN
    room = np.array([width, np.clip((width - border) * extent[1] / extent[0] + border, *_HEIGHTS)])
    scale = float(((room - border) / extent).min())
    return (points - (low + high) / 2) * scale + room / 2, scale, room


def _placed(at: Array, radius: Array, order: list[int], room: Array) -> list[_Label]:
    """A number in its disc where it fits, else beside it at the nearest place that is free of other numbers and discs."""
    discs = np.column_stack([at - radius[:, None], at + radius[:, None]])[order]
    taken = np.empty((0, 4))
    labels = []
    for k in order:
        half = np.array([width_of(str(k), SMALL, "bold") / 2 + 0.6, _LABEL_HEIGHT / 2])
        spots = [(at[k], True, False)] if np.hypot(*half) <= radius[k] else []
        for distance in _DISTANCES:
            # Far enough along each direction that the label's box clears the disc.
            for angle in _ANGLES:
                toward = np.array([np.cos(angle), np.sin(angle)])
                spots.append(
                    (at[k] + toward * (radius[k] + distance + np.abs(half * toward).sum()), False, distance > 4)
                )
        free = [spot for spot in spots if _is_free(spot[0], half, taken, room)]
        clear = [spot for spot in free if spot[1] or _is_free(spot[0], half, discs, room)]
        for place, inside, leader in (clear or free)[:1]:
            taken = np.vstack([taken, [*(place - half), *(place + half)]])
            labels.append(_Label(k, float(place[0]), float(place[1]), inside, leader))
    return labels


def _is_free(place: Array, half: Array, boxes: Array, room: Array) -> bool:
    low, high = place - half, place + half
    if (low < 0).any() or (high > room).any():
        return False
    return not ((boxes[:, :2] < high) & (boxes[:, 2:] > low)).all(1).any()
