"""What all methods of a dataset are given: the same images, perturbations and truth, each made when it is first needed."""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pace.baselines import EveryToken, reads_uncounted
from pace.benchmark.cache import code_of, stored_as
from pace.benchmark.data import Dataset
from pace.benchmark.subject import Subject
from pace.images import Color, Perturbation, normalize
from pace.metrics import hide_patches
from pace.metrics.declare import Array
from pace.metrics.ground_truth import known_truth, sample_images, seen_colors, true_colors
from pace.observations import Observations
from pace.observing.extract import observe_pair
from pace.observing.store import trusted

_SHARE_OF_GPU = 0.4  # that observations may take; methods need the rest


class Views:
    """Observations of both splits, as they are and perturbed.

    Parameters
    ----------
    store
        A folder to keep observations in; None keeps them in memory, on the GPU if there is one with room.
    hidden
        How many test images deletion and insertion are measured on.
    asked
        Whether some method asks the model: beside the tokens that count it then gets those that only h needs, CLS
        and registers.
    """

    def __init__(
        self,
        dataset: Dataset,
        subject: Subject,
        seed: int,
        batch_size: int,
        store: Path | None,
        hidden: int,
        asked: bool = True,
    ) -> None:
        self.dataset, self.backbone, self.seed = dataset, subject.backbone, seed
        self._batch_size, self._hidden = batch_size, hidden
        # What every result depends on. With the other tokens beside them or without, those that count are the same.
        self.facts: dict[str, Any] = {
            "model": subject.backbone.fingerprint(),
            "preprocessing": str(subject.backbone.preprocessing),
            "images": dataset.facts(),
            "perturbation": Perturbation(seed).fingerprint(),
            "precision": "float32" if store is None else "float16",
            "code": code_of("observations"),
        }
        self._store = None if store is None else store / stored_as(**self.facts)
        self._every = None
        if reads_uncounted(subject.backbone):
            every = EveryToken(subject.backbone)
            whole = None if store is None else store / stored_as(**{**self.facts, "model": every.fingerprint()})
            if asked or (whole is not None and whole.is_dir()):  # what is there already serves the others as well
                self._every, self._store = every, whole

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
        """Both splits, and what results say of the model by them."""
        original, perturbed = self.test
        guess, again = self.predicted(original), self.predicted(perturbed)
        assert self.dataset.test.labels is not None
        return {
            "train_images": len(self.train[0]),
            "test_images": len(original),
            "tokens": original.n_tokens,
            "test_accuracy": float((guess == self.dataset.test.labels).mean()),
            "prediction_survival": float((guess == again).mean()),
        }

    @staticmethod
    def predicted(observations: Observations) -> Array:
        """ŷ (M,)."""
        predictions: Any = observations.predictions
        if isinstance(predictions, Tensor):
            predictions = predictions.cpu()
        found: Array = np.asarray(predictions).argmax(1)
        return found

    @property
    def colours(self) -> Array | None:
        """Of the test images' patches, on Color."""
        return self._truth.get("colours")

    @property
    def parts(self) -> Array | None:
        """The patches that hold the test images' parts, on CUB."""
        return self._truth.get("parts")

    @cached_property
    def _truth(self) -> dict[str, Array]:
        return known_truth(self.dataset.test, self.backbone.preprocessing, self._grid)

    @property
    def known_colours(self) -> list[tuple[Observations, Array]]:
        """What the true colours are made of: those of both splits, and of the perturbed test images as they look."""
        train, test = self.dataset.train, self.dataset.test
        if not isinstance(train, Color) or not isinstance(test, Color) or self.colours is None:
            raise ValueError("true-colors: only Color has true colours")
        preprocessing, grid = self.backbone.preprocessing, self._grid
        looks = seen_colors(test, preprocessing, grid, Perturbation(self.seed))
        own = true_colors(train, preprocessing, grid)
        return [(self.train[0], own), (self.test[0], self.colours), (self.test[1], looks)]

    def drawn(self, count: int | None) -> Array:
        """So many of the test images, the same for all methods; all of them for None."""
        order = np.random.default_rng(self.seed).permutation(len(self.dataset.test))
        return np.sort(order[:count])

    @cached_property
    def hide(self) -> Any:
        """Predictions of the images drawn for it with some patches painted over in the mean colour."""
        images = sample_images(self.dataset.test, self.drawn(self._hidden), self.backbone.preprocessing)
        batch = normalize(images.to(self.backbone.device), self.backbone.preprocessing)
        return hide_patches(lambda some: self.backbone(some).predictions, batch, self._grid)

    @property
    def _grid(self) -> tuple[int, int]:
        return self.backbone.grid(*self.backbone.preprocessing.size)

    def _observe(self, split: str) -> tuple[Observations, Observations]:
        images = self.dataset.train if split == "train" else self.dataset.test
        store = None if self._store is None else self._store / split
        seen = self._every or self.backbone
        original, perturbed = observe_pair(seen, images, seed=self.seed, batch_size=self._batch_size, store=store)
        if store is None:
            original, perturbed = _near(original, self), _near(perturbed, self)
        return (
            (original, perturbed)
            if self._every is None
            else (self._every.counted(original), self._every.counted(perturbed))
        )


def _near(observations: Observations, views: Views) -> Observations:
    """On the model's device if there is room, so that no method copies them again."""
    device = views.backbone.device
    if device.type != "cuda":
        return observations
    images = len(views.dataset.train) + len(views.dataset.test)
    values = 2 * images * math.prod(observations.shape[1:])
    if values * observations.embeddings.element_size() > _SHARE_OF_GPU * torch.cuda.mem_get_info(device)[1]:
        return observations
    parts = (observations.embeddings, observations.attention, observations.predictions)
    embeddings, attention, predictions = (None if part is None else part.to(device) for part in parts)
    return trusted(embeddings, attention, predictions, observations.grid, observations.prefix_tokens)
