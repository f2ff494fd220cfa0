"""Train the vision transformer of Birds: ``python scripts/train_birds_vit.py src/pace/backbones/birds_vit.safetensors``.

Birds exists to judge explanations, and no explanation finds parts that a transformer does not tell apart. So beside the class
the transformer is told what its patches show: linear heads on the patches of the last two blocks, thrown away afterwards, are
asked for the part of every patch and for the kind of every part's mean patch, and the patches of a part are drawn together.
Half of the views have the paper's perturbation, the others its flip and colour jitter. It takes about 10 minutes of one core.
With ``--shortcut`` the pictures of one class have a tag.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pace.backbones import save_finetuned
from pace.backbones.birds_vit import LAYER, SIZE, new_model
from pace.backbones.training import Epoch
from pace.images import AUGMENT_SEED, Birds, Perturbation
from pace.images.birds import KIND_NAMES, KIND_PARTS, PART_NAMES
from pace.progress import progress

IMAGE_SEED = 2**31  # nobody else's images: other seeds are small numbers
STEPS, BATCH, N_PER_CLASS = 2400, 16, 600
RATE, MUON_RATE, WARM_UP, WEIGHT_DECAY = 1.5e-3, 0.02, 0.05, 0.05
# Of the losses beside the class's: kinds that lie as far apart as parts would be parts.
PART, KIND, WITHIN = 2.0, 0.05, 3.0
PATCH = 8
ONE_PART = 2 / 3  # patches with a smaller share of their part are asked for it, but not drawn to the others of it

PARTS, KINDS = len(PART_NAMES), len(KIND_NAMES)
IS_OF = F.one_hot(torch.from_numpy(KIND_PARTS), PARTS).T.bool()  # (parts, kinds)


class Truth(NamedTuple):
    """What the patches of some images show."""

    part: Tensor  # (B, J) of most of each patch
    pure: Tensor  # (B, J, parts) 1 where a patch is of a part and hardly of another
    kinds: Tensor  # (B, parts)


def views(pixels: Tensor, kinds: Tensor, draws: np.ndarray, strong: np.ndarray, seed: int) -> tuple[Tensor, Tensor]:
    """Changed images (B, 3, H, W) and the kinds of their pixels (B, H, W)."""
    pixels, kinds = pixels.clone(), kinds.clone()
    every = Perturbation(AUGMENT_SEED + 2 * seed), Perturbation(AUGMENT_SEED + 2 * seed + 1, ("flip", "jitter"))
    for perturbation, rows in zip(every, (np.flatnonzero(strong), np.flatnonzero(~strong)), strict=True):
        if rows.size:
            pixels[rows] = perturbation(pixels[rows], draws[rows])
            for row, crop in zip(rows, perturbation.crops(draws[rows], (SIZE, SIZE)), strict=True):
                across, down = (crop[i] + (np.arange(SIZE) + 0.5) / SIZE * (crop[i + 2] - crop[i]) for i in (0, 1))
                y, x = (torch.from_numpy((SIZE * place).astype(np.int64)) for place in (down, across))
                kinds[row] = kinds[row][y[:, None], x]
    return pixels, kinds


def truth_of(kinds: Tensor) -> Truth:
    """Of pixels' kinds (B, H, W)."""
    cells = F.unfold(kinds[:, None].float(), PATCH, stride=PATCH).long().mT  # (B, J, pixels)
    shares = torch.zeros(*cells.shape[:2], KINDS).scatter_add_(2, cells, torch.ones(cells.shape)) / PATCH**2
    of_parts = shares @ IS_OF.T.float()
    part = of_parts.argmax(2)
    own = shares.masked_fill(~IS_OF[part], -1).argmax(2)
    pure = F.one_hot(part, PARTS) * (of_parts.amax(2, keepdim=True) >= ONE_PART)
    patches = torch.zeros(len(kinds), KINDS).scatter_add_(1, own, pure.sum(2).float())
    return Truth(part, pure.float(), patches[:, None].masked_fill(~IS_OF, -1).argmax(2))


class Heads(nn.Module):
    """What a block's patches (B, J, d) are asked."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.part, self.kind = nn.Linear(dim, PARTS), nn.Linear(dim, KINDS)

    def forward(self, tokens: Tensor, truth: Truth) -> tuple[Tensor, Tensor, Tensor]:
        """Losses: the part of every patch, the kind of every part, and the share of the variance that lies within parts."""
        normed = F.layer_norm(tokens, tokens.shape[-1:])
        of_part = F.cross_entropy(self.part(normed).flatten(0, 1), truth.part.flatten())
        size = truth.pure.sum(1)
        means = truth.pure.mT @ normed / size.clamp_min(1)[:, :, None]
        of_kind = F.cross_entropy(self.kind(means).masked_fill(~IS_OF, -1e4)[size > 0], truth.kinds[size > 0])
        weight = size.sum(0)
        there, weight = weight > 0, weight.clamp_min(1)
        centres = torch.einsum("bjp,bjd->pd", truth.pure, tokens) / weight[:, None]
        squares = torch.einsum("bjp,bj->p", truth.pure, tokens.square().sum(2)) / weight
        within = (squares - centres.square().sum(1))[there].mean()
        between = (centres[there] - centres[there].mean(0)).square().sum(1).mean()
        return of_part, of_kind, within / (within + between)


def train(
    checkpoint: str | os.PathLike[str],
    *,
    steps: int = STEPS,
    n_per_class: int = N_PER_CLASS,
    seed: int = 0,
    shortcut: bool = False,
) -> float:
    """Write the weights; gives the accuracy on images of the other split."""
    images, test = (Birds(split, n_per_class, SIZE, IMAGE_SEED, shortcut=shortcut) for split in ("train", "test"))
    pixels = torch.stack([images[i] for i in range(len(images))])
    kinds = torch.from_numpy(np.stack([images.pixel_kinds(i) for i in range(len(images))]).astype(np.uint8))
    labels = torch.as_tensor(images.labels)
    torch.manual_seed(seed)
    model, rng = new_model(seed).train(), np.random.default_rng(seed)
    tokens: dict[int, Tensor] = {}
    heads = nn.ModuleDict({str(block): Heads(model.embed_dim) for block in (LAYER - 1, LAYER)})
    for block in map(int, heads):
        model.blocks[block].register_forward_hook(lambda _m, _i, out, block=block: tokens.update({block: out}))
    hidden = [p for p in model.blocks.parameters() if p.ndim == 2]
    rest = [p for p in [*model.parameters(), *heads.parameters()] if all(p is not one for one in hidden)]
    groups = [
        {"params": [p for p in rest if p.ndim > 1]},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizers = [
        torch.optim.AdamW(groups, RATE, weight_decay=WEIGHT_DECAY),
        torch.optim.Muon(hidden, MUON_RATE, weight_decay=WEIGHT_DECAY),  # half the steps of AdamW alone
    ]
    per_epoch, warm_up = len(images) // BATCH, max(1, int(WARM_UP * steps))

    def rate(step: int) -> float:
        """Linear warm-up, then a cosine to zero."""
        if step < warm_up:
            return (step + 1) / warm_up
        return (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up))) / 2

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    with progress("training", steps) as advance:
        for step in range(steps):
            if step % per_epoch == 0:
                order = rng.permutation(len(images))
            rows = order[step % per_epoch * BATCH :][:BATCH]
            draws, strong = rows + step // per_epoch * len(images), rng.random(BATCH) < 0.5
            batch, shown = views(pixels[rows].float() / 255, kinds[rows], draws, strong, seed)
            truth = truth_of(shown)
            with torch.autocast("cpu", torch.bfloat16):
                scores = model(2 * batch - 1)
            loss = F.cross_entropy(scores.float(), labels[rows], label_smoothing=0.1)
            for block, head in heads.items():
                part, kind, within = head(tokens[int(block)][:, 1:].float(), truth)
                loss = loss + (PART * part + KIND * kind + WITHIN * within) / len(heads)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for each in (*optimizers, *schedules):
                each.step()
            advance(1)
    with torch.no_grad():
        scores = torch.cat([model.eval()(2 * test[i][None].float() / 255 - 1) for i in range(len(test))])
    answers = torch.as_tensor(test.labels)
    accuracy = float((scores.argmax(1) == answers).float().mean())
    result = Epoch(loss.item(), F.cross_entropy(scores, answers).item(), accuracy, len(test))
    save_finetuned(
        model.half(), checkpoint, test.class_names, [result]
    )  # in float16, since the file comes with the package
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="where to write the weights, a .safetensors file")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--n-per-class", type=int, default=N_PER_CLASS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shortcut", action="store_true", help="train on Birds(shortcut=True)")
    torch.set_num_threads(1)
    print(f"accuracy {train(**vars(parser.parse_args())):.3f} on images of the other split")
