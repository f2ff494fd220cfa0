"""The model to explain: fine-tuned on the dataset, as it comes, or for Color the one shipped with the package."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pace.backbones import Backbone, ModelChoice, choose_layer, finetune, open_backbone, open_model
from pace.backbones.color_vit import SIZE
from pace.backbones.fingerprint import fingerprint
from pace.backbones.loading import COLOR, Layer
from pace.benchmark.cache import Cache, key_of
from pace.benchmark.data import Dataset
from pace.images import AUGMENT_SEED, Perturbation


@dataclass(frozen=True)
class Recipe:
    """Which model, and how it is trained.

    name, architecture, image_size, normalize, layer, count_cls
        As `pace.backbones.ModelChoice` has them. A name of None is the ViT shipped for Color. An automatic layer is chosen on
        the training images. Methods that query the model itself always get CLS.
    train
        Fine-tune it on the dataset; otherwise it is used as it is, with the classifier it has.
    epochs, lr, batch_size, layer_decay
        Of the fine-tuning. It trains on images perturbed as in the paper, with other draws than the scores use: no
        explanation can be more stable than the prediction it explains.
    """

    name: str | os.PathLike[str] | None = None
    architecture: str | None = None
    image_size: int | None = None
    layer: Layer | None = None
    count_cls: bool = False
    train: bool = True
    epochs: int = 20
    lr: float = 1e-4
    batch_size: int = 128
    layer_decay: float = 1.0
    normalize: str | None = None

    @property
    def choice(self) -> ModelChoice:
        name = COLOR if self.name is None else self.name
        return ModelChoice(
            name, self.architecture, self.image_size, self.normalize, self.layer, count_cls=self.count_cls
        )

    def refuse_idle(self) -> None:
        """Raise for options that have no effect on the ViT shipped for Color."""
        default = Recipe()
        idle = dict.fromkeys(("architecture", "image_size", "normalize"), "has its own")
        idle |= dict.fromkeys(("epochs", "lr", "batch_size", "layer_decay"), "is not fine-tuned")
        for option, why in idle.items():
            if getattr(self, option) != getattr(default, option):
                raise ValueError(f"{option}: the ViT shipped for Color {why}; leave it out, or name a backbone")


@dataclass(frozen=True)
class Subject:
    """The model at its layer; `about` describes it in the results."""

    backbone: Backbone
    about: dict[str, Any]


def prepare_subject(
    recipe: Recipe,
    dataset: Dataset,
    cache: Cache,
    seed: int,
    device: torch.device,
    report: Callable[[str], None] | None = None,
) -> Subject:
    """`report` is called with the reason for an automatic layer."""
    if recipe.name is None and dataset.name != "color":
        raise ValueError(f"{dataset.name}: which model should be explained? Only Color comes with one; name a backbone")
    model, _ = open_model(recipe.choice)
    about = {"name": "the ViT shipped for Color", "training": "as it comes"}
    if recipe.name is not None:
        about["name"] = recipe.architecture or Path(recipe.name).name
        if recipe.train:
            model, training = _finetuned(model, recipe, dataset, cache, seed, device)
            about |= training
    choose = partial(choose_layer, images=dataset.train, seed=seed, report=report)
    backbone = open_backbone(model, recipe.choice, device, choose)
    height, width = backbone.preprocessing.size
    predictions = backbone(torch.zeros(1, 3, height, width, device=device)).predictions
    assert dataset.train.labels is not None
    classes = int(dataset.train.labels.max()) + 1
    if predictions is None or predictions.shape[1] < classes:
        found = "no classifier" if predictions is None else f"a classifier of {predictions.shape[1]} classes"
        raise ValueError(f"{about['name']} has {found}, and {dataset.name} has {classes} classes; fine-tune it")
    layers = {"layer": backbone.place, "attention_layer": backbone.attention_layer}
    shape = {"d": backbone.dim, "image_size": [height, width]}
    return Subject(backbone, {**about, **layers, "count_cls": backbone.count_cls, **shape})


def _finetuned(
    model: nn.Module, recipe: Recipe, dataset: Dataset, cache: Cache, seed: int, device: torch.device
) -> tuple[nn.Module, dict[str, Any]]:
    """The model after training, and what the results say about that."""
    key = key_of(
        weights=fingerprint(model),
        images=dataset.train.fingerprint(),
        training=[recipe.epochs, recipe.lr, recipe.batch_size, recipe.layer_decay, recipe.normalize, seed],
        device=device.type,
    )
    found = finetune(
        model,
        dataset.train,
        epochs=recipe.epochs,
        lr=recipe.lr,
        layer_decay=recipe.layer_decay,
        batch_size=recipe.batch_size,
        augment=Perturbation(seed + AUGMENT_SEED),
        checkpoint=cache.path("backbone", key, "safetensors"),
        seed=seed,
        device=device,
    )
    how = f"{recipe.epochs} epochs, lr {recipe.lr:g}, batches of {recipe.batch_size}, perturbed images"
    if recipe.layer_decay != 1:
        how += f", layer decay {recipe.layer_decay:g}"
    return found.model, {"training": f"fine-tuned on {dataset.name}: {how}", "held_out_accuracy": found.accuracy}


def color_size() -> int:
    """Pixels that the shipped ViT takes."""
    return SIZE
