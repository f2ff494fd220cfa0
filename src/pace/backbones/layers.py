"""Which block to explain: the last one whose patches still differ within an image."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pace.backbones.backbone import Backbone
from pace.backbones.libraries import describe
from pace.backbones.tower import Tower
from pace.images import ImageSet, open_images
from pace.observations import Observations
from pace.observing.extract import observe
from pace.observing.sources import Images

_BATCH = 16  # images whose patches are held in float64 at once
_SAMPLE = 256  # images that are observed at every block considered


def within_share(observations: Observations) -> float:
    """The share of the patches' variance that lies within images rather than between them, 0 to 1.

    Patches are weighted by attention, every image has the same weight, and prefix tokens are left out. Near 0, all
    patches of an image say the same, and no patch has a concept of its own.
    """
    if len(observations) < 2:
        raise ValueError("observations: expected 2 images or more to compare; found 1")
    within, means = 0.0, []
    for _, batch in observations.batches(_BATCH, dtype=torch.float64):
        patches = batch.embeddings[:, observations.prefix_tokens :]
        weights = batch.attention[:, observations.prefix_tokens :]
        weights = weights / weights.sum(1, keepdim=True)
        if weights.isnan().any():
            raise ValueError("attention: found an image with none on its patches")
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
    seed: int = 0,
    batch_size: int = 64,
    data_root: str | os.PathLike[str] | None = None,
    report: Callable[[str], None] | None = None,
) -> int:
    """The last block at which at least `least` of the patches' variance lies within images, counted from 0.

    Meant for ``Backbone(model, layer, attention_layer=-1)``: patches are weighted by the last block's attention (by each
    block's own for an object that only follows `Model`). Only the second half of the blocks is considered, and of Swin
    the last stage. Falls back to the block with the largest share.

    Parameters
    ----------
    model, images
        As `Backbone` and `observe` take them, with `data_root` for a dataset's name. Of more than 256 images, 256 are
        drawn with `seed`; a DataLoader is used in full.
    report
        Called with one line that says which block was chosen and why.
    """
    if isinstance(images, (str, os.PathLike)):
        images = open_images(images, data_root)
    if isinstance(images, (Tensor, ImageSet)) and len(images) > _SAMPLE:
        rows = np.sort(np.random.default_rng(seed).permutation(len(images))[:_SAMPLE]).tolist()
        images = images[rows] if isinstance(images, Tensor) else images.subset(rows)
    last, attention_layer = Backbone(model), -1 if isinstance(describe(model), Tower) else None
    shares: dict[int, float] = {}
    for layer in range(last.layer, last.layers // 2 - 1, -1):
        backbone = Backbone(model, layer, attention_layer=attention_layer)
        if backbone.grid(*backbone.preprocessing.size) != last.grid(*last.preprocessing.size):
            break
        shares[layer] = within_share(observe(backbone, images, batch_size=batch_size))
        if shares[layer] >= least:
            break
    chosen = max(shares, key=shares.__getitem__)  # if one reaches `least`, it is the largest: the search stops there
    if report is not None:
        others = [f"{100 * share:.1f} % at block {layer}" for layer, share in shares.items() if layer != chosen]
        beside = f", against {', '.join(others)}" if others else ""
        missed = "" if shares[chosen] >= least else f"; no block considered reaches {100 * least:.1f} %"
        share = f"{100 * shares[chosen]:.1f} % of its patches' variance"
        report(f"block {chosen}: {share} lies within images{beside}{missed}")
    return chosen
