"""What was learned: the bound over the epochs and against the number of concepts, and where the concepts lie."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Ellipse, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pace.explainer import PACE
from pace.explanation import Array
from pace.showing.figures import drawing
from pace.showing.figures.drawing import MARGIN, MUTED, PALETTE, RULE, SMALL, Layout, own_style, plural
from pace.showing.summary import use_of

_NEAR = 3  # concepts more or fewer than were found
_TERMS = {
    "total": "Bound L",
    "embedding": "L_e: the embeddings",
    "faithfulness": "L_f: the predictions",
    "stability": "L_s: stability",
}

_MAP = np.array([392.0, 320.0])  # points
_SIDES = np.array([(0, 1), (1, 0), (-1, 0), (0, -1), (0.7, 0.7), (-0.7, 0.7), (0.7, -0.7), (-0.7, -0.7)])
_LARGEST, _SMALLEST = 10.0, 1.8  # radius in points of the most used concept, and of one that is hardly used


@own_style()
def bound(model: PACE) -> Figure:
    """L = L_e + L_f + L_s per image after every epoch, a panel for each term, on its own scale.

    Terms that the model was fitted without (L_f without predictions, L_s without perturbed views) are left out.
    """
    bounds = model.lower_bounds_
    if not bounds:
        raise ValueError("the model has no epochs yet; there is no bound to show")
    curves = {title: np.array([getattr(value, name) for value in bounds]) for name, title in _TERMS.items()}
    panels = [(title, curve) for title, curve in curves.items() if curve.any()]
    if len(panels) == 2:  # L_e is all there is
        panels = panels[1:]
    epochs, unit = np.arange(1, len(bounds) + 1), "batch" if model.n_steps_ else "epoch"
    ends = [f"{_short(curve[0])} → {_short(curve[-1])}" for _, curve in panels]
    drawn = [(title, note, epochs, curve) for note, (title, curve) in zip(ends, panels, strict=True)]
    return _draw_curves(drawn, epochs[-1], unit)


@own_style()
def number_of_concepts(model: PACE) -> Figure:
    """How far the bound lies below its best, in nats, for every number of concepts that was tried, and near the one found.

    The model has to be fitted with ``n_concepts="auto"``, or pruned.
    """
    selection = model.selection_
    if selection is None:
        raise ValueError("the number of concepts was given, not found; fit with n_concepts='auto' or prune=True")
    numbers, below = selection.numbers.numpy(), (selection.bounds - selection.bounds.max()).numpy()
    near = abs(numbers - selection.n_concepts) <= _NEAR
    found = f"{plural(selection.n_concepts, 'concept')}, found in {selection.images} images"
    panels = [(found, "", numbers, below)]
    if not near.all():
        span = f"{numbers[near].min()} to {numbers[near].max()} concepts"
        panels.append((span, "", numbers[near], below[near]))
    return _draw_curves(panels, selection.n_concepts, "nats below the best, by number of concepts")


def _draw_curves(panels: list[tuple[str, str, Array, Array]], marked: float, unit: str) -> Layout:
    """Panels (title, note, x, y) below each other, each with a dot where x is `marked`; `unit` is what x counts."""
    left, right, block = 44.0, 232.0, 84.0
    layout = Layout(right + 8, 2 * MARGIN + len(panels) * block + 10)
    for position, (title, note, x, y) in enumerate(panels):
        top = MARGIN + position * block
        layout.write(left, top, title, bold=True)
        layout.note(right, top + 0.5, note, align="right")
        axes = layout.panel(left, top + 13, right - left, 52)
        axes.plot(x, y, color=PALETTE[0], linewidth=1.3, clip_on=False, zorder=3)
        axes.plot(x[x == marked], y[x == marked], "o", markersize=4, color=PALETTE[5], clip_on=False, zorder=4)
        axes.set_xlim(x[0] - (len(x) == 1), x[-1] + (len(x) == 1))
        axes.margins(y=0.1)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(3))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.5)
    layout.note(right, layout.height - MARGIN - SMALL - 1, unit, align="right")
    return layout


def _short(value: float) -> str:
    return f"{value:,.{'4g' if abs(value) < 1e4 else '0f'}}".replace("-", "−")


@own_style()
def concept_map(model: PACE) -> Figure:
    """The means μ_k in the plane that spreads them most, with ellipses of one standard deviation of Σ_k.

    The plane is that of the first two principal components of the means, weighted by use; the caption says how much of
    their variance it shows. A disc's area is the concept's use. Empty concepts are small crosses.
    Kinds of parts have no ellipses: their Σ is not that of embeddings.
    """
    use = use_of(model.concept_weights_)
    plane, explained = _plane(np.asarray(model.means_, np.float64), np.where(use.used, use.shares, 0))
    spreads = _projected_covariances(model, plane)
    at, scale = _on_paper(model.means_ @ plane, spreads, use.used)
    layout = Layout(_MAP[0] + 2 * MARGIN, _MAP[1] + 2 * MARGIN + 20)
    axes = layout.panel(MARGIN, MARGIN, *_MAP)
    axes.set(xlim=(0, _MAP[0]), ylim=(0, _MAP[1]))
    axes.set_axis_off()
    axes.add_patch(Rectangle((0, 0), *_MAP, fill=False, edgecolor=RULE, linewidth=0.8, clip_on=False))
    crowd = np.sqrt(max(1.0, len(use.order) / 30))  # many concepts are drawn smaller
    radius = np.maximum(_SMALLEST, _LARGEST / crowd * np.sqrt(use.shares / max(use.shares.max(), 1e-12)))
    for k in use.order:
        variances, directions = np.linalg.eigh(spreads[k])
        size = 2 * scale * np.sqrt(np.maximum(variances[::-1], 0))
        angle = np.rad2deg(np.arctan2(directions[1, 1], directions[0, 1]))
        axes.add_patch(Ellipse(at[k], *size, angle=angle, color=PALETTE[0], alpha=0.08, linewidth=0.5))
        axes.add_patch(Circle(at[k], radius[k], facecolor=PALETTE[4], edgecolor="white", linewidth=0.6, zorder=3))
    axes.plot(*at[~use.used].T, "x", color=MUTED, markersize=3, markeredgewidth=0.6, zorder=2)
    places = _number_places(at, radius, use.order)
    for k, (x, y) in places.items():
        drawing.show_number(axes, x, y, k)
    empty, unnamed = len(use.used) - len(use.order), len(use.order) - len(places)
    note = f"disc: mean μ, area by use (largest {use.shares.max():.1%})"
    note += "" if model.part_of_ is not None else " · ellipse: one standard deviation"
    note += f" · ×: {empty} empty, where they are on the map" if empty else ""
    second = f"first two principal components, {explained:.1%} of the variance of the means"
    second += f" · {plural(unnamed, 'small concept')} without a number for lack of room" if unnamed else ""
    layout.note(MARGIN, layout.height - 21, note, room=_MAP[0])
    layout.note(MARGIN, layout.height - 12, second, room=_MAP[0])
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
    """(K, 2, 2), whatever the family keeps; 0 for kinds of parts."""
    if model.part_of_ is not None:
        return np.zeros((len(model.means_), 2, 2))
    kept = np.asarray(model.covariances_, np.float64)
    if model.covariance == "diag":
        return np.array(np.einsum("di,kd,dj->kij", plane, kept, plane))
    return np.broadcast_to(plane.T @ kept @ plane, (len(model.means_), 2, 2))


def _on_paper(points: Array, spreads: Array, used: Array) -> tuple[Array, float]:
    """Where points lie on the map (K, 2), which shows all concepts in use, and how many points of the page make one unit."""
    shown = used if used.any() else ~used  # empty concepts may be far away
    reach = np.sqrt(np.maximum(np.diagonal(spreads, axis1=1, axis2=2), 0))
    low, high = (points - reach)[shown].min(0), (points + reach)[shown].max(0)
    extent = np.maximum(high - low, 1e-9 * max(float(np.abs(points).max()), 1e-12))
    scale = float(((_MAP - 2 * (_LARGEST + 4)) / extent).min())
    return (points - (low + high) / 2) * scale + _MAP / 2, scale


def _number_places(at: Array, radius: Array, order: list[int]) -> dict[int, Array]:
    """Numbers in their discs where they fit, else beside them; none where all places overlap numbers of larger concepts."""
    found: dict[int, Array] = {}
    taken = np.empty((0, 2, 2))  # the middle of every number, and half its size
    for k in order:
        half = np.array([drawing.width_of(str(k), SMALL, "bold") / 2 + 0.6, SMALL / 2])
        spots = at[k] + _SIDES * (0 if np.hypot(*half) <= radius[k] else radius[k] + half)
        overlaps = (np.abs(taken[:, 0] - spots[:, None]) < taken[:, 1] + half).all(2).any(1)
        if not overlaps.all():
            found[k] = spots[overlaps.argmin()]
            taken = np.concatenate([taken, [[found[k], half]]])
    return found
