"""Train the vision transformer of Birds: ``python scripts/train_birds_vit.py src/pace/backbones/birds_vit.safetensors``.

It takes about 20 minutes on one core. The augmentation is mild on three images of four, since a crop without the head or a grey
image leaves the class open; the fourth has the paper's perturbation, so that predictions survive it as far as they can. With
``--shortcut`` the pictures of one class have a tag. An interrupted run resumes where it stopped.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pace.backbones import finetune
from pace.backbones.birds_vit import SIZE, new_model
from pace.backbones.finetuning import Finetuned
from pace.backbones.training import Augmentation
from pace.files import read_tensors, save_tensors
from pace.images import AUGMENT_SEED, Birds, Perturbation

# Nobody else's images: other seeds are small numbers.
IMAGE_SEED = 2**31
EPOCHS = 14
N_PER_CLASS = 1000


@dataclass(frozen=True)
class Mixture:
    """The paper's perturbation for every fourth draw, `Augmentation` for the others."""

    seed: int = 0

    def __call__(self, batch: Tensor, draws: Any) -> Tensor:
        strong = torch.as_tensor(draws) % 4 == 0
        changed = Augmentation(self.seed)(batch, draws)
        if strong.any():
            changed[strong] = Perturbation(AUGMENT_SEED + self.seed)(batch[strong], torch.as_tensor(draws)[strong])
        return changed


def train(
    checkpoint: str | os.PathLike[str] | None,
    *,
    epochs: int = EPOCHS,
    n_per_class: int = N_PER_CLASS,
    batch_size: int = 32,
    seed: int = 0,
    shortcut: bool = False,
) -> Finetuned:
    given = {"n_per_class": n_per_class, "size": SIZE, "seed": IMAGE_SEED, "shortcut": shortcut}
    trained = finetune(
        new_model(seed),
        Birds("train", **given),
        validation=Birds("test", **given),
        epochs=epochs,
        batch_size=batch_size,
        lr=1.5e-3,
        augment=Mixture(seed),
        checkpoint=checkpoint,
        seed=seed,
    )
    if checkpoint is not None:
        halve(Path(checkpoint))
    return trained


def halve(path: Path) -> None:
    """Keep the weights in float16, since the file comes with the package."""
    tensors, header = read_tensors(path, dict, "train again")
    save_tensors(path, {name: tensor.half() for name, tensor in tensors.items()}, header)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="where to write the weights, a .safetensors file")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--n-per-class", type=int, default=N_PER_CLASS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shortcut", action="store_true", help="train on Birds(shortcut=True)")
    options = vars(parser.parse_args())
    trained = train(options.pop("checkpoint"), **options)
    print(f"accuracy {trained.accuracy:.3f} on test images, epoch {trained.epoch + 1} of {options['epochs']}")
