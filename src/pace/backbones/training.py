"""The training run of `finetune`: batches, steps and epochs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pace.backbones.preprocessing import Preprocessing
from pace.backbones.tower import Tower
from pace.images import ImageSet, Perturb, normalize, to_float
from pace.images.loading import decoded
from pace.observing.pipeline import ahead
from pace.progress import Advance

CACHE_BYTES = 4 << 30  # images are decoded once and kept as uint8 when they fit in this
_CLIP_NORM = 1.0


class Epoch(NamedTuple):
    """What one pass over the training images gave."""

    train_loss: float
    loss: float  # of the held-out images
    accuracy: float  # of the held-out images
    images: int = 0  # held out


def best_of(history: Sequence[Epoch]) -> int:
    """The last epoch that is as accurate as any, give or take a standard error.

    A few held-out images cannot tell epochs apart that are nearer than that, and late ones have settled: their learning rate
    was small, and they have seen more perturbed images.
    """
    top = max(history, key=lambda epoch: epoch.accuracy)
    error = math.sqrt(top.accuracy * (1 - top.accuracy) / top.images) if top.images else 0.0
    return max(number for number, epoch in enumerate(history) if epoch.accuracy >= top.accuracy - error)


class _Step(NamedTuple):
    images: Tensor  # uint8
    labels: Tensor
    draws: Tensor


class Run:
    """Model, optimiser and the step they are at."""

    def __init__(
        self,
        tower: Tower,
        lr: float,
        layer_decay: float,
        weight_decay: float,
        steps: int,
        warmup: float,
        label_smoothing: float,
        amp: bool,
    ) -> None:
        self.model, self._preprocessing = tower.model, tower.preprocessing
        self._logits: Callable[[Tensor], Tensor] = tower.run or tower.model
        self._lr, self._steps, self._warmup = lr, steps, max(1, round(warmup * steps))
        self._label_smoothing, self._amp = label_smoothing, amp
        self.step = 0
        groups: dict[tuple[float, float], list[Tensor]] = defaultdict(list)
        for parameter, share in _shares_of_rate(tower, layer_decay):
            decay = weight_decay if parameter.ndim > 1 else 0.0  # not of biases, norms and scales
            groups[share, decay].append(parameter)
        self.optimizer = torch.optim.AdamW(
            [{"params": some, "share": share, "weight_decay": decay} for (share, decay), some in groups.items()], lr=lr
        )
        self.best: dict[str, Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def rate(self) -> float:
        if self.step < self._warmup:
            return self._lr * (self.step + 1) / self._warmup
        return self._lr * (1 + math.cos(math.pi * (self.step - self._warmup) / (self._steps - self._warmup))) / 2

    def train(self, batches: Generator[_Step], augment: Perturb | None, advance: Advance) -> float:
        self.model.train()
        total, count = torch.zeros((), device=self.device), 0
        for images, labels, draws in batches:
            batch = _floats(images, self.device)
            batch = batch if augment is None else augment(batch, draws)
            for group in self.optimizer.param_groups:
                group["lr"] = group["share"] * self.rate()
            loss = F.cross_entropy(
                self._forward(batch), labels.to(self.device, non_blocking=True), label_smoothing=self._label_smoothing
            )
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            total += loss.detach() * len(labels)
            count += len(labels)
            advance(len(labels))
        mean = float(total) / count
        if not math.isfinite(mean):
            raise ValueError(f"the loss is {mean} after {self.step} steps; try a smaller lr than {self._lr:g}")
        return mean

    @torch.no_grad()
    def evaluate(self, pictures: Pictures, batch_size: int) -> tuple[float, float]:
        """Loss and accuracy on images as they are."""
        self.model.eval()
        right = torch.zeros((), device=self.device)
        loss = torch.zeros((), device=self.device)
        count = len(pictures.labels)
        with closing(ahead(pictures.batches(range(count), batch_size))) as batches:
            for rows, images in batches:
                labels = pictures.labels[rows[0] : rows[-1] + 1].to(self.device)
                logits = self._forward(_floats(images, self.device))
                loss += F.cross_entropy(logits, labels, reduction="sum")
                right += (logits.argmax(-1) == labels).sum()
        return float(loss) / count, float(right) / count

    def _forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self._amp):
            return self._logits(normalize(images, self._preprocessing)).float()

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}

    def state(self) -> dict[str, Tensor]:
        """Everything a later run needs to go on from here."""
        moments = {
            f"optimizer.{name}.{key}": value.detach().cpu()
            for name, parameter in self.model.named_parameters()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        return {**{f"model.{name}": tensor for name, tensor in self.weights().items()}, **moments}

    def restore(self, state: dict[str, Tensor], step: int) -> None:
        self.step = step
        model = {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}
        self.model.load_state_dict(model)
        for name, parameter in self.model.named_parameters():
            prefix = f"optimizer.{name}."
            moments = {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}
            if moments:
                # The step count stays on the CPU, where AdamW keeps it.
                self.optimizer.state[parameter] = {
                    key: value if key == "step" else value.to(parameter.device) for key, value in moments.items()
                }


def _shares_of_rate(tower: Tower, decay: float) -> Iterator[tuple[Tensor, float]]:
    """The parameters that are trained, each with its share of the learning rate: 1 in the last block and the classifier."""
    last = len(tower.blocks)
    depth = {id(parameter): number for number, block in enumerate(tower.blocks, 1) for parameter in block.parameters()}
    of_blocks = set(depth)
    depth |= {id(parameter): last for layer in tower.classifiers for parameter in layer.parameters()}
    usual = 0  # of what embeds patches and positions, which comes before the blocks; norms and pools come after them
    for parameter in tower.model.parameters():
        if id(parameter) in of_blocks:
            usual = last
        if parameter.requires_grad:
            yield parameter, decay ** (last - depth.get(id(parameter), usual))


def one_epoch(
    run: Run,
    train: Pictures,
    held_out: Pictures,
    augment: Perturb | None,
    batch_size: int,
    seed: int,
    epoch: int,
    advance: Advance,
) -> Epoch:
    """Train on every image once, then judge; every random choice depends on seed and epoch alone."""
    devices = [run.device] if run.device.type == "cuda" else []
    with torch.random.fork_rng(devices):  # dropout and stochastic depth draw from the global generator
        torch.manual_seed(int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0]))
        with closing(ahead(_training_batches(train, batch_size, seed, epoch))) as batches:
            train_loss = run.train(batches, augment, advance)
    return Epoch(train_loss, *run.evaluate(held_out, batch_size), len(held_out.labels))


class Pictures:
    """Images at the model's size: decoded once and kept as uint8 if there is room, else decoded as they are used."""

    def __init__(self, images: ImageSet, preprocessing: Preprocessing, workers: int | None, for_gpu: bool) -> None:
        assert images.labels is not None
        self._images, self._preprocessing, self._workers, self._for_gpu = images, preprocessing, workers, for_gpu
        self.labels = torch.from_numpy(images.labels)
        self._kept: Tensor | None = None
        height, width = preprocessing.size
        if len(images) * 3 * height * width <= CACHE_BYTES:
            kept = torch.empty((len(images), 3, height, width), dtype=torch.uint8)
            for rows, batch in self.batches(range(len(images)), 64):
                kept[rows[0] : rows[-1] + 1] = batch
            self._kept = kept

    def batches(self, order: Sequence[int], size: int) -> Generator[tuple[Sequence[int], Tensor]]:
        parts = [order[start : start + size] for start in range(0, len(order), size)]
        if self._kept is None:
            return decoded(self._images, parts, self._preprocessing, self._workers, self._for_gpu)
        kept = self._kept
        return ((rows, kept[torch.as_tensor(rows)]) for rows in parts)


def _training_batches(pictures: Pictures, batch_size: int, seed: int, epoch: int) -> Generator[_Step]:
    count = len(pictures.labels)
    order = np.random.default_rng([seed, epoch]).permutation(count).tolist()
    batches = pictures.batches(order, batch_size)

    def steps() -> Generator[_Step]:
        with closing(batches):
            for rows, images in batches:
                numbers = torch.as_tensor(rows)
                yield _Step(images, pictures.labels[numbers], numbers + epoch * count)

    return steps()


def _floats(images: Tensor, device: torch.device) -> Tensor:
    return to_float(images.to(device, non_blocking=True))
