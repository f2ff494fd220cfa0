"""Which patches of some images lie nearest to a point: what a concept looks like."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pace.model.settings import Settings
from pace.observations import Observations


class Patches(NamedTuple):
    """Patches of a set of images, nearest first; `patches` counts along the grid, row by row, without prefix tokens."""

    images: npt.NDArray[np.int64]
    patches: npt.NDArray[np.int64]
    distances: npt.NDArray[np.float64]


def nearest(observations: Observations, point: Tensor, n: int, at_once: int, settings: Settings) -> Patches:
    """The n patches nearest to the point (d,), from so many images at once."""
    found: list[Tensor] = []
    for images, batch in observations.batches(at_once, settings.device, settings.dtype):
        distance = torch.linalg.vector_norm(batch.embeddings[:, observations.prefix_tokens :] - point, dim=2)
        flat = distance.flatten()
        order = torch.argsort(flat, stable=True)[:n]
        place = images.start * distance.shape[1] + order
        found.append(torch.stack([flat[order].double(), place.double()]).cpu())
    near, where = torch.cat(found, 1)
    order = torch.argsort(near, stable=True)[:n]
    image, patch = np.divmod(where[order].numpy().astype(np.int64), observations.n_tokens - observations.prefix_tokens)
    return Patches(image, patch, near[order].numpy())
