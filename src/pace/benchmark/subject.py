"""The model that is explained: fine-tuned on the dataset, as it comes, or for Color the one that is shipped."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from pace.backbones import Backbone, choose_layer, finetune, load
from pace.backbones.fingerprint import fingerprint
from pace.benchmark.cache import Cache, key_of
from pace.benchmark.data import Dataset
from pace.images import AUGMENT_SEED, Perturbation

Layer = int | Literal["auto"]


@dataclass(frozen=True)
class Recipe:
    """Which model, and how it is trained.

    name, architecture, image_size, normalize
        As `pace.backbones.load` takes them. A name of None is the ViT that is shipped for Color.
    layer
        The block that is explained; "auto" is the one that `choose_layer` finds on the training images, with the attention of
        the last block. None is that, too, or for the shipped ViT the block that the demo explains.
    count_cls
        Whether CLS counts as a patch, as in the paper. Methods that ask the model get it either way.
    train
        Fine-tune it on the dataset; otherwise it is taken as it is, with the classifier it has.
    epochs, lr, batch_size, layer_decay
        Of the fine-tuning. It sees images perturbed as the paper perturbs them, with other draws than the scores have: no
        explanation can be steadier than the prediction it explains.
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

    def refuse_idle(self) -> None:
        """An error for what would change nothing about the ViT that is shipped for Color."""
        usual, has_own, untrained = Recipe(), "has its own", "is not fine-tuned"
        idle = dict.fromkeys(("architecture", "image_size", "normalize"), has_own)
        idle |= dict.fromkeys(("epochs", "lr", "batch_size", "layer_decay"), untrained)
        for option, why in idle.items():
            if getattr(self, option) != getattr(usual, option):
                raise ValueError(f"{option}: the ViT shipped for Color {why}; leave it out, or name a backbone")


@dataclass(frozen=True)
class Subject:
    """`about` is what the results say of it."""

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
    """`report` is told why an automatic layer is the one it is."""
    if recipe.name is None:
        model, usual, about = _shipped(dataset)
    else:
        model, usual, about = _named(recipe.name, recipe, dataset, cache, seed, device)
    model = model.float().to(device).eval().requires_grad_(False)
    layer, attention_layer = usual if recipe.layer is None else recipe.layer, None
    if layer == "auto":
        layer, attention_layer = choose_layer(model, dataset.train, seed=seed, report=report), -1
    backbone = Backbone(model, layer, count_cls=recipe.count_cls, attention_layer=attention_layer)
    height, width = backbone.preprocessing.size
    with torch.no_grad():
        predictions = backbone(torch.zeros(1, 3, height, width, device=device)).predictions
    assert dataset.train.labels is not None
    classes = int(dataset.train.labels.max()) + 1
    if predictions is None or predictions.shape[1] < classes:
        found = "no classifier" if predictions is None else f"a classifier of {predictions.shape[1]} classes"
        raise ValueError(f"{about['name']} has {found}, and {dataset.name} has {classes} classes; fine-tune it")
    layers = {"layer": backbone.layer, "attention_layer": backbone.attention_layer}
    shape = {"d": backbone.dim, "image_size": [height, width]}
    return Subject(backbone, {**about, **layers, "count_cls": backbone.count_cls, **shape})


def _named(
    name: str | os.PathLike[str], recipe: Recipe, dataset: Dataset, cache: Cache, seed: int, device: torch.device
) -> tuple[Any, Layer, dict[str, Any]]:
    """The model, its usual layer, and what results say of it."""
    options: dict[str, Any] = {} if recipe.image_size is None else {"img_size": recipe.image_size}
    model = load(name, model=recipe.architecture, normalize=recipe.normalize, **options)
    about: dict[str, Any] = {"name": recipe.architecture or Path(name).name, "training": "as it comes"}
    if recipe.train:
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
        model = found.model
        how = f"{recipe.epochs} epochs, lr {recipe.lr:g}, batches of {recipe.batch_size}, perturbed images"
        if recipe.layer_decay != 1:
            how += f", layer decay {recipe.layer_decay:g}"
        about |= {"training": f"fine-tuned on {dataset.name}: {how}", "held_out_accuracy": found.accuracy}
    return model, "auto", about


def color_size() -> int:
    """Pixels that the shipped ViT takes."""
    from pace.backbones.color_vit import SIZE

    return SIZE


def _shipped(dataset: Dataset) -> tuple[Any, Layer, dict[str, Any]]:
    if dataset.name != "color":
        raise ValueError(f"{dataset.name}: which model is to be explained? Only Color comes with one; name a backbone")
    from pace.backbones.color_vit import LAYER, load_model

    return load_model(), LAYER, {"name": "the ViT shipped for Color", "training": "as it comes"}
