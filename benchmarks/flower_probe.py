"""End to end on real images: a frozen backbone, Oxford 102 Flower in its official split, and linear probes.

    uv run python benchmarks/flower_probe.py --data-root DIR --weights FILE [--device cuda] [--size 224 518] [--crop 1 0.875]

For every image size and crop, one pass over the official training (1,020) and test (6,149) images with `observe`. Two probes
read each pass, scikit-learn's logistic regression on standardised features: on the CLS token, and on CLS beside the mean
patch, as DINOv2's own evaluation has it (size 224, crop 0.875, bicubic). C is chosen by five-fold cross-validation on the
training images, and so is the row named last; test labels choose nothing. The default architecture is a ViT-S/14 with four
registers, whose native size is 518.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from pace import Backbone
from pace.backbones import load
from pace.backbones.preprocessing import Preprocessing
from pace.images import Flower
from pace.observations import Batch
from pace.observing.extract import observe

STRENGTHS = [0.01, 0.1, 1.0, 10.0, 100.0]  # C: small is strong regularisation
FEATURES = {"CLS": slice(0, 1), "CLS and mean patch": slice(0, 2)}


class Summary(Backbone):
    """Of every image its CLS token and its mean patch alone: all tokens of all images at 518 pixels would take 15 GB."""

    def __init__(
        self, model: nn.Module, crop: float, interpolation: str, mean: float | None, std: float | None
    ) -> None:
        super().__init__(model)
        self._changes: dict[str, Any] = {"crop_ratio": crop, "interpolation": interpolation}
        self._changes |= {name: (value,) * 3 for name, value in (("mean", mean), ("std", std)) if value is not None}

    @property
    def preprocessing(self) -> Preprocessing:
        return replace(super().preprocessing, **self._changes)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        super().grid(height, width)  # refuses a size that does not fit
        return 1, 1

    def __call__(self, images: Tensor) -> Batch:
        tokens = super().__call__(images).embeddings
        both = torch.stack([tokens[:, 0], tokens[:, 1:].mean(1)], dim=1)
        return Batch(both, both.new_full(both.shape[:2], 0.5), None)


class Row(NamedTuple):
    size: int
    crop: float
    features: str
    strength: float
    validation: float
    test: float

    def __str__(self) -> str:
        return (
            f"{self.size:5d}{self.crop:8.3f}  {self.features:20}{self.strength:8g}"
            f"{self.validation:18.1%}{self.test:10.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--model", default="vit_small_patch14_reg4_dinov2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--size", type=int, nargs="+", default=[224], help="sides of the model's input in pixels")
    parser.add_argument(
        "--crop", type=float, nargs="+", default=[1.0], help="parts of a resized image's sides that the model sees"
    )
    parser.add_argument("--interpolation", default="bicubic", choices=["bicubic", "bilinear"])
    parser.add_argument("--mean", type=float, help="of all channels, taken off; the architecture's own by default")
    parser.add_argument("--std", type=float, help="of all channels, divided by; the architecture's own by default")
    parser.add_argument(
        "--limit", type=int, help="for a quick look: this many images of each split, of the first classes"
    )
    options = parser.parse_args()

    splits = [limited(Flower(options.data_root, split), options.limit) for split in ("official-train", "official-test")]
    print(f"{len(splits[0])} training and {len(splits[1])} test images, {options.interpolation}", flush=True)
    rows = []
    for size, crop in product(options.size, options.crop):
        model = load(options.weights, model=options.model, img_size=size).float().to(options.device)
        backbone = Summary(model, crop, options.interpolation, options.mean, options.std)
        start = time.perf_counter()
        train, test = (observe(backbone, images, batch_size=options.batch_size).embeddings.numpy() for images in splits)
        rate = (len(train) + len(test)) / (time.perf_counter() - start)
        print(f"size {size}, crop {crop}: {rate:.0f} images a second from JPEG files", flush=True)
        for name, part in FEATURES.items():
            found, accuracy = probe(train[:, part], splits[0].labels, test[:, part], splits[1].labels)
            strength = found.best_params_["logisticregression__C"]
            rows.append(Row(size, crop, name, strength, found.best_score_, accuracy))
    print(f"{'size':>5}{'crop':>8}  {'features':20}{'C':>8}{'cross-validation':>18}{'test':>10}")
    print(*rows, sep="\n")
    print("best in cross-validation:", max(rows, key=lambda row: row.validation), sep="\n")


def limited(images: Flower, limit: int | None) -> Flower:
    """Ten training images a class make this many; as many test images of the same classes."""
    if limit is None:
        return images
    return images.subset(np.flatnonzero(images.labels < max(2, limit // 10))[:limit])


def probe(
    train: np.ndarray, train_labels: np.ndarray, test: np.ndarray, test_labels: np.ndarray
) -> tuple[GridSearchCV, float]:
    """The probe with the strength that cross-validation on the training images prefers, and its accuracy on the test's."""
    search = GridSearchCV(
        make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000)),
        {"logisticregression__C": STRENGTHS},
        cv=StratifiedKFold(5, shuffle=True, random_state=0),
        n_jobs=-1,
    ).fit(train.reshape(len(train), -1), train_labels)
    return search, search.score(test.reshape(len(test), -1), test_labels)


if __name__ == "__main__":
    main()
