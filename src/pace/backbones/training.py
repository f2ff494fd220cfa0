"""The training loop of `finetune`: augmented batches, epochs, and the state needed to resume."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pace.backbones.backbone import without_apple
from pace.backbones.tower import Tower
from pace.images import ImageSet, Perturb, normalize, pixels, to_float
from pace.images.loading import decoded
from pace.progress import Advance

_WARMUP = 0.1  # share of all steps over which the learning rate rises
_WEIGHT_DECAY = 0.05
_LABEL_SMOOTHING = 0.1

# Augmentation, gentler than the paper's perturbation.
_JITTER = 0.4  # brightness, contrast and saturation change by up to this factor
_HUE = 0.05  # of a turn
_JITTERED = 0.8  # share of images with any jitter


class Epoch(NamedTuple):
    """Results of one pass over the training images."""

    train_loss: float
    loss: float  # on the held-out images
    accuracy: float  # on the held-out images
    images: int = 0  # held out


def best_epoch(history: Sequence[Epoch]) -> int:
    """The last epoch within one standard error of the highest accuracy.

    A few held-out images cannot tell such epochs apart, and late ones have seen more augmented images.
    """
    top = max(history, key=lambda epoch: epoch.accuracy)
    error = math.sqrt(top.accuracy * (1 - top.accuracy) / top.images) if top.images else 0.0
    return max(number for number, epoch in enumerate(history) if epoch.accuracy >= top.accuracy - error)


@dataclass(frozen=True)
class Augmentation:
    """Flip, resized crop and colour jitter. ``augmentation(batch, draws)`` depends only on the seed and the draws."""

    seed: int = 0

    def __call__(self, batch: Tensor, draws: Any) -> Tensor:
        keys = [np.array([self.seed, int(draw)], dtype=np.uint64) for draw in draws]
        uniform = np.stack([np.random.Generator(np.random.Philox(key=key)).random(10) for key in keys])
        flip, jittered, area, ratio, right, down, *factors = torch.from_numpy(uniform.T)
        mirrored = (flip < 0.5).to(batch.device)[:, None, None, None]
        batch = torch.where(mirrored, batch.flip(-1), batch)
        height, width = batch.shape[2:]
        # Crops keep half of the area or more, and nearly the image's own proportions.
        side, stretch = (0.5 + 0.5 * area).sqrt(), torch.exp(math.log(4 / 3) * (ratio - 0.5))
        wide, high = (width * side * stretch).clamp(1, width), (height * side / stretch).clamp(1, height)
        left, top = right * (width - wide), down * (height - high)
        batch = pixels.crop_and_resize(batch, torch.stack([left, top, left + wide, top + high], dim=1))
        for adjust, factor in zip((pixels.brightness, pixels.contrast, pixels.saturation), factors[:3], strict=True):
            batch = adjust(batch, 1 + _JITTER * (2 * factor - 1) * (jittered < _JITTERED))
        return pixels.hue(batch, _HUE * (2 * factors[3] - 1) * (jittered < _JITTERED))


def room_for_pixels(device: torch.device) -> int:
    """Bytes of decoded images to keep there: a quarter of what a GPU has free. A model on a CPU waits for no decoding."""
    return torch.cuda.mem_get_info(device)[0] // 4 if device.type == "cuda" else 0


@dataclass(eq=False)
class Trainer:
    """A model and its optimizer, after the epochs in `history`; `best` has the weights of the best of them.

    Every random choice depends only on the seed and the epoch, so a restored trainer ends with the same weights.
    """

    tower: Tower
    train: ImageSet
    held_out: ImageSet
    augment: Perturb | None
    epochs: int
    batch_size: int
    lr: float
    layer_decay: float
    seed: int
    history: list[Epoch] = field(default_factory=list)
    best: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if min(self.epochs, self.batch_size) < 1:
            raise ValueError(f"epochs and batch_size: expected 1 or more; found {self.epochs} and {self.batch_size}")
        if self.lr <= 0:
            raise ValueError(f"lr: expected a number above 0; found {self.lr}")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"layer_decay: expected a share above 0 and up to 1; found {self.layer_decay}")
        self._model = self.tower.model
        self._device = next(self._model.parameters()).device
        self._augments_on = without_apple(self._device)
        self._steps_per_epoch = math.ceil(len(self.train) / self.batch_size)
        self._kept: dict[int, Tensor] = {}  # decoded images of a set, by its id
        self._optimizer = torch.optim.AdamW(parameter_groups(self.tower, self.layer_decay), lr=self.lr)

    def run_epoch(self, advance: Advance) -> None:
        """One more pass over the training images, in a new order, and one over the held-out images."""
        epoch, count = len(self.history), len(self.train)
        order = np.random.default_rng([self.seed, epoch]).permutation(count).tolist()
        total = torch.zeros((), device=self._device)
        self._model.train()
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            # Dropout and stochastic depth draw from the global generator.
            torch.manual_seed(int(np.random.SeedSequence([self.seed, epoch]).generate_state(1)[0]))
            batches = self._batches(self.train, order)
            for step, (rows, batch, labels) in enumerate(batches, epoch * self._steps_per_epoch):
                batch = batch if self.augment is None else self.augment(batch, torch.as_tensor(rows) + epoch * count)
                total += self._update(batch, labels, step) * len(rows)
                advance(len(rows))
        loss = float(total) / count
        if not math.isfinite(loss):
            raise ValueError(f"lr: the loss is {loss} in epoch {epoch + 1}; try less than {self.lr:g}")
        self.history.append(Epoch(loss, *self.evaluate(), len(self.held_out)))
        if best_epoch(self.history) == epoch:
            self.best = self._weights()

    def _batches(self, images: ImageSet, order: Sequence[int]) -> Iterator[tuple[Sequence[int], Tensor, Tensor]]:
        """Numbers, pixels in [0, 1] and labels of the images `order`, a batch at a time."""
        chunks = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        labels = torch.as_tensor(images.labels)
        for rows, batch in self._pixels(images, chunks):
            yield rows, to_float(batch), labels[torch.as_tensor(rows)].to(self._device)

    def _pixels(self, images: ImageSet, chunks: Sequence[Sequence[int]]) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Decoded in the first epoch; kept for the others, where the device has room and would wait for the decoding."""
        kept, device = self._kept.get(id(images)), self._augments_on
        if kept is not None:
            for rows in chunks:
                yield rows, kept[torch.as_tensor(rows).to(device)]
            return
        preprocessing = self.tower.preprocessing
        if len(images) * 3 * math.prod(preprocessing.size) <= room_for_pixels(device):
            kept = torch.empty(len(images), 3, *preprocessing.size, dtype=torch.uint8, device=device)
        for rows, batch in decoded(images, chunks, preprocessing, for_gpu=self._device.type == "cuda"):
            there = batch.to(device)
            if kept is not None:
                kept[torch.as_tensor(rows).to(device)] = there
            yield rows, there
        if kept is not None:
            self._kept[id(images)] = kept

    def _update(self, batch: Tensor, labels: Tensor, step: int) -> Tensor:
        for group in self._optimizer.param_groups:
            group["lr"] = group["share"] * self._rate(step)
        loss = F.cross_entropy(self._logits(batch), labels, label_smoothing=_LABEL_SMOOTHING)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def _rate(self, step: int) -> float:
        """Linear warm-up, then a cosine to zero."""
        steps = self.epochs * self._steps_per_epoch
        warmup = max(1, round(_WARMUP * steps))
        if step < warmup:
            return self.lr * (step + 1) / warmup
        return self.lr * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """Loss and accuracy on the held-out images as they are."""
        self._model.eval()
        right, loss = torch.zeros(2, device=self._device)
        for _, batch, labels in self._batches(self.held_out, range(len(self.held_out))):
            logits = self._logits(batch)
            loss += F.cross_entropy(logits, labels, reduction="sum")
            right += (logits.argmax(-1) == labels).sum()
        return float(loss) / len(self.held_out), float(right) / len(self.held_out)

    def _logits(self, images: Tensor) -> Tensor:
        images = images.to(self._device)
        half = images.is_cuda and torch.cuda.is_bf16_supported()
        with torch.autocast(images.device.type, torch.bfloat16, enabled=half):
            return (self.tower.run or self._model)(normalize(images, self.tower.preprocessing)).float()

    def _weights(self) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in self._model.state_dict().items()}

    def state(self) -> dict[str, Tensor]:
        """Model, best weights and optimizer as one flat dictionary, for a file."""
        state = {f"model.{name}": tensor for name, tensor in self._weights().items()}
        state |= {f"best.{name}": tensor for name, tensor in self.best.items()}
        for number, moments in self._optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{number}.{name}": tensor for name, tensor in moments.items()}
        return state

    def restore(self, state: dict[str, Tensor], history: list[Epoch]) -> None:
        def below(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}

        self._model.load_state_dict(below("model."))
        self.best, self.history = below("best."), history
        optimizer = self._optimizer.state_dict()
        numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
        optimizer["state"] = {number: below(f"optimizer.{number}.") for number in numbers}
        self._optimizer.load_state_dict(optimizer)


def parameter_groups(tower: Tower, layer_decay: float) -> list[dict[str, Any]]:
    """The trained parameters by their share of the learning rate (1 in the last block) and their weight decay."""
    last = len(tower.blocks)
    depth = {id(parameter): number for number, block in enumerate(tower.blocks, 1) for parameter in block.parameters()}
    elsewhere = 0  # patch and position embeddings come before the blocks, norms and classifiers after them
    groups: dict[tuple[float, float], list[Tensor]] = defaultdict(list)
    for parameter in tower.model.parameters():
        if id(parameter) in depth:
            elsewhere = last
        if parameter.requires_grad:
            decay = _WEIGHT_DECAY if parameter.ndim > 1 else 0.0  # not on biases, norms and scales
            groups[layer_decay ** (last - depth.get(id(parameter), elsewhere)), decay].append(parameter)
    return [{"params": some, "share": share, "weight_decay": decay} for (share, decay), some in groups.items()]
