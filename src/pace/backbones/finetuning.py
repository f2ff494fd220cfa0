"""Fine-tuning: the paper explains models fine-tuned on the dataset at hand, so the library makes one.

Every random choice depends on the seed and the epoch alone, so a run that is killed and started again with the same
call goes on from its last finished epoch and ends with the same weights, bit for bit on a CPU.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pace.backbones.checkpoints import Checkpoints, read_checkpoint
from pace.backbones.find import find
from pace.backbones.fingerprint import fingerprint
from pace.backbones.from_timm import normalize_with
from pace.backbones.preprocessing import Preprocessing
from pace.backbones.tower import Tower
from pace.backbones.training import Epoch, Pictures, Run, best_of, one_epoch
from pace.images import ImageSet, Perturb, open_images, pixels
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


@dataclass(frozen=True)
class Augmentation:
    """Flip, resized crop and colour jitter: the perturbation's kinds in gentler doses, so that predictions stay steady.

    Like a perturbation, ``augmentation(batch, draws)`` depends on the seed and an image's number alone.
    """

    seed: int = 0
    scale: tuple[float, float] = (0.5, 1.0)  # of the area, crops keep
    jitter: float = 0.4  # brightness, contrast and saturation change by up to this factor
    hue: float = 0.05  # of a turn
    chance: float = 0.8  # of any jitter

    def __call__(self, batch: Tensor, draws: Any) -> Tensor:
        keys = [np.array([self.seed, int(draw)], dtype=np.uint64) for draw in draws]
        uniform = np.stack([np.random.Generator(np.random.Philox(key=key)).random(10) for key in keys])
        flip, jittered, area, ratio, right, down, *factors = torch.from_numpy(uniform.T)
        mirrored = (flip < 0.5).to(batch.device)[:, None, None, None]
        batch = torch.where(mirrored, batch.flip(-1), batch)
        batch = pixels.crop_and_resize(batch, self._boxes(area, ratio, right, down, (batch.shape[2], batch.shape[3])))
        for adjust, factor in zip((pixels.brightness, pixels.contrast, pixels.saturation), factors[:3], strict=True):
            batch = adjust(batch, 1 + self.jitter * (2 * factor - 1) * (jittered < self.chance))
        return pixels.hue(batch, self.hue * (2 * factors[3] - 1) * (jittered < self.chance))

    def _boxes(self, area: Tensor, ratio: Tensor, right: Tensor, down: Tensor, size: tuple[int, int]) -> Tensor:
        """Left, top, right, bottom of crops with proportions between 3 : 4 and 4 : 3 of the image's own."""
        share = self.scale[0] + (self.scale[1] - self.scale[0]) * area
        stretch = torch.exp(math.log(4 / 3) / 2 * (2 * ratio - 1))
        sides = share.sqrt()
        width = (size[1] * sides * stretch).clamp(1, size[1])
        height = (size[0] * sides / stretch).clamp(1, size[0])
        left, top = right * (size[1] - width), down * (size[0] - height)
        return torch.stack([left, top, left + width, top + height], dim=1)


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
    """Train `model`, in place, to tell the classes of `images` apart, and keep its best epoch: the last that is as
    accurate on held-out images as any, give or take a standard error.

    AdamW with linear warm-up and a cosine to zero. The classifier is kept when it has the right number of classes, and
    made anew otherwise.

    Parameters
    ----------
    images
        An `ImageSet` with labels, or what `pace.images.open_images` opens, with `data_root` and `split`.
    layer_decay
        Every block learns at this share of the next one's rate, the last block at `lr`; below 1, early blocks stay
        closer to what they were.
    warmup
        Part of all steps over which the learning rate rises to `lr`.
    augment
        True for `Augmentation`, False for none, or any ``augment(batch, draws)`` on images in [0, 1]; the numbers
        `draws` never come twice.
    validation
        Held-out images that decide which epoch is best, or the share of each class to hold out of `images`.
    checkpoint
        A ``.safetensors`` file: the weights of the best epoch so far, written after each epoch that is best so far. Beside
        it, ``.resume.safetensors`` holds what a killed run needs to go on, until it is finished.
    device
        Where to train; the model is moved there. By default where it is.
    amp
        bfloat16 autocast; by default on CUDA devices.
    """
    if isinstance(images, (str, os.PathLike)):
        images = open_images(images, data_root, split)
    _refuse_settings(epochs, batch_size, lr, layer_decay, warmup)
    names = _class_names(images)
    train, held_out = _split(images, validation, seed)
    tower = _tower(model)
    where = next(model.parameters()).device if device is None else torch.device(device)
    amp = where.type == "cuda" and torch.cuda.is_bf16_supported() if amp is None else amp
    augmentation = None if augment is False else Augmentation(seed) if augment is True else augment
    recipe = {
        "model": _starting_weights(tower),
        "preprocessing": str(tower.preprocessing),
        "images": f"{len(train)} images, {train.fingerprint()}",
        "validation": f"{len(held_out)} images, {held_out.fingerprint()}",
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "layer_decay": layer_decay,
        "weight_decay": weight_decay,
        "warmup": warmup,
        "label_smoothing": label_smoothing,
        "augment": "none" if augmentation is None else fingerprint(augmentation),
        "seed": seed,
        "amp": amp,
    }
    about = {
        "architecture": _architecture(tower.model),
        "class_names": names,
        "preprocessing": asdict(tower.preprocessing),
    }
    files = Checkpoints(None if checkpoint is None else Path(checkpoint), about, recipe)
    tower = _with_classifier(tower, names, seed)
    tower.model.float().to(where)
    steps = epochs * math.ceil(len(train) / batch_size)
    run = Run(tower, lr, layer_decay, weight_decay, steps, warmup, label_smoothing, amp)
    history = files.restore(run)
    if len(history) < epochs:
        seen, judged = (
            Pictures(part, tower.preprocessing, workers, where.type == "cuda") for part in (train, held_out)
        )
        done = len(history) * len(train)
        with progress_bar("fine-tuning", epochs * len(train), progress, done) as advance:
            for epoch in range(len(history), epochs):
                history.append(one_epoch(run, seen, judged, augmentation, batch_size, seed, epoch, advance))
                files.keep(run, history)
    best = best_of(history)
    files.finish(run, history)
    return Finetuned(
        tower.model.eval(), history[best].accuracy, best, tuple(history), names, tower.preprocessing, files.path
    )


def load_finetuned(model: nn.Module, checkpoint: str | os.PathLike[str]) -> Finetuned:
    """The fine-tuned weights of `checkpoint` put into a model of the same architecture, in place.

    A model of timm then also expects images normalised as they were in training.
    """
    path = Path(checkpoint)
    weights, metadata = read_checkpoint(path)
    names = tuple(metadata["class_names"])
    tower = _with_classifier(_tower(model), names, seed=0)
    try:
        tower.model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(
            f"{path} holds weights of {metadata['architecture']}, which do not fit {_architecture(tower.model)}: "
            f"{' '.join(str(error).split())[:300]}"
        ) from error
    if hasattr(tower.model, "pretrained_cfg"):
        normalize_with(tower.model, metadata["preprocessing"]["mean"], metadata["preprocessing"]["std"])
        tower = _tower(tower.model)
    history = tuple(Epoch(*epoch) for epoch in metadata["history"])
    best = best_of(history)
    return Finetuned(tower.model.eval(), history[best].accuracy, best, history, names, tower.preprocessing, path)


def _tower(model: nn.Module) -> Tower:
    tower = find(model)
    if not isinstance(tower, Tower):
        raise ValueError(
            f"model: {type(model).__name__} describes itself; only models with known modules can be trained"
        )
    return tower


def _starting_weights(tower: Tower) -> str:
    """A digest of the weights without the classifier, which may be new and random each time."""
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
    return _tower(model)


def _architecture(model: nn.Module) -> str:
    """timm's own name, with which `pace.backbones.load` makes the model again; elsewhere the class."""
    found = getattr(model, "pretrained_cfg", None) or {}
    return str(found.get("architecture") or type(model).__name__)


def _class_names(images: ImageSet) -> tuple[str, ...]:
    if images.labels is None:
        raise ValueError("images: have no labels; expected a dataset or a folder of class folders")
    return tuple(images.class_names or map(str, range(int(images.labels.max()) + 1)))


def _split(images: ImageSet, validation: ImageSet | float, seed: int) -> tuple[ImageSet, ImageSet]:
    """Images to train on and images to judge by: those given, or a share of every class."""
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
        # At least one, but the last image of a class is needed to learn it.
        held_out += members[: min(max(1, round(validation * len(members))), len(members) - 1)].tolist()
    if not held_out:
        raise ValueError("validation: no class has two images, so none can be held out; pass an ImageSet")
    rest = sorted(set(range(len(images))) - set(held_out))
    return images.subset(rest), images.subset(sorted(held_out))


def _refuse_settings(epochs: int, batch_size: int, lr: float, layer_decay: float, warmup: float) -> None:
    if epochs < 1 or batch_size < 1:
        raise ValueError(f"epochs and batch_size: expected 1 or more; found {epochs} and {batch_size}")
    if not (lr > 0 and 0 <= warmup < 1):
        raise ValueError(f"expected lr above 0 and warmup from 0 to below 1; found {lr} and {warmup}")
    if not 0 < layer_decay <= 1:
        raise ValueError(f"layer_decay: expected a share above 0 and up to 1; found {layer_decay}")
