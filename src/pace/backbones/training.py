"""The training loop of `finetune`: steps, epochs, and the state needed to resume."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pace.backbones.batches import Pixels
from pace.backbones.tower import Tower
from pace.images import Perturb, normalize
from pace.progress import Advance

_CLIP_NORM = 1.0


class Epoch(NamedTuple):
    """Results of one pass over the training images."""

    train_loss: float
    loss: float  # on the held-out images
    accuracy: float  # on the held-out images
    images: int = 0  # held out


def best_epoch(history: Sequence[Epoch]) -> int:
    """The last epoch within one standard error of the highest accuracy.

    A few held-out images cannot tell such epochs apart, and late ones are better trained: the learning rate is small
    there, and they have seen more augmented images.
    """
    top = max(history, key=lambda epoch: epoch.accuracy)
    error = math.sqrt(top.accuracy * (1 - top.accuracy) / top.images) if top.images else 0.0
    return max(number for number, epoch in enumerate(history) if epoch.accuracy >= top.accuracy - error)


@dataclass(frozen=True)
class Hyperparameters:
    """Those of `finetune`, which describes them."""

    epochs: int
    batch_size: int
    lr: float
    layer_decay: float
    weight_decay: float
    warmup: float
    label_smoothing: float
    seed: int
    amp: bool

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1:
            raise ValueError(f"epochs and batch_size: expected 1 or more; found {self.epochs} and {self.batch_size}")
        if self.lr <= 0:
            raise ValueError(f"lr: expected a number above 0; found {self.lr}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup: expected a share from 0 to below 1; found {self.warmup}")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"layer_decay: expected a share above 0 and up to 1; found {self.layer_decay}")


class Trainer:
    """A model and its optimizer, at some step of the training."""

    def __init__(self, tower: Tower, settings: Hyperparameters, images: int) -> None:
        self.model, self._preprocessing = tower.model, tower.preprocessing
        self._logits: Callable[[Tensor], Tensor] = tower.run or tower.model
        self._settings = settings
        self._steps = settings.epochs * math.ceil(images / settings.batch_size)
        self._warmup = max(1, round(settings.warmup * self._steps))
        self.step = 0
        self.best: dict[str, Tensor] | None = None
        groups: dict[tuple[float, float], list[Tensor]] = defaultdict(list)
        for parameter, share in learning_rate_shares(tower, settings.layer_decay):
            decay = settings.weight_decay if parameter.ndim > 1 else 0.0  # not on biases, norms and scales
            groups[share, decay].append(parameter)
        self.optimizer = torch.optim.AdamW(
            [{"params": some, "share": share, "weight_decay": decay} for (share, decay), some in groups.items()],
            lr=settings.lr,
        )

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def run_epoch(self, train: Pixels, labels: Tensor, augment: Perturb | None, epoch: int, advance: Advance) -> float:
        """One pass over the images, in an order that only depends on seed and epoch; returns the mean loss."""
        seed, count = self._settings.seed, len(labels)
        order = np.random.default_rng([seed, epoch]).permutation(count).tolist()
        total = torch.zeros((), device=self.device)
        devices = [self.device] if self.device.type == "cuda" else []
        self.model.train()
        with torch.random.fork_rng(devices):  # dropout and stochastic depth draw from the global generator
            torch.manual_seed(int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0]))
            for rows, batch in train.batches(order, self._settings.batch_size):
                numbers = torch.as_tensor(rows)
                batch = batch if augment is None else augment(batch, numbers + epoch * count)
                total += self._update(batch, labels[numbers].to(self.device)) * len(rows)
                advance(len(rows))
        mean = float(total) / count
        if not math.isfinite(mean):
            raise ValueError(f"lr: the loss is {mean} after {self.step} steps; try less than {self._settings.lr:g}")
        return mean

    def _update(self, batch: Tensor, labels: Tensor) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = group["share"] * self._rate()
        loss = F.cross_entropy(self._forward(batch), labels, label_smoothing=self._settings.label_smoothing)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.detach()

    def _rate(self) -> float:
        """Linear warm-up, then a cosine to zero."""
        if self.step < self._warmup:
            return self._settings.lr * (self.step + 1) / self._warmup
        return (
            self._settings.lr * (1 + math.cos(math.pi * (self.step - self._warmup) / (self._steps - self._warmup))) / 2
        )

    @torch.no_grad()
    def evaluate(self, held_out: Pixels, labels: Tensor) -> tuple[float, float]:
        """Loss and accuracy on images as they are."""
        self.model.eval()
        right = torch.zeros((), device=self.device)
        loss = torch.zeros((), device=self.device)
        for rows, batch in held_out.batches(range(len(labels)), self._settings.batch_size):
            expected = labels[rows[0] : rows[-1] + 1].to(self.device)
            logits = self._forward(batch)
            loss += F.cross_entropy(logits, expected, reduction="sum")
            right += (logits.argmax(-1) == expected).sum()
        return float(loss) / len(labels), float(right) / len(labels)

    def _forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self._settings.amp):
            return self._logits(normalize(images, self._preprocessing)).float()

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}

    def state(self) -> dict[str, Tensor]:
        """Model and optimizer, flat, for a file."""
        moments = {
            f"optimizer.{name}.{key}": value.detach().cpu()
            for name, parameter in self.model.named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        return {**{f"model.{name}": tensor for name, tensor in self.weights().items()}, **moments}

    def restore(self, state: dict[str, Tensor], step: int) -> None:
        self.step = step
        self.model.load_state_dict(_below(state, "model."))
        for name, parameter in self.model.named_parameters():
            moments: dict[str, Any] = _below(state, f"optimizer.{name}.")
            if moments:  # the step count stays on the CPU, where AdamW keeps it
                self.optimizer.state[parameter] = {
                    key: value if key == "step" else value.to(parameter.device) for key, value in moments.items()
                }


def _below(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def learning_rate_shares(tower: Tower, decay: float) -> Iterator[tuple[Tensor, float]]:
    """Every trained parameter with its share of the learning rate: 1 in the last block and the classifier."""
    last = len(tower.blocks)
    depth = {id(parameter): number for number, block in enumerate(tower.blocks, 1) for parameter in block.parameters()}
    of_blocks = set(depth)
    depth |= {id(parameter): last for layer in tower.classifiers for parameter in layer.parameters()}
    elsewhere = 0  # patch and position embeddings come before the blocks, norms and pools after them
    for parameter in tower.model.parameters():
        if id(parameter) in of_blocks:
            elsewhere = last
        if parameter.requires_grad:
            yield parameter, decay ** (last - depth.get(id(parameter), elsewhere))
