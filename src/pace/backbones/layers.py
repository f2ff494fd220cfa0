"""Which block to explain: the last one whose patches still differ within an image."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pace.backbones.backbone import Backbone
from pace.images import ImageSet, open_images
from pace.images.imageset import OnError
from pace.observations import Observations
from pace.observing.extract import observe
from pace.observing.sources import Images

_BATCH = 16  # images whose patches are held in float64 at once


def within_share(observations: Observations) -> float:
    """The share of the patches' variance that lies within images rather than between them, 0 to 1.

    Patches are weighted by attention, every image has the same weight, and prefix tokens are left out. Near 0, all
    patches of an image say the same, and no patch has a concept of its own.
    """
    if len(observations) < 2:
        raise ValueError("observations: expected 2 images or more to compare; found 1")
    within, means = 0.0, []
    for part, batch in observations.batches(_BATCH, dtype=torch.float64):
        patches = batch.embeddings[:, observations.prefix_tokens :]
        weights = batch.attention[:, observations.prefix_tokens :]
        total = weights.sum(1, keepdim=True)
        if not total.all():
            image = part.start + int((total == 0).nonzero()[0, 0])
            raise ValueError(f"attention of image {image} is zero for every patch")
        weights = weights / total
        mean = torch.einsum("ij,ijd->id", weights, patches)
        within += float((weights * (patches - mean[:, None]).square().sum(2)).sum())
        means.append(mean)
    within /= len(observations)
    center = torch.cat(means)
    between = float((center - center.mean(0)).square().sum(1).mean())
    return within / (within + between) if within else 0.0


def choose_layer(
    model: Any,
    images: Images,
    *,
    least: float = 1 / 3,
    sample: int = 256,
    seed: int = 0,
    batch_size: int = 64,
    data_root: str | os.PathLike[str] | None = None,
    split: str = "train",
    on_error: OnError = "raise",
    progress: bool | None = None,
    report: Callable[[str], None] | None = None,
) -> int:
    """The last block at which at least `least` of the patches' variance lies within images, counted from 0.

    Meant for ``Backbone(model, layer, attention_layer=-1)``: patches are weighted by the last block's attention (by each
    block's own for an object that only follows `Model`). Only the second half of the blocks is considered, and of Swin
    the last stage. Falls back to the block with the largest share.

    Parameters
    ----------
    model, images
        As `Backbone` and `observe` take them; `batch_size`, `data_root`, `split`, `on_error` and `progress` are those of
        `observe`.
    sample
        Number of images to observe, drawn with `seed`, once for every block considered. A DataLoader is used in full.
    report
        Called with one line that says which block was chosen and why.
    """
    if not 0 <= least <= 1:
        raise ValueError(f"least: expected a share from 0 to 1; found {least}")
    if sample < 2:
        raise ValueError(f"sample: expected 2 images or more; found {sample}")
    if isinstance(images, (str, os.PathLike)):
        images = open_images(images, data_root, split, on_error)
    if isinstance(images, (Tensor, ImageSet)) and len(images) > sample:
        rows = np.sort(np.random.default_rng(seed).permutation(len(images))[:sample]).tolist()
        images = images[rows] if isinstance(images, Tensor) else images.subset(rows)
    last = Backbone(model)
    attention_layer = -1 if last.has_known_blocks else None
    shares: dict[int, float] = {}
    for layer in range(last.layer, last.layers // 2 - 1, -1):
        backbone = Backbone(model, layer, attention_layer=attention_layer)
        if backbone.grid(*backbone.preprocessing.size) != last.grid(*last.preprocessing.size):
            break
        shares[layer] = within_share(observe(backbone, images, batch_size=batch_size, progress=progress))
        if shares[layer] >= least:
            break
    chosen = max(shares, key=shares.__getitem__)  # if one reaches `least`, it is the largest: the search stops there
    if report is not None:
        report(_reason(chosen, shares, least))
    return chosen


def _reason(chosen: int, shares: Mapping[int, float], least: float) -> str:
    percent = {layer: f"{100 * share:.1f} %" for layer, share in shares.items()}
    others = [f"{share} at block {layer}" for layer, share in percent.items() if layer != chosen]
    beside = f", against {', '.join(others)}" if others else ""
    missed = "" if shares[chosen] >= least else f"; no block considered reaches {100 * least:.1f} %"
    return f"block {chosen}: {percent[chosen]} of its patches' variance lies within images{beside}{missed}"
