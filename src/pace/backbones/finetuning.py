"""Fine-tuning, since the paper explains models fine-tuned on the dataset at hand.

A killed run that is started again with the same call resumes after its last finished epoch and ends with the same
weights, bit for bit on a CPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pace.atomic import write_atomically
from pace.backbones.fingerprint import fingerprint
from pace.backbones.from_timm import normalize_with
from pace.backbones.libraries import describe_tower
from pace.backbones.tower import Tower
from pace.backbones.training import Augmentation, Epoch, Trainer, best_epoch
from pace.images import ImageSet, Perturb
from pace.progress import progress

_FORMAT = "pace-finetuned-1"
_RESUME = ".resume.safetensors"


@dataclass(frozen=True)
class Finetuned:
    """A fine-tuned model with the weights of its best epoch, in eval mode."""

    model: nn.Module
    accuracy: float
    epoch: int
    history: tuple[Epoch, ...]
    class_names: tuple[str, ...]


def finetune(
    model: nn.Module,
    images: ImageSet,
    *,
    epochs: int = 12,
    batch_size: int = 64,
    lr: float = 1e-4,
    layer_decay: float = 1.0,
    augment: Perturb | bool = True,
    validation: ImageSet | float = 0.1,
    checkpoint: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> Finetuned:
    """Train `model`, in place, to classify `images`, and keep its best epoch: the last one whose accuracy on held-out
    images is within a standard error of the highest.

    AdamW with linear warm-up and a cosine schedule to zero. The classifier is replaced if it has another number of
    classes.

    Parameters
    ----------
    layer_decay
        Each block's learning rate as a share of the next block's. Below 1, early blocks change less.
    augment
        True for flips, crops and colour jitter, False for none, or any ``augment(batch, draws)`` on images in [0, 1];
        no number in `draws` comes twice.
    validation
        Held-out images that decide which epoch is best, or the share of each class to hold out of `images`.
    checkpoint
        A ``.safetensors`` file for the result. Until it is finished, ``.resume.safetensors`` next to it holds what a
        killed run needs to resume.
    device
        Where to train; the model is moved there. By default where it is.
    """
    names = _class_names(images)
    train, held_out = split_off(images, validation, seed)
    tower = _with_classifier(describe_tower(model), names, seed)
    tower.model.float().to(device or next(model.parameters()).device)
    augmentation = Augmentation(seed) if augment is True else augment or None
    trainer = Trainer(tower, train, held_out, augmentation, epochs, batch_size, lr, layer_decay, seed)
    path = None if checkpoint is None else Path(checkpoint)
    metadata = _metadata(trainer, names)
    if path is not None and _is_finished(path, metadata):
        return load_finetuned(model, path)
    _train(trainer, path, metadata)
    tower.model.load_state_dict(trainer.best)
    return _result(tower.model, trainer.history, names)


def load_finetuned(model: nn.Module, checkpoint: str | os.PathLike[str]) -> Finetuned:
    """Load the fine-tuned weights of `checkpoint` into a model of the same architecture, in place.

    A timm model is also set to expect images normalised as they were in training.
    """
    weights, metadata = _read(Path(checkpoint))
    names = tuple(metadata["class_names"])
    model = _with_classifier(describe_tower(model), names, seed=0).model
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{checkpoint} does not fit this {type(model).__name__}: {reason}") from error
    if hasattr(model, "pretrained_cfg"):
        normalize_with(model, metadata["preprocessing"]["mean"], metadata["preprocessing"]["std"])
    return _result(model, _history(metadata), names)


def _result(model: nn.Module, history: Sequence[Epoch], names: tuple[str, ...]) -> Finetuned:
    best = best_epoch(history)
    return Finetuned(model.eval(), history[best].accuracy, best, tuple(history), names)


def _train(trainer: Trainer, path: Path | None, metadata: dict[str, Any]) -> None:
    """Train to the end, from the last finished epoch of a killed run if there is one, and save the best weights."""
    resume = None if path is None else path.with_suffix(_RESUME)
    if resume is not None and resume.exists():
        state, found = _read(resume)
        trainer.restore(state, _history(found))
    epochs, images = trainer.epochs, len(trainer.train)
    with progress("fine-tuning", epochs * images, done=len(trainer.history) * images) as advance:
        while len(trainer.history) < epochs:
            trainer.run_epoch(advance)
            if resume is not None:
                _write(resume, trainer.state(), metadata | {"history": trainer.history})
    if path is not None and resume is not None:
        _write(path, trainer.best, metadata | {"history": trainer.history})
        resume.unlink()


def _metadata(trainer: Trainer, names: Sequence[str]) -> dict[str, Any]:
    """What a checkpoint says about itself. Its `run` is another for other weights, images or settings."""
    tower = trainer.tower
    settings = (trainer.epochs, trainer.batch_size, trainer.lr, trainer.layer_decay, trainer.seed, trainer.augment)
    images = (trainer.train.fingerprint(), trainer.held_out.fingerprint())
    new = {id(parameter) for layer in tower.classifiers for parameter in layer.parameters()}  # may be random each time
    start = {name: parameter for name, parameter in tower.model.named_parameters() if id(parameter) not in new}
    return {
        "format": _FORMAT,
        "architecture": (getattr(tower.model, "pretrained_cfg", None) or {}).get("architecture"),
        "class_names": names,
        "preprocessing": asdict(tower.preprocessing),
        "run": fingerprint(start, asdict(tower.preprocessing), images, settings),
    }


def _is_finished(path: Path, metadata: dict[str, Any]) -> bool:
    """Whether the file is there already; refuses that of another run."""
    if path.suffix != ".safetensors":
        raise ValueError(f"checkpoint: expected a name that ends in .safetensors; found {path.name}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"checkpoint: there is no folder {path.parent}")
    for file in filter(Path.exists, (path, path.with_suffix(_RESUME))):
        if _read(file)[1].get("run") != metadata["run"]:
            raise ValueError(
                f"{file} belongs to another run, with other weights, images or settings; name another checkpoint"
            )
    return path.exists()


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    from safetensors.torch import save

    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    # One entry, since safetensors writes several in varying order.
    write_atomically(path, save(contiguous, {"pace": json.dumps(metadata)}))


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import safe_open

    if not path.is_file():
        raise FileNotFoundError(f"no fine-tuned model at {path}")
    with safe_open(path, framework="pt") as file:
        metadata = json.loads((file.metadata() or {}).get("pace", "{}"))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"{path} was not written by finetune")
    return tensors, metadata


def _history(metadata: dict[str, Any]) -> list[Epoch]:
    return [Epoch(*epoch) for epoch in metadata["history"]]


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


def _class_names(images: ImageSet) -> tuple[str, ...]:
    if not isinstance(images, ImageSet) or images.labels is None:
        raise ValueError("images: no labels; expected a dataset or a folder of class folders, from open_images")
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
