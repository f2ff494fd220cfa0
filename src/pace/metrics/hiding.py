"""Deletion and insertion: does the prediction depend on the patches that the explanation says matter?

A `Predict` takes image numbers (B,) and which patches are kept (B, patches), and returns predictions (B, N). `hide_tokens` and
`hide_patches` make one from a transformer; any other function works too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pace.metrics.declare import Array, Measure, metric
from pace.metrics.inputs import as_array, labels_of, patches_of, theta_of

Predict = Callable[[Array, Array], Any]

_STEPS = 10  # points of a curve after the first


def patch_relevance(phi: Any, concept_relevance: Any, prefix_tokens: int = 0) -> Array:
    """Σ_k r_mk φ_mjk (M, patches): how much each patch belongs to the concepts that matter in its image.

    concept_relevance (M, K): θ, or each concept's evidence for the predicted class, such as ``theta * label_head[:, yhat].T``.
    """
    patches, relevance = patches_of(phi, prefix_tokens), theta_of(concept_relevance, "concept_relevance")
    expected = patches.shape[0], patches.shape[2]
    if relevance.shape != expected:
        raise ValueError(f"concept_relevance: expected shape {expected} to match phi; found {relevance.shape}")
    found: Array = np.einsum("mjk,mk->mj", patches, relevance)
    return found


@metric(title="Deletion", better="lower", range=(0, 1))
def deletion(predict: Predict, relevance: Any, yhat: Any = None, *, batch_size: int = 64, seed: int = 0) -> Measure:
    """Mean probability of the predicted class while patches are removed, those of the leading concepts first.

    Area under the curve of p(ŷ_m) against the share of patches removed, most relevant first (Petsiuk et al., 2018).
    relevance (M, patches), as `patch_relevance` gives it; only its order within an image counts, with ties broken at
    random. ŷ defaults to the prediction for the whole image. Read it beside `insertion`: it is low for any fragile model.
    """
    return _area_under_curve(predict, relevance, yhat, False, batch_size, seed)


@metric(title="Insertion", better="higher", range=(0, 1))
def insertion(predict: Predict, relevance: Any, yhat: Any = None, *, batch_size: int = 64, seed: int = 0) -> Measure:
    """Mean probability of the predicted class while patches are added, those of the leading concepts first.

    As `deletion`, starting from an empty image and adding the most relevant patches first.
    """
    return _area_under_curve(predict, relevance, yhat, True, batch_size, seed)


@metric(title="Insertion minus deletion", better="higher", range=(-1, 1))
def evidence_gap(predict: Predict, relevance: Any, yhat: Any = None, *, batch_size: int = 64, seed: int = 0) -> Measure:
    """How much more the prediction depends on the leading concepts' patches than on the rest; 0 for a random order.

    `insertion` − `deletion`, image by image.
    """
    added = insertion.measure(predict, relevance, yhat, batch_size=batch_size, seed=seed)
    removed = deletion.measure(predict, relevance, yhat, batch_size=batch_size, seed=seed)
    return Measure(added.images, lambda weights: added.values(weights) - removed.values(weights))


def hide_tokens(forward: Callable[[Any], Any], tokens: Any, patches: int) -> Predict:
    """Hide patches among the tokens of a layer: the mean of all patch tokens replaces them.

    forward : tokens → predictions: ``lambda tokens: backbone.forward_from(tokens).softmax(-1)``
    tokens : tensor (M, T, d) as `Backbone.split` gives it; the last `patches` tokens are the patches

    At the last layer of a model that reads only CLS, no patch has any effect: split at an earlier one.
    """
    import torch

    mean = tokens[:, -patches:].mean((0, 1))

    def predict(images: Array, kept: Array) -> Any:
        chosen = tokens[torch.as_tensor(images, device=tokens.device)]
        mask = torch.as_tensor(kept, device=tokens.device)[:, :, None]
        hidden = torch.where(mask, chosen[:, -patches:], mean)
        with torch.no_grad():
            return forward(torch.cat([chosen[:, :-patches], hidden], 1))

    return predict


def hide_patches(forward: Callable[[Any], Any], images: Any, grid: tuple[int, int]) -> Predict:
    """Hide patches in the images themselves, under the mean colour.

    forward : normalised images → predictions: ``lambda images: backbone(images).predictions``
    images : tensor (M, 3, H, W), normalised, so that 0 is the mean colour
    grid : rows and columns of the patches
    """
    import torch
    import torch.nn.functional as F

    def predict(numbers: Array, kept: Array) -> Any:
        chosen = images[torch.as_tensor(numbers, device=images.device)]
        mask = torch.as_tensor(kept, device=images.device, dtype=chosen.dtype).reshape(len(chosen), 1, *grid)
        mask = F.interpolate(mask, chosen.shape[2:], mode="nearest-exact")
        with torch.no_grad():
            return forward(chosen * mask)

    return predict


def _area_under_curve(predict: Predict, relevance: Any, yhat: Any, adding: bool, batch_size: int, seed: int) -> Measure:
    """Area under p(ŷ_m) with the shares 0, 1/10, … 1 of the patches removed, or added."""
    scores = theta_of(relevance, "relevance")
    images, patches = scores.shape
    ties = np.random.default_rng(seed).random(scores.shape)
    rank = np.lexsort((ties, -scores), axis=1).argsort(1)  # 0 for the most relevant patch of an image
    changed = np.rint(np.linspace(0, patches, _STEPS + 1))
    curve = np.empty((images, _STEPS + 1))
    for start in range(0, images, batch_size):
        part = np.arange(start, min(start + batch_size, images))
        whole = _predictions(predict, part, np.ones((len(part), patches), bool))
        classes = whole.argmax(1) if yhat is None else labels_of(yhat, images)[part]
        if classes.max() >= whole.shape[1]:
            raise ValueError(f"yhat: expected one of the {whole.shape[1]} classes of predict; found {classes.max()}")
        for step, count in enumerate(changed):
            shares = _predictions(predict, part, (rank[part] < count) == adding)
            curve[part, step] = shares[np.arange(len(part)), classes]
    return Measure.mean(((curve[:, :-1] + curve[:, 1:]) / 2).mean(1))


def _predictions(predict: Predict, images: Array, kept: Array) -> Array:
    found = as_array(predict(images, kept))
    if found.ndim != 2 or len(found) != len(images):
        raise ValueError(f"predict: expected predictions ({len(images)}, classes); found shape {found.shape}")
    if not ((found >= -1e-6).all() and (np.abs(found.sum(1) - 1) <= 0.02).all()):
        raise ValueError("predict: expected probabilities that sum to 1; apply softmax to logits")
    return found
