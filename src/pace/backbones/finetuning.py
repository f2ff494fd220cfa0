"""Fine-tuning, since the paper explains models fine-tuned on the dataset at hand.

Every random choice depends only on the seed and the epoch, so a killed run that is started again with the same call
resumes after its last finished epoch and ends with the same weights, bit for bit on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from pace.backbones.augmentation import Augmentation
from pace.backbones.batches import Pixels
from pace.backbones.checkpoints import Checkpoints, read_checkpoint
from pace.backbones.fingerprint import fingerprint
from pace.backbones.from_timm import normalize_with
from pace.backbones.libraries import describe_tower
from pace.backbones.preprocessing import Preprocessing
from pace.backbones.tower import Tower
from pace.backbones.training import Epoch, Hyperparameters, Trainer, best_epoch
from pace.images import ImageSet, Perturb, open_images
from pace.progress import progress as progress_bar


@dataclass(frozen=True)
class Finetuned:
    """A fine-tuned model with the weights of its best epoch, in eval mode."""

    model: nn.Module
    accuracy: float
    epoch: int
    history: tuple[Epoch, ...]
    class_names: tuple[str, ...]
    preprocessing: Preprocessing
    checkpoint: Path | None


def finetune(
    model: nn.Module,
    images: ImageSet | str | os.PathLike[str],
    *,
    epochs: int = 12,
    batch_size: int = 64,
    lr: float = 1e-4,
    layer_decay: float = 1.0,
    weight_decay: float = 0.05,
    warmup: float = 0.1,
    label_smoothing: float = 0.1,
    augment: Perturb | bool = True,
    validation: ImageSet | float = 0.1,
    checkpoint: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    amp: bool | None = None,
    data_root: str | os.PathLike[str] | None = None,
    split: str = "train",
    workers: int | None = None,
    progress: bool | None = None,
) -> Finetuned:
    """Train `model`, in place, to classify `images`, and keep its best epoch: the last one whose accuracy on held-out
    images is within a standard error of the highest.

    AdamW with linear warm-up and a cosine schedule to zero. The classifier is kept if it has the right number of
    classes, and replaced otherwise.

    Parameters
    ----------
    images
        An `ImageSet` with labels, or what `pace.images.open_images` opens, with `data_root` and `split`.
    layer_decay
        Each block's learning rate as a share of the next block's; the last block learns at `lr`. Below 1, early blocks
        change less.
    warmup
        Share of all steps over which the learning rate rises to `lr`.
    augment
        True for `Augmentation`, False for none, or any ``augment(batch, draws)`` on images in [0, 1]; no number in
        `draws` comes twice.
    validation
        Held-out images that decide which epoch is best, or the share of each class to hold out of `images`.
    checkpoint
        A ``.safetensors`` file for the weights of the best epoch so far. Next to it, ``.resume.safetensors`` holds what
        a killed run needs to resume, until the run is finished.
    device
        Where to train; the model is moved there. By default where it is.
    amp
        bfloat16 autocast; by default on CUDA devices that support it.
    workers
        Threads that decode images.
    """
    if isinstance(images, (str, os.PathLike)):
        images = open_images(images, data_root, split)
    tower = describe_tower(model)
    where = next(model.parameters()).device if device is None else torch.device(device)
    amp = where.type == "cuda" and torch.cuda.is_bf16_supported() if amp is None else amp
    settings = Hyperparameters(epochs, batch_size, lr, layer_decay, weight_decay, warmup, label_smoothing, seed, amp)
    names = _class_names(images)
    train, held_out = split_off(images, validation, seed)
    augmentation = None if augment is False else Augmentation(seed) if augment is True else augment
    recipe = {
        "model": _starting_weights(tower),
        "preprocessing": str(tower.preprocessing),
        "images": f"{len(train)} images, {train.fingerprint()}",
        "validation": f"{len(held_out)} images, {held_out.fingerprint()}",
        "augment": "none" if augmentation is None else fingerprint(augmentation),
        **asdict(settings),
    }
    about = {
        "architecture": _architecture(tower.model),
        "class_names": names,
        "preprocessing": asdict(tower.preprocessing),
    }
    files = Checkpoints(None if checkpoint is None else Path(checkpoint), about, recipe)
    tower = _with_classifier(tower, names, seed)
    tower.model.float().to(where)
    trainer = Trainer(tower, settings, len(train))
    history = files.restore(trainer)
    if len(history) < epochs:
        pixels, unseen = (Pixels(part, tower.preprocessing, where, workers) for part in (train, held_out))
        labels, true = (torch.as_tensor(part.labels) for part in (train, held_out))
        with progress_bar("fine-tuning", epochs * len(train), progress, len(history) * len(train)) as advance:
            for epoch in range(len(history), epochs):
                loss = trainer.run_epoch(pixels, labels, augmentation, epoch, advance)
                history.append(Epoch(loss, *trainer.evaluate(unseen, true), len(true)))
                files.keep(trainer, history)
    files.finish(trainer, history)
    return _result(tower, history, names, files.path)


def load_finetuned(model: nn.Module, checkpoint: str | os.PathLike[str]) -> Finetuned:
    """Load the fine-tuned weights of `checkpoint` into a model of the same architecture, in place.

    A timm model is also set to expect images normalised as they were in training.
    """
    path = Path(checkpoint)
    weights, metadata = read_checkpoint(path)
    names = tuple(metadata["class_names"])
    tower = _with_classifier(describe_tower(model), names, seed=0)
    try:
        tower.model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(
            f"{path} holds weights of {metadata['architecture']}, which do not fit {_architecture(tower.model)}: "
            f"{' '.join(str(error).split())[:300]}"
        ) from error
    if hasattr(tower.model, "pretrained_cfg"):
        normalize_with(tower.model, metadata["preprocessing"]["mean"], metadata["preprocessing"]["std"])
        tower = describe_tower(tower.model)
    return _result(tower, [Epoch(*epoch) for epoch in metadata["history"]], names, path)


def _result(tower: Tower, history: Sequence[Epoch], names: tuple[str, ...], path: Path | None) -> Finetuned:
    best = best_epoch(history)
    accuracy = history[best].accuracy
    return Finetuned(tower.model.eval(), accuracy, best, tuple(history), names, tower.preprocessing, path)


def _starting_weights(tower: Tower) -> str:
    """A fingerprint of the weights without the classifier, which may be new and random each time."""
    new = {id(parameter) for layer in tower.classifiers for parameter in layer.parameters()}
    return fingerprint({name: p for name, p in tower.model.named_parameters() if id(p) not in new})


def _with_classifier(tower: Tower, names: Sequence[str], seed: int) -> Tower:
    """The same model with one output per class."""
    model: Any = tower.model
    config: Any = getattr(model, "config", None)
    if hasattr(config, "id2label"):  # transformers keeps the classes here
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
        model.num_labels = len(names)
    if tower.classifiers and all(layer.out_features == len(names) for layer in tower.classifiers):
        return tower
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if hasattr(model, "reset_classifier"):  # timm, which keeps the number of classes in more than one place
            model.reset_classifier(len(names))
        elif tower.classifiers:
            for path, layer in list(model.named_modules()):
                if any(layer is classifier for classifier in tower.classifiers):
                    parent, _, name = path.rpartition(".")
                    setattr(model.get_submodule(parent), name, nn.Linear(layer.in_features, len(names)))
        else:
            raise ValueError(
                f"model: {type(model).__name__} has no classifier to train; load it with one "
                "(in transformers, as …ForImageClassification)"
            )
    return describe_tower(model)


def _architecture(model: nn.Module) -> str:
    """timm's own name, with which `pace.backbones.load` makes the model again; elsewhere the class."""
    found = getattr(model, "pretrained_cfg", None) or {}
    return str(found.get("architecture") or type(model).__name__)


def _class_names(images: ImageSet) -> tuple[str, ...]:
    if images.labels is None:
        raise ValueError("images: no labels; expected a dataset or a folder of class folders")
    return tuple(images.class_names or map(str, range(int(images.labels.max()) + 1)))


def split_off(images: ImageSet, validation: ImageSet | float, seed: int) -> tuple[ImageSet, ImageSet]:
    """Training and held-out images: those given, or a share of every class."""
    if isinstance(validation, ImageSet):
        if _class_names(validation) != _class_names(images):
            raise ValueError("validation: its classes are not those of the training images")
        return images, validation
    if not 0 < validation < 1:
        raise ValueError(f"validation: expected an ImageSet or a share between 0 and 1; found {validation}")
    assert images.labels is not None
    order = np.random.default_rng(seed).permutation(len(images))
    held_out: list[int] = []
    for label in np.unique(images.labels):
        members = order[images.labels[order] == label]
        # At least one, but never the last image of a class.
        held_out += members[: min(max(1, round(validation * len(members))), len(members) - 1)].tolist()
    if not held_out:
        raise ValueError("validation: no class has two images, so none can be held out; pass an ImageSet")
    rest = sorted(set(range(len(images))) - set(held_out))
    return images.subset(rest), images.subset(sorted(held_out))
