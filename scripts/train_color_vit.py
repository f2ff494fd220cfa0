"""Train the demo's vision transformer: ``python scripts/train_color_vit.py src/pace/backbones/color_vit.safetensors``.

It learns to tell the two classes of Color apart and nothing else. The paper's perturbation is the augmentation, so that its
predictions survive the perturbation as far as the classes themselves do. An interrupted run resumes where it stopped.
"""

from __future__ import annotations

import argparse
import os

from pace.backbones import finetune
from pace.backbones.color_vit import SIZE, new_model
from pace.backbones.finetuning import Finetuned
from pace.images import Color, Perturbation

# No image of the demo was trained on: its own seeds are small numbers.
IMAGE_SEED = 2**31
EPOCHS = 12
N_PER_CLASS = 1000


def train(
    checkpoint: str | os.PathLike[str] | None,
    *,
    epochs: int = EPOCHS,
    n_per_class: int = N_PER_CLASS,
    batch_size: int = 64,
    seed: int = 0,
) -> Finetuned:
    train, test = (Color(split, n_per_class=n_per_class, size=SIZE, seed=IMAGE_SEED) for split in ("train", "test"))
    return finetune(
        new_model(seed),
        train,
        validation=test,
        epochs=epochs,
        batch_size=batch_size,
        lr=2e-3,
        augment=Perturbation(seed),
        checkpoint=checkpoint,
        seed=seed,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="where to write the weights, a .safetensors file")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--n-per-class", type=int, default=N_PER_CLASS)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    trained = train(given.checkpoint, epochs=given.epochs, n_per_class=given.n_per_class, seed=given.seed)
    print(f"accuracy {trained.accuracy:.3f} on test images, epoch {trained.epoch + 1} of {given.epochs}")
