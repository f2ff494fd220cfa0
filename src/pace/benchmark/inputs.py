"""What all methods get for a dataset: the same images, perturbations and ground truth, each made when first needed."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pace.baselines import EveryToken, reads_uncounted
from pace.benchmark.cache import code_of, key_of
from pace.benchmark.data import Dataset
from pace.benchmark.subject import Subject
from pace.images import Color, Perturbation, normalize
from pace.metrics import hide_patches
from pace.metrics.declare import Array
from pace.metrics.ground_truth import known_truth, sample_images, seen_colors, true_colors
from pace.observations import Observations
from pace.observing.extract import observe_pair

_SHARE_OF_GPU = 0.4  # that observations may use; methods need the rest


class Inputs:
    """Observations of both splits, each as a pair: original and perturbed.

    Tokens that do not count but that the rest of the model reads lie beside the others, for methods that run it.

    Parameters
    ----------
    store
        A folder to keep observations in; None keeps them in memory, on the GPU if there is one with room.
    hidden
        Number of test images for deletion and insertion.
    """

    def __init__(
        self,
        dataset: Dataset,
        subject: Subject,
        seed: int,
        batch_size: int,
        store: Path | None,
        hidden: int,
    ) -> None:
        self.dataset, self.backbone, self.seed = dataset, subject.backbone, seed
        self._batch_size, self._hidden = batch_size, hidden
        self._every = EveryToken(self.backbone) if reads_uncounted(self.backbone) else None
        # What every result depends on.
        self.facts: dict[str, Any] = {
            "model": (self._every or self.backbone).fingerprint(),
            "preprocessing": str(subject.backbone.preprocessing),
            "images": dataset.facts(),
            "perturbation": Perturbation(seed).fingerprint(),
            "precision": "float32" if store is None else "float16",
            "code": code_of("observations"),
        }
        self._store = None if store is None else store / key_of(**self.facts)

    @cached_property
    def train(self) -> tuple[Observations, Observations]:
        return self._observe("train")

    @cached_property
    def test(self) -> tuple[Observations, Observations]:
        return self._observe("test")

    @property
    def observed(self) -> bool:
        return {"train", "test"} <= vars(self).keys()

    def observe(self) -> dict[str, Any]:
        """Observe both splits; returns what results say about the images and the model's predictions."""
        original, perturbed = (self.predicted(some) for some in self.test)
        return {
            "train_images": len(self.train[0]),
            "test_images": len(original),
            "tokens": self.test[0].n_tokens,
            "test_accuracy": float((original == self.dataset.test.labels).mean()),
            "prediction_survival": float((original == perturbed).mean()),
        }

    @staticmethod
    def predicted(observations: Observations) -> Array:
        """ŷ (M,)."""
        predictions = observations.predictions
        if isinstance(predictions, torch.Tensor):
            predictions = predictions.cpu()
        found: Array = np.asarray(predictions).argmax(1)
        return found

    @cached_property
    def truth(self) -> dict[str, Array]:
        """Of the test images: "colours" of the patches on Color, "parts" on CUB."""
        return known_truth(self.dataset.test, self.backbone.preprocessing, self._grid)

    @property
    def known_colours(self) -> list[tuple[Observations, Array]]:
        """For `TrueColors`: the true colours of both splits, and those seen in the perturbed test images."""
        train, test = self.dataset.train, self.dataset.test
        if not isinstance(train, Color) or not isinstance(test, Color):
            raise ValueError("true-colors: only Color has true colours")
        preprocessing, grid = self.backbone.preprocessing, self._grid
        seen = seen_colors(test, preprocessing, grid, Perturbation(self.seed))
        own = true_colors(train, preprocessing, grid)
        return [(self.train[0], own), (self.test[0], self.truth["colours"]), (self.test[1], seen)]

    def sample(self, count: int | None) -> Array:
        """The positions of so many test images, the same for all methods; all of them for None."""
        order = np.random.default_rng(self.seed).permutation(len(self.dataset.test))
        return np.sort(order[:count])

    @cached_property
    def hide(self) -> Any:
        """Predictions for the sampled test images with some patches painted over in the mean colour."""
        images = sample_images(self.dataset.test, self.sample(self._hidden), self.backbone.preprocessing)
        batch = normalize(images.to(self.backbone.device), self.backbone.preprocessing)
        return hide_patches(lambda some: self.backbone(some).predictions, batch, self._grid)

    @property
    def _grid(self) -> tuple[int, int]:
        return self.backbone.grid(*self.backbone.preprocessing.size)

    def _observe(self, split: str) -> tuple[Observations, Observations]:
        images = self.dataset.train if split == "train" else self.dataset.test
        store = None if self._store is None else self._store / split
        model = self._every or self.backbone
        original, perturbed = observe_pair(model, images, seed=self.seed, batch_size=self._batch_size, store=store)
        if store is None:
            original, perturbed = self._on_device(original), self._on_device(perturbed)
        if self._every is not None:
            original, perturbed = self._every.counted(original), self._every.counted(perturbed)
        return original, perturbed

    def _on_device(self, observations: Observations) -> Observations:
        """On the model's device if there is room, so that methods need not copy them."""
        device = self.backbone.device
        if device.type != "cuda":
            return observations
        images = len(self.dataset.train) + len(self.dataset.test)
        values = 2 * images * math.prod(observations.shape[1:])
        if values * observations.embeddings.element_size() > _SHARE_OF_GPU * torch.cuda.mem_get_info(device)[1]:
            return observations
        parts = (observations.embeddings, observations.attention, observations.predictions)
        embeddings, attention, predictions = (None if part is None else part.to(device) for part in parts)
        grid, prefix_tokens = observations.grid, observations.prefix_tokens
        return Observations(embeddings, attention, predictions, grid, prefix_tokens, check=False)
