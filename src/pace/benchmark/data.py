"""The images of a run: both splits of a dataset, or a few classes of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pace.images import Color, ImageSet, open_images
from pace.images.datasets import DATASETS

_PER_CLASS = 10  # images per class to aim for under a limit: nothing can be learned about a class from one image


@dataclass(frozen=True)
class Dataset:
    """`name` is what tables call it."""

    name: str
    train: ImageSet
    test: ImageSet

    def facts(self) -> dict[str, Any]:
        return {"train": self.train.fingerprint(), "test": self.test.fingerprint()}


def open_dataset(
    source: str,
    data_root: str | os.PathLike[str] | None,
    limit: int | None,
    seed: int,
    color_size: int | None = None,
) -> Dataset:
    """ "color", "flower", "cars" or "cub", or a folder with train/ and test/ in it.

    `limit` is the maximum number of images per split, drawn from few classes, the same in both splits. `color_size` is the
    size of Color's images in pixels, instead of the paper's 224.
    """
    train, test = (
        Color(split, size=color_size) if source == "color" and color_size else open_images(source, data_root, split)
        for split in ("train", "test")
    )
    if train.labels is None or test.labels is None:
        raise ValueError(
            f"{source} has no labels; expected a dataset, or train/ and test/ with a folder for each class"
        )
    known = source == "color" or source in DATASETS
    name = source if known else Path(source).expanduser().resolve().name
    if limit is not None:
        classes = np.random.default_rng(seed).permutation(np.intersect1d(train.labels, test.labels))
        classes = classes[: max(2, limit // _PER_CLASS)]
        train, test = (_some(images, classes, limit, seed) for images in (train, test))
    return Dataset(name, train, test)


def _some(images: ImageSet, classes: Any, limit: int, seed: int) -> ImageSet:
    order = np.random.default_rng(seed).permutation(len(images))
    assert images.labels is not None
    members = [order[images.labels[order] == label] for label in classes]
    # One of each class, then another of each, …, so that classes are balanced.
    rounds = np.concatenate([np.arange(len(of_class)) for of_class in members])
    chosen = np.concatenate(members)[np.argsort(rounds, kind="stable")][:limit]
    return images.subset(np.sort(chosen).tolist())
