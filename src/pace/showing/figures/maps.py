"""The concept map: where the concepts lie, how far they spread, and how much they are used."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Ellipse, Rectangle
from matplotlib.patheffects import withStroke

from pace.explainer import PACE
from pace.explanation import Array
from pace.showing.figures.drawing import percent, plural
from pace.showing.figures.layout import INK, MUTED, PALETTE, RULE, SMALL, Layout, own_style, width_of
from pace.showing.summary import use_of

_MARGIN, _WIDTH, _FOOT = 4.0, 400.0, 20.0
_HEIGHTS = (120.0, 360.0)  # of the map, whatever the proportions of the plane
_LARGEST, _SMALLEST = 10.0, 1.8  # radius in points of the most used concept, and of one that is hardly used
_TOWARD = [np.array([np.cos(angle), np.sin(angle)]) for angle in np.deg2rad(np.arange(0, 360, 22.5))]
_DISTANCES = (0.5, 4.0, 9.0, 15.0, 22.0, 30.0, 40.0, 52.0, 66.0)
_LABEL_HEIGHT = SMALL * 1.05
_LEADER = 12.0  # from this distance on a line leads from the disc to its number


@own_style()
def concept_map(model: PACE) -> Figure:
    """The means μ_k in the plane that spreads them most, with ellipses of one standard deviation of Σ_k.

    The plane is that of the first two principal components of the means, weighted by use; the caption says how much of
    their variance it shows. A disc's area is the concept's use. Empty concepts are small crosses, or only counted where
    they lie beyond all others.
    """
    use = use_of(model.concept_weights_)
    means = np.asarray(model.means_, np.float64)
    plane, explained = _plane(means, np.where(use.used, use.shares, 0))
    spreads = _projected_covariances(model, plane)
    at, scale, room = _on_paper(means @ plane, spreads, use.used)
    layout = Layout(_WIDTH, room[1] + 2 * _MARGIN + _FOOT)
    axes = layout.panel(_MARGIN, _MARGIN, *room)
    axes.set(xlim=(0, room[0]), ylim=(0, room[1]))
    axes.add_patch(Rectangle((0, 0), *room, fill=False, edgecolor=RULE, linewidth=0.8, clip_on=False))
    crowd = np.sqrt(max(1.0, use.used.sum() / 30))  # many concepts are drawn smaller
    radius = np.maximum(_SMALLEST, _LARGEST / crowd * np.sqrt(use.shares / max(use.shares.max(), 1e-12)))
    for k in use.order:
        _show_ellipse(axes, at[k], scale**2 * spreads[k])
        axes.add_patch(Circle(at[k], radius[k], facecolor=PALETTE[0], edgecolor="white", linewidth=0.6, zorder=3))
    on_map = ((at >= 0) & (at <= room)).all(1)
    axes.plot(*at[~use.used & on_map].T, "x", color=MUTED, markersize=3, markeredgewidth=0.6, zorder=2)
    labels = _label_places(at, radius, use.order, room)
    for k, (x, y) in labels.items():
        distance = np.hypot(*(at[k] - (x, y)))
        if distance > radius[k] + _LEADER:
            axes.plot([at[k, 0], x], [at[k, 1], y], color=MUTED, linewidth=0.4, zorder=2)
        axes.text(
            x, y, str(k), ha="center", va="center_baseline", fontsize=SMALL, zorder=4, parse_math=False,
            color=INK if distance else "white", fontweight="normal" if distance else "bold",
            path_effects=[withStroke(linewidth=1.5, foreground="white")] if distance else [],
        )  # fmt: skip
    note = f"disc: mean μ, area by use (largest {percent(float(use.shares.max()))}) · ellipse: one standard deviation"
    near, far = int((~use.used & on_map).sum()), int((~use.used & ~on_map).sum())
    note += f" · ×: empty ({near})" if near else ""
    note += f" · {far} empty, off the map" if far else ""
    unnamed = len(use.order) - len(labels)
    second = f"first two principal components, {percent(explained)} of the variance of the means"
    second += f" · {plural(unnamed, 'small concept')} without a number for lack of room" if unnamed else ""
    layout.note(_MARGIN, layout.height - _FOOT - 1, note, room=_WIDTH - 2 * _MARGIN)
    layout.note(_MARGIN, layout.height - _FOOT + 8, second, room=_WIDTH - 2 * _MARGIN)
    return layout


def _plane(means: Array, weights: Array) -> tuple[Array, float]:
    """(d, 2) orthonormal directions, and the share of the means' variance that lies in them."""
    weights = weights / weights.sum() if weights.any() else np.full(len(weights), 1 / len(weights))
    centred = (means - weights @ means) * np.sqrt(weights)[:, None]
    _, strengths, directions = np.linalg.svd(centred)
    plane = np.zeros((means.shape[1], 2))
    plane[:, : len(directions)] = directions[:2].T
    plane *= np.where(plane[np.abs(plane).argmax(0), [0, 1]] < 0, -1, 1)  # the same way up on every machine
    total = float((strengths**2).sum())
    return plane, float((strengths[:2] ** 2).sum()) / total if total else 1.0


def _projected_covariances(model: PACE, plane: Array) -> Array:
    """(K, 2, 2), whatever the family keeps."""
    kept = np.asarray(model.covariances_, np.float64)
    if model.covariance == "diag":
        return np.array(np.einsum("di,kd,dj->kij", plane, kept, plane))
    return np.broadcast_to(plane.T @ kept @ plane, (len(model.means_), 2, 2))


def _on_paper(points: Array, spreads: Array, used: Array) -> tuple[Array, float, Array]:
    """Where points lie on the page (K, 2), how many points of the page make one unit, and the map's width and height."""
    reach = np.where(used[:, None], np.sqrt(np.maximum(np.diagonal(spreads, axis1=1, axis2=2), 0)), 0)
    shown = used if used.any() else np.ones_like(used)  # empty concepts may be far away
    low, high = (points - reach)[shown].min(0), (points + reach)[shown].max(0)
    extent, border = np.maximum(high - low, 1e-9 * max(float(np.abs(points).max()), 1e-12)), 2 * (_LARGEST + 4)
    width = _WIDTH - 2 * _MARGIN
    room = np.array([width, np.clip((width - border) * extent[1] / extent[0] + border, *_HEIGHTS)])
    scale = float(((room - border) / extent).min())
    return (points - (low + high) / 2) * scale + room / 2, scale, room


def _show_ellipse(axes: Axes, centre: Array, covariance: Array) -> None:
    variances, directions = np.linalg.eigh(covariance)
    size = 2 * np.sqrt(np.maximum(variances[::-1], 0))
    angle = np.rad2deg(np.arctan2(directions[1, 1], directions[0, 1]))
    axes.add_patch(Ellipse(tuple(centre), *size, angle=angle, facecolor=PALETTE[0], alpha=0.05, linewidth=0))
    axes.add_patch(
        Ellipse(tuple(centre), *size, angle=angle, fill=False, edgecolor=PALETTE[0], alpha=0.35, linewidth=0.5)
    )


def _label_places(at: Array, radius: Array, order: list[int], room: Array) -> dict[int, Array]:
    """A number in its disc where it fits, else beside it at the nearest place that is free of other numbers and discs."""
    discs = np.column_stack([at - radius[:, None], at + radius[:, None]])[order]
    taken, found = np.empty((0, 4)), {}
    for k in order:
        half = np.array([width_of(str(k), SMALL, "bold") / 2 + 0.6, _LABEL_HEIGHT / 2])
        inside = [at[k]] if np.hypot(*half) <= radius[k] else []
        # Beside the disc, far enough for the label's box to clear it.
        beside = [
            at[k] + toward * (radius[k] + distance + np.abs(half * toward).sum())
            for distance in _DISTANCES
            for toward in _TOWARD
        ]
        inside, beside = ([spot for spot in some if _is_free(spot, half, taken, room)] for some in (inside, beside))
        clear = [spot for spot in beside if _is_free(spot, half, discs, room)]
        for spot in (inside + clear + beside)[:1]:
            taken = np.vstack([taken, [*(spot - half), *(spot + half)]])
            found[k] = spot
    return found


def _is_free(place: Array, half: Array, boxes: Array, room: Array) -> bool:
    low, high = place - half, place + half
    if (low < 0).any() or (high > room).any():
        return False
    return not ((boxes[:, :2] < high) & (boxes[:, 2:] > low)).all(1).any()
