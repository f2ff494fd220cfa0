"""What figures, report and command line say about concepts and classes, each worked out in one place.

θ (M, K) · φ (M, J, K) · a (M, J) attention
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from pace.explanation import Array
from pace.images.imageset import ImageSet
from pace.model.nearest import nearest
from pace.naming import Use as Use
from pace.naming import use_of as use_of
from pace.observations import Observations

_HELD = 0.01  # share below which images do not show a part; report/static/parts.js has the same


class Contrast(NamedTuple):
    """A part that two classes have different kinds of."""

    part: int
    kind_in_a: int  # the concept that leads the part in the images of class a
    kind_in_b: int
    difference: float  # 0 to 1: of the kinds of the part in a, how much is of other kinds in b


def patches_held(phi: Array, attention: Array) -> Array:
    """How many patches each concept holds (K,), each weighted by its share of its image's attention."""
    weights = attention / attention.sum(1, keepdims=True)
    held: Array = weights.reshape(-1) @ phi.reshape(-1, phi.shape[2]) * phi.shape[1]
    return held


def typical_patches(means: Array, observations: Observations, n: int) -> Array:
    """The n patches nearest to each mean, from different images: their images and their places in the grid (K, n, 2)."""
    return np.stack(nearest(means, observations, n)[:2], -1)


def own_patches(means: Array, observations: Observations, n: int, phi: Array) -> list[Array]:
    """Likewise, at most n of the patches whose largest φ is the concept's; the nearest of all where it leads none."""
    of_all = typical_patches(means, observations, n)
    leading = phi[:, observations.prefix_tokens :].argmax(2)
    own = nearest(means, observations, n, leading)
    places, led = np.stack(own[:2], -1), np.isfinite(own.distances)
    return [places[k][led[k]] if led[k].any() else of_all[k] for k in range(len(means))]


def class_concepts(theta: Array, evidence_for: Array, used: Array, n: int) -> list[tuple[int, float]]:
    """The concepts in use that speak most for a class, at most n, and how strongly: mean θ_k times the evidence, above 0.

    `theta` (m, K) belongs to the images predicted as the class, `evidence_for` (K,) is its column of `PACE.evidence_`.
    """
    strength = np.where(used, theta.mean(0) * evidence_for, 0)
    order = np.argsort(-strength, kind="stable")[:n]
    return [(int(k), float(strength[k])) for k in order if strength[k] > 0]


def contrast(theta: Array, part_of: Array, classes: Array, a: int, b: int) -> list[Contrast]:
    """What tells class a from class b: the parts that are mostly of another kind in each, most different first.

    `classes` (M,) are the predicted ones. A part that the images of either class do not show has no kind there. The
    difference is the total variation distance of the two distributions over the part's kinds.
    """
    if not ((classes == a).any() and (classes == b).any()):
        return []
    of_a, of_b = theta[classes == a].mean(0), theta[classes == b].mean(0)
    found = []
    for part in range(int(part_of.max()) + 1):
        kinds = np.flatnonzero(part_of == part)
        in_a, in_b = of_a[kinds], of_b[kinds]
        if min(in_a.sum(), in_b.sum()) < _HELD or in_a.argmax() == in_b.argmax():
            continue
        difference = np.abs(in_a / in_a.sum() - in_b / in_b.sum()).sum() / 2
        found.append(Contrast(part, int(kinds[in_a.argmax()]), int(kinds[in_b.argmax()]), float(difference)))
    return sorted(found, key=lambda one: -one.difference)


def predicted_classes(observations: Observations) -> Array | None:
    """The class ŷ_m of every image; None without predictions."""
    if observations.predictions is None:
        return None
    classes: Array = whole_array(observations.predictions).argmax(1)
    return classes


def class_names(given: Sequence[str] | None, images: object, n_classes: int) -> list[str]:
    """One name for each class: those given, those of the image set if their number fits, or "class 0" and so on."""
    if given is None and isinstance(images, ImageSet) and len(images.class_names or ()) == n_classes:
        given = images.class_names
    if given is None:
        return [f"class {number}" for number in range(n_classes)]
    if len(given) != n_classes:
        raise ValueError(f"class_names: expected {n_classes}, one for each class; found {len(given)}")
    return [str(name) for name in given]


def whole_array(array: Any) -> Array:
    """All of an array of `Observations`, wherever it is kept."""
    part = array[:]
    return part.double().cpu().numpy() if isinstance(part, Tensor) else np.asarray(part, dtype=np.float64)
