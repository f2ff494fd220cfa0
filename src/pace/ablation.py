"""Take concepts away and see what the transformer predicts without them.

The explained block says which patches show a concept; they are changed at the input of the first block, and the whole
transformer runs again. At the explained block itself CLS has read most of them already, and after the last one all.

How sure: a patch shows a concept with probability φ, and neighbours are mistaken together. So with one U, uniform from 0 to 1,
for all of an image, the patches with φ > U are changed; each is with probability φ. `after` is the mean over U, and its
90 % interval holds what comes out for U from 0.05 to 0.95.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pace.explanation import Array
from pace.metrics.hiding import Hiding, How, as_attended, elsewhere, hide, hide_patches, normalized
from pace.metrics.inputs import as_array, patches_of

if TYPE_CHECKING:
    from torch import Tensor

    from pace.backbones import Backbone
    from pace.explainer import PACE
    from pace.images import ImageSet
    from pace.observations import Observations

    Pictures = ImageSet | Tensor

_CUTS = np.array([0.05, 0.25, 0.5, 0.75, 0.95])  # of U, and the share of all U that each stands for
_SHARES = np.array([0.15, 0.225, 0.25, 0.225, 0.15])
_GIVERS, _GIVEN = 4, 20  # pictures that a concept comes from, and that are given it, in `shortcuts`


@dataclass(frozen=True, eq=False)
class Ablation:
    """Predictions (n, N) for n images as they are, and with some of their concepts changed.

    before, after : `after` is expected under φ
    low, high : the ends of its 90 % interval
    area : with as many patches changed in the same shape elsewhere
    attention : with patches changed by lot that get as much attention
    patches : (n,) how many patches are the concepts', expected under φ
    """

    before: Array
    after: Array
    low: Array
    high: Array
    area: Array
    attention: Array
    patches: Array

    @property
    def change(self) -> Array:
        return self.after - self.before

    @property
    def predicted(self) -> Array:
        """(n,) ŷ, the class predicted before."""
        classes: Array = self.before.argmax(1)
        return classes

    def of_prediction(self) -> dict[str, Array]:
        """The probability (n,) of ŷ in each of the cases."""
        rows, cases = np.arange(len(self.before)), ("before", "after", "low", "high", "area", "attention")
        return {case: getattr(self, case)[rows, self.predicted] for case in cases}


def ablate(
    backbone: Backbone,
    model: PACE,
    images: Pictures,
    concepts: int | Sequence[int],
    *,
    to: int | None = None,
    reference: Pictures | None = None,
    how: How | None = None,
    seed: int = 0,
) -> Ablation:
    """Predict images without some concepts, or with these concepts changed into another.

    Parameters
    ----------
    images
        An `ImageSet`, or a tensor (M, 3, H, W) in [0, 1] at a size the model takes; one picture is enough.
    concepts
        The concept, or concepts, to take away together.
    to
        A concept to put in their place, such as another kind of the same part: patches that show it in the images of
        `reference` (by default `images`), drawn by lot, take the places of the others.
    how
        How patches are taken away, as in `pace.metrics.hide`; None leaves them out, or where a model cannot do without them
        puts the mean patch or grey in their place.
    """
    wanted = [concepts] if isinstance(concepts, (int, np.integer)) else list(concepts)
    known, (phi, seen) = len(model.means_), _explained(backbone, model, images)
    for k in [*wanted, *([] if to is None else [to])]:
        if not 0 <= k < known:
            raise ValueError(f"concepts: expected numbers from 0 to {known - 1}; found {k}")
    every = np.arange(len(phi))
    if to is None:
        hiding = hide_somehow(backbone, images, every, how)
    else:
        others = images if reference is None else reference
        shown = phi if reference is None else _explained(backbone, model, others)[0]
        hiding = hide(backbone, images, every, patches_with(backbone, others, shown[:, :, to]))
    return take_away(hiding, phi, every, [wanted] * len(phi), grid=seen.grid, seed=seed)


def take_away(
    hiding: Hiding,
    phi: Array,
    images: Array,
    concepts: Sequence[Sequence[int]],
    *,
    grid: tuple[int, int] | None = None,
    compare: bool = True,
    seed: int = 0,
) -> Ablation:
    """Take a set of concepts away from each of some `images` (n,), numbers of the images of `hiding`.

    phi : (M, patches, K) of the images of `hiding`, by any method whose φ is between 0 and 1
    compare : also predict with other patches taken away; without, `area` and `attention` are NaN
    """
    shares = np.stack([phi[m][:, list(some)].sum(1) for m, some in zip(images, concepts, strict=True)])
    kept = shares[:, None] <= _CUTS[:, None]  # (n, cuts, patches)

    def predicted(kept: Array) -> Array:
        repeated = np.repeat(images, kept.shape[1])
        return hiding.predictions(repeated, kept.reshape(len(repeated), -1)).reshape(*kept.shape[:2], -1)

    before, found = predicted(np.ones_like(kept[:, :1]))[:, 0], predicted(kept)
    after = np.einsum("u,nuc->nc", _SHARES, found)
    area = attention = np.full_like(after, np.nan)
    if compare:
        gone = shares > 0.5
        area = predicted(~elsewhere(gone, grid, np.random.default_rng([seed, 0]))).mean(1)
        weights = np.asarray(hiding.attention, np.float64)[images]
        attention = predicted(~as_attended(gone, weights, np.random.default_rng([seed, 1]))).mean(1)
    ends = np.minimum(found.min(1), after), np.maximum(found.max(1), after)
    return Ablation(before, after, *ends, area, attention, shares.sum(1))


def hide_somehow(backbone: Backbone, images: Pictures, rows: Array, how: How | None = None) -> Hiding:
    """`hide`, in the first way that the model can take if none is given."""
    ways: tuple[How, ...] = (how,) if how else ("left out", "mean", "grey")
    for way in ways[:-1]:
        try:
            return hide(backbone, images, rows, way)
        except ValueError:
            continue
    return hide(backbone, images, rows, ways[-1])


def patches_with(backbone: Backbone, images: Pictures, share: Array) -> Tensor:
    """(D, d) the patches of the images that show a concept, φ (M, patches) above ½, as the first block takes them."""
    import torch

    rows = np.flatnonzero((share > 0.5).any(1))
    if not rows.size:
        raise ValueError("to: no patch of the reference images shows this concept; give reference= images that do")
    found = []
    for some in np.array_split(rows, math.ceil(len(rows) / 64)):
        with torch.no_grad():
            tokens = backbone.embed(normalized(backbone, images, some))
        found.append(tokens[:, -share.shape[1] :][torch.as_tensor(share[some] > 0.5, device=tokens.device)])
    return torch.cat(found)


class Shortcut(NamedTuple):
    """A concept that the prediction of a class may wrongly rest on, for people to look at.

    taken : the share of pictures predicted as other classes that are predicted as this one once they are given the concept
    elsewhere : the same with as many patches from elsewhere in the pictures that the concept comes from
    outside : the share of these pictures in which most of the concept lies outside the object
    alone : how much of the concept is in pictures predicted as this class
    images : the pictures that it comes from, most of the concept first
    """

    concept: int
    label: int
    taken: float
    elsewhere: float
    outside: float
    alone: float
    images: list[int]


def shortcuts(
    backbone: Backbone,
    model: PACE,
    images: Pictures,
    *,
    objects: Array | None = None,
    least: float = 0.5,
    seed: int = 0,
) -> list[Shortcut]:
    """Concepts that are not the object, or that no other class has, and that make pictures of other classes those of a class.

    That is, concepts that lie outside the object in most pictures, or of which nine tenths are in pictures predicted as one
    class. The patches of a concept, from the four pictures of its class that have most of it, are put into pictures of other
    classes at the same places. A concept is listed if `least` more of these are then predicted as its class than with as many
    patches from elsewhere in the same pictures; the largest such share first. It takes 40 forward passes a concept.

    `objects` (M, rows, columns) says which patches show the object; by default those with more attention than the average patch
    of their image, which a shortcut may well be.
    """
    phi, seen = _explained(backbone, model, images)
    grid, classes = seen.grid, as_array(seen.predictions).argmax(1)
    assert grid is not None  # images have one
    weights = as_array(seen.attention)[:, seen.prefix_tokens :]
    inside = weights > weights.mean(1, keepdims=True) if objects is None else np.reshape(objects, weights.shape) > 0
    shares, within = phi.mean(1), np.einsum("mjk,mj->mk", phi, inside) / phi.sum(1).clip(1e-12)
    generator, found = np.random.default_rng(seed), []
    for k, share in enumerate(shares.T):
        of_class, held = np.bincount(classes, share), phi[:, :, k] > 0.5
        label = int(of_class.argmax())
        own, others = np.flatnonzero((classes == label) & held.any(1)), np.flatnonzero(classes != label)
        if len(own) < _GIVERS or not others.size:  # what few pictures have is no rule of the class
            continue
        givers = own[np.argsort(-share[own], kind="stable")[:_GIVERS]]
        outside, alone = float((within[givers, k] < 0.5).mean()), float(of_class[label] / of_class.sum())
        if outside <= 0.5 and alone < 0.9:
            continue
        others = others[np.argsort(share[others], kind="stable")[: max(_GIVEN, len(others) // 2)]]
        given = generator.permutation(others)[:_GIVEN]
        taken, control = _given(backbone, images, given, np.resize(givers, len(given)), held, grid, label, generator)
        found.append(Shortcut(k, label, taken, control, outside, alone, givers.tolist()))
    listed = [one for one in found if one.taken - one.elsewhere >= least]
    return sorted(listed, key=lambda one: one.elsewhere - one.taken)


def _given(
    backbone: Backbone, images: Pictures, given: Array, givers: Array, held: Array, grid: tuple[int, int], label: int,
    generator: np.random.Generator,
) -> tuple[float, float]:  # fmt: skip
    """The share of pictures `given` (n,) that are predicted as a class with what their `givers` (n,) hold, and with others."""
    there = held[givers]
    pictures, others = (normalized(backbone, images, rows) for rows in (given, givers))
    predict = hide_patches(lambda some: backbone(some).predictions, pictures, grid, others)
    masks = there, elsewhere(there, grid, generator)[:, 0]
    taken, control = (
        float((as_array(predict(np.arange(len(given)), ~mask)).argmax(1) == label).mean()) for mask in masks
    )
    return taken, control


def _explained(backbone: Backbone, model: PACE, images: Pictures) -> tuple[Array, Observations]:
    """φ (M, patches, K)."""
    seen = backbone.observe(images)
    if not seen.n_classes:
        raise ValueError("this model has no classifier, so there is no prediction to change; give Backbone a head")
    return patches_of(model.explain(seen).phi, seen.prefix_tokens), seen


def numbers(ablation: Ablation) -> list[dict[str, Any]]:
    """For JSON: the predicted class of every image and its probability in each of the cases."""
    cases = ablation.of_prediction()
    return [
        {"class": int(label), **{case: round(float(values[i]), 4) for case, values in cases.items()}}
        for i, label in enumerate(ablation.predicted)
    ]
