"""Fine-tuning, since the paper explains models fine-tuned on the dataset at hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pace.backbones.find import describe_tower
from pace.backbones.fingerprint import fingerprint
from pace.backbones.from_weights import misfit
from pace.backbones.libraries import may_be_told, normalize_with
from pace.backbones.tower import Tower
from pace.backbones.training import Augmentation, Epoch, Trainer, best_epoch
from pace.files import read_tensors, reading, save_tensors
from pace.images import ImageSet, Perturb
from pace.progress import progress

_FORMAT = "pace-finetuned-2"
_PATTERN = {"format": _FORMAT, "class_names": [str], "preprocessing": {"mean": [float | int], "std": [float | int]},
            "finished": bool, "history": [[float | int]]}  # fmt: skip
_REMEDY = "train again with finetune"


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
        A ``.safetensors`` file for the result. Until then it holds what a killed run needs: started again with the same
        call, it resumes after its last finished epoch and ends with the same weights, bit for bit on a CPU.
    device
        Where to train; the model is moved there. By default where it is.
    """
    names = _class_names(images)
    train, held_out = split_off(images, validation, seed)
    tower = _with_classifier(describe_tower(model), names, seed)
    tower.model.float().to(device or next(tower.model.parameters()).device)
    augmentation = Augmentation(seed) if augment is True else augment or None
    trainer = Trainer(tower, train, held_out, augmentation, epochs, batch_size, lr, layer_decay, seed)
    _train(trainer, None if checkpoint is None else Path(checkpoint), _metadata(trainer, names))
    tower.model.load_state_dict(trainer.best)
    return _result(tower.model, trainer.history, names)


def load_finetuned(model: nn.Module, checkpoint: str | os.PathLike[str]) -> Finetuned:
    """Load the fine-tuned weights of `checkpoint` into a model of the same architecture, in place.

    A timm or torchvision model is also set to expect images normalised as they were in training.
    """
    weights, metadata = _read(Path(checkpoint))
    if not metadata["finished"]:
        raise ValueError(f"{checkpoint}: its training has not finished; the same call of finetune resumes it")
    names = tuple(metadata["class_names"])
    model = _with_classifier(describe_tower(model), names, seed=0).model
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{checkpoint} does not fit this {type(model).__name__}: {misfit(error)}") from error
    if may_be_told(model):
        normalize_with(model, metadata["preprocessing"]["mean"], metadata["preprocessing"]["std"])
    return _result(model, metadata["history"], names)


def save_finetuned(
    model: nn.Module, checkpoint: str | os.PathLike[str], class_names: Sequence[str], history: Sequence[Epoch]
) -> None:
    """Write a model that was trained in another way than `finetune` does, for `load_finetuned`."""
    metadata = {
        "format": _FORMAT,
        "class_names": list(class_names),
        "preprocessing": asdict(describe_tower(model).preprocessing),
        "history": history,
        "finished": True,
    }
    _write(Path(checkpoint), model.state_dict(), metadata)


def _result(model: nn.Module, history: Sequence[Epoch], names: tuple[str, ...]) -> Finetuned:
    best = best_epoch(history)
    return Finetuned(model.eval(), history[best].accuracy, best, tuple(history), names)


def _train(trainer: Trainer, path: Path | None, metadata: dict[str, Any]) -> None:
    """Train to the end, from the last finished epoch of a killed run if there is one, and save the best weights."""
    if path is not None and path.suffix != ".safetensors":
        raise ValueError(f"checkpoint: expected a name that ends in .safetensors; found {path.name}")
    if path is not None and not path.parent.is_dir():
        raise FileNotFoundError(f"checkpoint: there is no folder {path.parent}")
    if path is not None and path.exists():
        state, found = _read(path)
        if found.get("run") != metadata["run"]:
            raise ValueError(f"{path} is of another run (weights, images or settings differ); name another checkpoint")
        if found["finished"]:
            trainer.best, trainer.history = state, found["history"]
            return
        with reading(path, _REMEDY):
            trainer.restore(state, found["history"])
    epochs, images = trainer.epochs, len(trainer.train)
    with progress("fine-tuning", epochs * images, done=len(trainer.history) * images) as advance:
        while len(trainer.history) < epochs:
            trainer.run_epoch(advance)
            if path is not None:
                _write(path, trainer.state(), metadata | {"history": trainer.history, "finished": False})
    if path is not None:
        _write(path, trainer.best, metadata | {"history": trainer.history, "finished": True})


def _metadata(trainer: Trainer, names: Sequence[str]) -> dict[str, Any]:
    """What a checkpoint says about itself. Its `run` is another for other weights, images or settings."""
    tower = trainer.tower
    settings = (trainer.epochs, trainer.batch_size, trainer.lr, trainer.layer_decay, trainer.seed, trainer.augment)
    images = (trainer.train.fingerprint(), trainer.held_out.fingerprint())
    start = [block.state_dict() for block in tower.blocks]  # without the classifier, which may be random each time
    return {
        "format": _FORMAT,
        "architecture": (getattr(tower.model, "pretrained_cfg", None) or {}).get("architecture"),
        "class_names": names,
        "preprocessing": asdict(tower.preprocessing),
        "run": fingerprint(start, asdict(tower.preprocessing), images, settings),
    }


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    save_tensors(path, tensors, metadata)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"no fine-tuned model at {path}")
    tensors, metadata = read_tensors(path, _PATTERN, _REMEDY)
    with reading(path, _REMEDY):
        history = [Epoch(*epoch) for epoch in metadata["history"]]
        if not history or not metadata["class_names"]:
            raise ValueError("it has no epochs or no classes")
        if any(len(metadata["preprocessing"][name]) != 3 for name in ("mean", "std")):
            raise ValueError("expected the mean and the deviation of three colours")
        return tensors, metadata | {"history": history}


def _with_classifier(tower: Tower, names: Sequence[str], seed: int) -> Tower:
    """The same model with one output per class."""
    model: Any = tower.model
    config: Any = getattr(model, "config", None)
    if hasattr(config, "id2label"):  # transformers keeps the classes here
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
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
            kind = type(model).__name__
            raise ValueError(f"model: {kind} has no classifier to train; load it with one (…ForImageClassification)")
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
    rest = sorted(set(range(len(images))) - set(held_out))
    return images.subset(rest), images.subset(sorted(held_out))
