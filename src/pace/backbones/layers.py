"""Which block to explain: the last one whose patches still differ within an image."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pace.backbones.backbone import Backbone, Head
from pace.images import ImageSet, open_images
from pace.images.loading import decoded
from pace.observations import Batch, Observations
from pace.observing.extract import Known, observe
from pace.observing.sources import Images

_BATCH = 16  # images whose patches are held in float64 at once
_SAMPLE = 256  # images that are observed at every block considered, unless that takes more than
_ROOM = 2 << 30  # bytes
_LEAST = 1 / 3


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


class Blocks:
    """A backbone that gives several blocks side by side, and with `pooled` what a classifier reads in place of predictions."""

    def __init__(self, backbone: Backbone, layers: Sequence[int] = (), pooled: bool = False) -> None:
        self.backbone, self.layers, self.gives_pooled = backbone, [*layers] or [backbone.layer], pooled
        self.layer, self.device, self.preprocessing = backbone.layer, backbone.device, backbone.preprocessing
        self.prefix_tokens, self.grid = backbone.prefix_tokens, backbone.grid

    def __call__(self, images: Tensor) -> Batch:
        return self.backbone.at_blocks(images, self.layers, self.gives_pooled)

    def fingerprint(self) -> str:
        return f"{self.backbone.fingerprint()}, blocks {self.layers}"


def choose_layer(
    model: Any,
    images: Images,
    *,
    least: float = _LEAST,
    seed: int = 0,
    batch_size: int = 64,
    data_root: str | os.PathLike[str] | None = None,
    report: Callable[[str], None] | None = None,
) -> int:
    """The last block at which at least `least` of the patches' variance lies within images, counted from 0.

    Meant for ``Backbone(model, layer, attention_layer=-1)``: patches are weighted by the last block's attention. Only the
    second half of the blocks is considered, and of Swin the last stage, all of them in one run of the model. Falls back to
    the block with the largest share, and for one image, which has nothing to be compared with, to the last block.

    Parameters
    ----------
    model, images
        As `Backbone` and `observe` take them, with `data_root` for a dataset's name. Of more than 256 images, 256 are
        drawn with `seed` (fewer if their blocks take more than 2 GB); a DataLoader is used in full.
    report
        Called with one line that says which block was chosen and why.
    """
    blocks = _considered(model)
    if isinstance(images, (str, os.PathLike)):
        images = open_images(images, data_root)
    if isinstance(images, (Tensor, ImageSet)):
        rows = _sample(blocks, len(images), seed)
        images = images[rows] if isinstance(images, Tensor) else images.subset(rows)
    return _best(blocks, observe(blocks, images, batch_size=batch_size), least, report)[0]


def look_for_layer(
    model: Any,
    images: ImageSet,
    seed: int,
    batch_size: int,
    *,
    report: Callable[[str], None],
    count_cls: bool = False,
    head: Head | None = None,
    pooled: bool = False,
) -> tuple[int, Known]:
    """`choose_layer`, and what was seen at the chosen block, so that these images need not be decoded and run again."""
    blocks = _considered(model, count_cls, head, pooled)
    rows = _sample(blocks, len(images), seed)
    chunks = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    found = decoded(images, chunks, blocks.preprocessing, for_gpu=blocks.device.type == "cuda")
    pixels = torch.cat([batch for _, batch in found])
    layer, seen = _best(blocks, observe(blocks, pixels, batch_size=batch_size), _LEAST, report)
    return layer, Known({row: place for place, row in enumerate(rows)}, pixels, seen)


def _considered(model: Any, count_cls: bool = False, head: Head | None = None, pooled: bool = False) -> Blocks:
    """The blocks to choose from, the last one first."""
    last = Backbone(model, head=head, count_cls=count_cls)
    size = last.preprocessing.size
    layers = range(last.layer, last.layers // 2 - 1, -1)
    same = [*takewhile(lambda layer: Backbone(model, layer).grid(*size) == last.grid(*size), layers)]
    return Blocks(last, same, pooled)


def _sample(blocks: Blocks, images: int, seed: int) -> list[int]:
    """Numbers of the images that are observed at every block."""
    tokens = int(np.prod(blocks.grid(*blocks.preprocessing.size))) + blocks.prefix_tokens
    fit = _ROOM // (4 * tokens * blocks.backbone.dim * len(blocks.layers))
    return sorted(np.random.default_rng(seed).permutation(images)[: max(2, min(_SAMPLE, fit))].tolist())


def _best(
    blocks: Blocks, seen: Observations, least: float, report: Callable[[str], None] | None
) -> tuple[int, Observations]:
    """The block that is chosen, and its own observations."""
    parts = np.split(np.arange(seen.dim), len(blocks.layers))
    if len(seen) < 2:
        if report is not None:
            report(f"block {blocks.layer}, the last one: blocks are compared by several images, and there is one")
        return blocks.layer, _block(seen, parts[0])
    shares: dict[int, float] = {}
    for number, layer in enumerate(blocks.layers):
        shares[layer] = within_share(_block(seen, parts[number]))
        if shares[layer] >= least:
            break
    chosen = max(shares, key=shares.__getitem__)  # if one reaches `least`, it is the largest: the search stops there
    if report is not None:
        others = [f"{100 * share:.1f} % at block {layer}" for layer, share in shares.items() if layer != chosen]
        beside = f", against {', '.join(others)}" if others else ""
        missed = "" if shares[chosen] >= least else f"; no block considered reaches {100 * least:.1f} %"
        share = f"{100 * shares[chosen]:.1f} % of its patches' variance"
        report(f"block {chosen}: {share} lies within images{beside}{missed}")
    return chosen, _block(seen, parts[blocks.layers.index(chosen)])


def _block(seen: Observations, part: NDArray[np.intp]) -> Observations:
    embeddings = seen.embeddings[..., int(part[0]) : int(part[-1]) + 1]
    return Observations(embeddings, seen.attention, seen.predictions, seen.grid, seen.prefix_tokens, check=False)
