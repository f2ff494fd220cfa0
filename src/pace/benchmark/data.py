"""What all methods get for a dataset: the same images, observations, perturbations and ground truth."""

from __future__ import annotations

import os
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pace.backbones import Backbone
from pace.baselines import EveryToken, last_block, reads_uncounted
from pace.benchmark.cache import code_digest, key_of
from pace.images import Color, ImageSet, Perturbation, open_images
from pace.metrics.declare import Array
from pace.metrics.ground_truth import known_truth, seen_colors, true_colors
from pace.metrics.hiding import Hiding, hide
from pace.metrics.inputs import labels_of
from pace.observations import Observations
from pace.observing.extract import observe_pair

_PER_CLASS = 10  # images per class to aim for under a limit: nothing can be learned about a class from one image
_SHARE_OF_GPU = 0.4  # that observations may use; methods need the rest


@dataclass(frozen=True)
class Dataset:
    """Both splits; `name` is what tables call it."""

    name: str
    train: ImageSet
    test: ImageSet


def open_dataset(
    source: str, data_root: str | os.PathLike[str] | None, limit: int | None, seed: int, color_size: int | None = None
) -> Dataset:
    """ "color", "flower", "cars" or "cub", or a folder with train/ and test/ in it.

    `limit` is the maximum number of images per split, drawn from few classes, the same in both splits. `color_size` is the
    size of Color's images in pixels, instead of the paper's 224.
    """
    if limit is not None and limit < 4:
        raise ValueError(f"limit: expected 4 images or more; found {limit}")
    train, test = (
        Color(split, size=color_size) if source == "color" and color_size else open_images(source, data_root, split)
        for split in ("train", "test")
    )
    if train.labels is None or test.labels is None:
        raise ValueError(f"{source} has no labels; expected a dataset, or train/ and test/ with a folder per class")
    name = Path(os.path.abspath(Path(source).expanduser())).name  # a dataset's name stays what it is
    if limit is not None:
        classes = np.random.default_rng(seed).permutation(np.intersect1d(train.labels, test.labels))
        classes = classes[: max(2, limit // _PER_CLASS)]
        train, test = (_some(images, images.labels, classes, limit, seed) for images in (train, test))
    return Dataset(name, train, test)


def _some(images: ImageSet, labels: Any, classes: Array, limit: int, seed: int) -> ImageSet:
    order = np.random.default_rng(seed).permutation(len(images))
    members = [order[labels[order] == label] for label in classes]
    # One of each class, then another of each, …, so that classes are balanced.
    rounds = np.concatenate([np.arange(len(of_class)) for of_class in members])
    chosen = np.concatenate(members)[np.argsort(rounds, kind="stable")][:limit]
    return images.subset(np.sort(chosen).tolist())


class Inputs:
    """Observations of both splits, each as a pair: original and perturbed; made when first needed.

    Tokens that do not count but that the rest of the model reads lie beside the others, for methods that run it. `store` is a
    folder to keep observations in; None keeps them in memory, on the GPU if there is one with room.
    """

    def __init__(self, dataset: Dataset, backbone: Backbone, seed: int, batch_size: int, store: Path | None) -> None:
        self.dataset, self.backbone, self.seed, self._batch_size = dataset, backbone, seed, batch_size
        self._grid = backbone.grid(*backbone.preprocessing.size)
        self._every = EveryToken(backbone) if reads_uncounted(backbone) else None
        self._hiding: Hiding | None = None
        # What every result depends on.
        self.facts: dict[str, Any] = {
            "model": (self._every or backbone).fingerprint(),
            "preprocessing": str(backbone.preprocessing),
            "images": [dataset.train.fingerprint(), dataset.test.fingerprint()],
            "perturbation": Perturbation(seed).fingerprint(),
            "precision": "float32" if store is None else "float16",
            "code": code_digest(),
        }
        self._store = None if store is None else store / key_of(**self.facts)

    @cached_property
    def train(self) -> tuple[Observations, Observations]:
        return self._observe("train", self.dataset.train)

    @cached_property
    def test(self) -> tuple[Observations, Observations]:
        return self._observe("test", self.dataset.test)

    def of_last_block(self) -> Inputs:
        """The same with observations of the last of two blocks alone."""
        other = copy(self)
        for split in ("train", "test"):
            views = getattr(self, split)
            vars(other)[split] = last_block(views[0]), last_block(views[1])
        return other

    def describe(self) -> dict[str, Any]:
        """What results say about the images and the model's predictions."""
        original, perturbed = (labels_of(some.predictions, None) for some in self.test)
        return {
            "train_images": len(self.train[0]),
            "test_images": len(original),
            "tokens": self.test[0].n_tokens,
            "test_accuracy": float((original == self.dataset.test.labels).mean()),
            "prediction_survival": float((original == perturbed).mean()),
        }

    @cached_property
    def truth(self) -> dict[str, Array]:
        """Of the test images, as `known_truth` has it: on Color, Birds and CUB."""
        return known_truth(self.dataset.test, self.backbone.preprocessing, self._grid)

    def known_colours(self) -> list[tuple[Observations, Array]]:
        """For `TrueColors`: the true colours of both splits, and those seen in the perturbed test images."""
        train, test = self.dataset.train, self.dataset.test
        if not isinstance(train, Color) or not isinstance(test, Color):
            raise ValueError("true-colors: only Color has true colours")
        preprocessing, grid = self.backbone.preprocessing, self._grid
        seen = seen_colors(test, preprocessing, grid, Perturbation(self.seed))
        own = true_colors(train, preprocessing, grid)
        return [(self.train[0], own), (self.test[0], self.truth["colours"]), (self.test[1], seen)]

    def sample(self, count: int) -> Array:
        """The positions of so many test images, the same for all methods; a smaller sample is part of a larger one."""
        order = np.random.default_rng(self.seed).permutation(len(self.dataset.test))
        return np.sort(order[:count])

    def hiding(self, count: int) -> Hiding:
        """So many of the test images, to hide patches of: decoded once for all methods."""
        if self._hiding is None or len(self._hiding.rows) != count:
            self._hiding = hide(self.backbone, self.dataset.test, self.sample(count))
        return self._hiding

    def _observe(self, split: str, images: ImageSet) -> tuple[Observations, Observations]:
        store = None if self._store is None else self._store / split
        model = self._every or self.backbone
        pair = observe_pair(model, images, seed=self.seed, batch_size=self._batch_size, store=store)
        if store is None and self.backbone.device.type == "cuda":
            pair = self._on_gpu(pair[0]), self._on_gpu(pair[1])
        return pair if self._every is None else (self._every.counted(pair[0]), self._every.counted(pair[1]))

    def _on_gpu(self, observations: Observations) -> Observations:
        """There if it has room for those of both splits, so that methods need not copy them."""
        device, images = self.backbone.device, len(self.dataset.train) + len(self.dataset.test)
        size = 2 * images * observations.embeddings[0].nbytes
        if size > _SHARE_OF_GPU * torch.cuda.mem_get_info(device)[1]:
            return observations
        there = observations.batch(slice(None), device)
        grid, prefix_tokens = observations.grid, observations.prefix_tokens
        return Observations(
            *there, grid, prefix_tokens, crops=observations.crops, origin=observations.origin, check=False
        )
