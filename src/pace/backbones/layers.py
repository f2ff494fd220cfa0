"""Which block to explain: the last whose patches still differ from one another within an image."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pace.backbones.backbone import Backbone
from pace.backbones.tower import Tower
from pace.images import ImageSet, open_images
from pace.images.imageset import OnError
from pace.observations import Observations
from pace.observing.extract import observe
from pace.observing.sources import Images

_BATCH = 16  # images whose patches are held in float64 at once
_DIGITS = 3  # of a percentage at most


def within_share(observations: Observations) -> float:
    """How much of the patches' variance lies within images rather than between them, 0 to 1.

    Patches weigh as their image attends to them; every image weighs the same, and prefix tokens are left out. Near 0 all
    patches of an image say the same, however many concepts there are to tell images apart.
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
    """The last block at which at least `least` of the patches' variance lies within images, as a layer from 0.

    To be explained as ``Backbone(model, layer, attention_layer=-1)``: the patches weigh as the last block attends to them, at
    every block alike (an object that only follows `Model` is asked with each layer's own attention). Only the second half of
    the blocks is asked, as far as patches are not merged in between (Swin). If none has enough, it is the one that has most.

    Parameters
    ----------
    model, images
        As `Backbone` and `observe` take them; `batch_size`, `data_root`, `split`, `on_error` and `progress` are those of
        `observe`.
    sample
        So many of the images, drawn with `seed`, are looked at, once for every block asked. Of a DataLoader, all are.
    report
        Is told in one line which block it is, and why.
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
    shares: dict[int, float] = {}
    # An object that only follows the protocol `Model` knows the attention of the layer it is asked for.
    weighing = -1 if isinstance(last._sight, Tower) else None
    for layer in range(last.layer, last.layers // 2 - 1, -1):
        backbone = Backbone(model, layer, attention_layer=weighing)
        if backbone.grid(*backbone.preprocessing.size) != last.grid(*last.preprocessing.size):
            break
        shares[layer] = within_share(observe(backbone, images, batch_size=batch_size, progress=progress))
        if shares[layer] >= least:
            break
    chosen = max(shares, key=shares.__getitem__)  # one that has enough has most: the search ends with it
    if report is not None:
        report(_why(chosen, shares, least))
    return chosen


def _why(chosen: int, shares: Mapping[int, float], least: float) -> str:
    refused, digits = [share for share in shares.values() if share < least], 0
    while digits < _DIGITS and any(round(100 * share, digits) >= round(100 * least, digits) for share in refused):
        digits += 1  # or one that is refused would look like enough
    percent = {layer: f"{100 * share:.{digits}f} %" for layer, share in shares.items()}
    others = [f"{share} at block {layer}" for layer, share in percent.items() if layer != chosen]
    beside = f", against {', '.join(others)}" if others else ""
    missed = "" if shares[chosen] >= least else f"; none that can be asked reaches {100 * least:.{digits}f} %"
    return f"block {chosen}: {percent[chosen]} of its patches' variance lies within images{beside}{missed}"
