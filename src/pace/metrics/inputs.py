"""Checks of what metrics are given, with the same messages everywhere, and how an explanation is normalised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from pace.metrics.declare import Array

if TYPE_CHECKING:
    from torch import Tensor

_NUMBERS, _NUMBERS_ON_GPU = 1 << 22, 1 << 27  # of the embeddings, worked on at once


def as_array(values: Any) -> Array:
    """Numpy from anything, tensors on a GPU included."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() and values.element_size() < 4 else values
    return np.asarray(values)


def theta_of(theta: Any, name: str = "theta") -> Array:
    """θ (M, K) as float64: finite, with at least one image and one concept."""
    array = as_array(theta)
    if array.ndim != 2 or 0 in array.shape or array.dtype.kind not in "fiub":
        raise ValueError(f"{name}: expected numbers of shape (images, concepts); found {array.dtype} {array.shape}")
    array = array.astype(np.float64, copy=False)
    wrong = np.flatnonzero(~np.isfinite(array).all(1))
    if wrong.size:
        raise ValueError(f"{name} of image {wrong[0]} is NaN or infinite")
    return array


def patches_of(phi: Any, prefix_tokens: int) -> Array:
    """φ of the patches, without prefix tokens: finite, in its own precision."""
    array = as_array(phi)
    if array.ndim != 3 or 0 in array.shape or array.dtype.kind not in "fiub":
        raise ValueError(
            f"phi: expected numbers of shape (images, tokens, concepts); found {array.dtype} {array.shape}"
        )
    for image, tokens in enumerate(array):  # image by image: φ can be large
        if not np.isfinite(tokens).all():
            raise ValueError(f"phi of image {image} is NaN or infinite")
    if not 0 <= prefix_tokens < array.shape[1]:
        raise ValueError(f"prefix_tokens: expected 0 to {array.shape[1] - 1}; found {prefix_tokens}")
    return array[:, prefix_tokens:]


def blocks_of(embeddings: Any) -> Iterator[tuple[Array, Tensor]]:
    """Numbers of some images and their embeddings (B, J, d), where these are; all images, some at a time."""
    from pace.observations import as_tensor

    images, tokens, dim = embeddings.shape
    most = _NUMBERS_ON_GPU if getattr(embeddings, "is_cuda", False) else _NUMBERS
    size = max(1, most // (tokens * dim))
    for start in range(0, images, size):
        rows = np.arange(start, min(start + size, images))
        yield rows, as_tensor(embeddings[start : start + size])


def concept_counts(concepts: Array, n_concepts: int | None = None, weights: Array | None = None) -> Array:
    """How many patches, or how much of their weights (M, patches), every concept has in every image (M, K)."""
    total = int(concepts.max()) + 1 if n_concepts is None else n_concepts
    cells = np.arange(len(concepts))[:, None] * total + concepts
    spread = None if weights is None else weights.ravel()
    return np.bincount(cells.ravel(), spread, len(concepts) * total).reshape(len(concepts), total).astype(np.float64)


def labels_of(yhat: Any, images: int | None, name: str = "yhat") -> Array:
    """Predicted classes (M,) from labels (M,) or distributions (M, N), of which the argmax counts; None for any M."""
    array = as_array(yhat)
    shaped = array.ndim in (1, 2) and 0 not in array.shape and images in (None, len(array))
    if not shaped or array.dtype.kind not in "fiub":
        raise ValueError(
            f"{name}: expected labels ({images},) or distributions ({images}, classes); found {array.dtype} {array.shape}"
        )
    if not np.isfinite(array).all():
        raise ValueError(f"{name} has NaN or infinite values")
    if array.ndim == 1 and (array != np.rint(array)).any():
        raise ValueError(f"{name}: expected whole class numbers; found {array[array != np.rint(array)][0]}")
    return (array.argmax(1) if array.ndim == 2 else array).astype(np.int64)


def l1_normalised(theta: Array) -> Array:
    """Every row divided by the sum of its absolute values, signs kept, so that methods of any scale compare.

    A row of zeros prefers no concept to another and counts as uniform: an empty explanation is not sparse.
    """
    scale = np.abs(theta).max(1, keepdims=True)
    scaled = np.divide(theta, scale, out=np.ones_like(theta), where=scale > 0)  # so that no sum overflows
    normalised: Array = scaled / np.abs(scaled).sum(1, keepdims=True)
    return normalised


def entropy(shares: Array, axis: int = -1) -> Array:
    """−Σ p log p in nats, over one axis."""
    found: Array = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis)
    return found
