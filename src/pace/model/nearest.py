"""Which patches of some images lie nearest to points: what concepts look like."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pace.observations import Observations

_TOKENS_AT_ONCE = 1 << 14  # limits the memory that distances to all points take


class Patches(NamedTuple):
    """Patches of a set of images, nearest first; `patches` counts along the grid, row by row, without prefix tokens."""

    images: npt.NDArray[np.int64]
    patches: npt.NDArray[np.int64]
    distances: npt.NDArray[np.float64]


def nearest(
    points: npt.NDArray[Any], observations: Observations, n: int, owners: npt.NDArray[np.int64] | None = None
) -> Patches:
    """The n patches nearest to each of the points (K, d), as arrays (K, n).

    They are from different images as long as there are enough images, since the patches around one are much like it. Where
    `owners` (M, patches) says to which point each patch belongs, the others come after all of these, infinitely far.
    """
    means = torch.as_tensor(points, dtype=torch.float32)
    n_patches = observations.n_tokens - observations.prefix_tokens
    per_image = min(-(-n // len(observations)), n_patches)
    distances, places = [], []
    at_once = max(1, _TOKENS_AT_ONCE // observations.n_tokens)
    for images, batch in observations.batches(at_once, "cpu", torch.float32):
        left = torch.cdist(batch.embeddings[:, observations.prefix_tokens :], means)
        if owners is not None:
            left[torch.from_numpy(owners[images])[:, :, None] != torch.arange(len(means))] = torch.inf
        first_patch = n_patches * torch.arange(images.start, images.stop)[:, None]
        for _ in range(per_image):
            distance, patch = left.min(1)
            left.scatter_(1, patch[:, None], torch.inf)
            distances.append(distance)
            places.append(first_patch + patch)
    near, order = torch.sort(torch.cat(distances), dim=0, stable=True)
    found = torch.cat(places).gather(0, order[:n]).T.numpy()
    return Patches(*np.divmod(found, n_patches), near[:n].T.double().numpy())
