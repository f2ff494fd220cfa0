"""Which block to explain: where a change of view leaves most of what sets the patches of an image apart."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pace.backbones.backbone import Backbone, Head
from pace.images import ByName, ImageSet, Perturbation, open_images
from pace.images.loading import decoded
from pace.observations import Batch, Observations, as_tensor
from pace.observing.extract import Known, observe_pair
from pace.observing.sources import Images
from pace.places import matching_patches

_BATCH = 16  # images whose patches are held in float64 at once
_SAMPLE = 64  # images that are observed at every block considered, unless that takes more than
_ROOM = 2 << 30  # bytes
_AS_GOOD = 0.95  # of the best: later blocks say more of the prediction


def kept_share(observations: Observations, perturbed: Observations) -> float:
    """The share of what sets the patches of an image apart that a change of view leaves alone, at most 1.

    Compares patches that show the same place in an image and in its perturbed view, weighted by attention, every image
    alike; prefix tokens are left out. Near 0 or below, patches differ no more than a change of view changes them, and no
    concept can follow a part of the picture.
    """
    if perturbed.crops is None or observations.grid is None:
        raise ValueError("perturbed: expected observations with crops, as Perturbation gives them, of a known grid")
    matches, prefix = (
        torch.from_numpy(matching_patches(perturbed.crops[:], observations.grid)),
        observations.prefix_tokens,
    )
    apart = moved = compared = 0.0
    for rows, batch in observations.batches(_BATCH, dtype=torch.float64):
        place = matches[rows].to(batch.embeddings.device)
        patches, other = batch.embeddings[:, prefix:], perturbed.batch(rows, dtype=torch.float64).embeddings[:, prefix:]
        weights = batch.attention[:, prefix:]
        weights = weights / weights.sum(1, keepdim=True)
        if weights.isnan().any():
            raise ValueError("attention: found an image with none on its patches")
        mean = torch.einsum("ij,ijd->id", weights, patches)
        apart += float((weights * (patches - mean[:, None]).square().sum(2)).sum())
        here, weights = patches.gather(1, place[:, :, None].expand_as(patches)), weights.gather(1, place)
        moved += float((weights * (other - here).square().sum(2)).sum()) / 2
        compared += float(weights.sum())
    return 1 - moved / compared * len(observations) / apart if apart else 0.0


class Blocks:
    """A backbone that gives several blocks side by side, and with `pooled` what a classifier reads in place of predictions."""

    def __init__(self, backbone: Backbone, layers: Sequence[int] = (), pooled: bool = False) -> None:
        self.backbone, self.layers, self.gives_pooled = backbone, [*layers] or [*backbone.blocks], pooled
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
    seed: int = 0,
    batch_size: int = 64,
    data_root: str | os.PathLike[str] | None = None,
    report: Callable[[str], None] | None = None,
) -> int | tuple[int, int]:
    """The last block, which tells kinds, after the one that tells parts: the last whose `kept_share` is 95 % of the best.

    Meant for ``Backbone(model, layer, attention_layer=-1)``: patches are weighted by the last block's attention. Only the
    second half of the blocks is considered, and of Swin the last stage, all of them in one run of the model. One number if
    both are the same, or if the model cannot be asked for two.

    Parameters
    ----------
    model, images
        As `Backbone` and `observe` take them, with `data_root` for a dataset's name. Of more than 64 images, 64 are
        drawn with `seed` (fewer if their blocks take more than 2 GB); a DataLoader is used in full. Images with names are
        perturbed by these.
    report
        Called with one line that says which block was chosen and why.
    """
    blocks = _considered(model)
    if isinstance(images, (str, os.PathLike)):
        images = open_images(images, data_root)
    if isinstance(images, (Tensor, ImageSet)):
        rows = _sample(blocks, len(images), seed)
        images = images[rows] if isinstance(images, Tensor) else images.subset(rows)
    perturb = ByName(Perturbation(seed), images.names) if isinstance(images, ImageSet) else Perturbation(seed)
    return _best(blocks, *observe_pair(blocks, images, perturb=perturb, batch_size=batch_size), report)[0]


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
) -> tuple[int | tuple[int, int], Known]:
    """`choose_layer`, and what was seen at the chosen blocks, so that these images need not be decoded and run again."""
    blocks = _considered(model, count_cls, head, pooled)
    rows = _sample(blocks, len(images), seed)
    chunks = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    found = decoded(images, chunks, blocks.preprocessing, for_gpu=blocks.device.type == "cuda")
    pixels = torch.cat([batch for _, batch in found])
    perturb = ByName(Perturbation(seed), [images.names[row] for row in rows])
    layer, views = _best(blocks, *observe_pair(blocks, pixels, perturb=perturb, batch_size=batch_size), report)
    return layer, Known({row: place for place, row in enumerate(rows)}, pixels, views)


def _considered(model: Any, count_cls: bool = False, head: Head | None = None, pooled: bool = False) -> Blocks:
    """The blocks to choose from."""
    last = Backbone(model, head=head, count_cls=count_cls)
    size = last.preprocessing.size
    layers = range(last.layer, last.layers // 2 - 1, -1)
    same = [*takewhile(lambda layer: Backbone(model, layer).grid(*size) == last.grid(*size), layers)]
    return Blocks(last, same[::-1], pooled)


def _sample(blocks: Blocks, images: int, seed: int) -> list[int]:
    """Numbers of the images of which both views are observed at every block."""
    tokens = int(np.prod(blocks.grid(*blocks.preprocessing.size))) + blocks.prefix_tokens
    fit = _ROOM // (2 * 4 * tokens * blocks.backbone.dim * len(blocks.layers))
    return sorted(np.random.default_rng(seed).permutation(images)[: max(1, min(_SAMPLE, fit))].tolist())


def _best(
    blocks: Blocks, seen: Observations, perturbed: Observations, report: Callable[[str], None] | None
) -> tuple[int | tuple[int, int], tuple[Observations, Observations]]:
    """The blocks that are chosen, and their own observations."""
    last = len(blocks.layers) - 1
    shares = [kept_share(_at(seen, blocks, number), _at(perturbed, blocks, number)) for number in range(last + 1)]
    least = max(shares) - (1 - _AS_GOOD) * abs(max(shares))
    chosen = max(number for number, share in enumerate(shares) if share >= least)
    both = chosen != last and blocks.backbone.can_show_two
    if report is not None:
        others = ", ".join(f"{shares[n]:.0%} at {layer}" for n, layer in enumerate(blocks.layers) if n != chosen)
        beside = f" ({others})" if others else ""
        kinds = f"; kinds at block {blocks.layers[last]}, the last" if both else ""
        what = f"where a change of view leaves {shares[chosen]:.0%} of what sets patches apart{beside}{kinds}"
        report(f"parts at block {blocks.layers[chosen]}, {what}")
    numbers = [chosen, last] if both else [chosen]
    found = blocks.layers[chosen]
    return (found, blocks.layers[last]) if both else found, (
        _at(seen, blocks, *numbers),
        _at(perturbed, blocks, *numbers),
    )


def _at(seen: Observations, blocks: Blocks, *numbers: int) -> Observations:
    width = seen.dim // len(blocks.layers)
    parts = [seen.embeddings[..., width * number : width * (number + 1)] for number in numbers]
    own = parts[0] if len(parts) == 1 else torch.cat([as_tensor(part) for part in parts], -1)
    crops, layout = seen.crops, (seen.grid, seen.prefix_tokens)
    return Observations(own, seen.attention, seen.predictions, *layout, crops=crops, check=False)
