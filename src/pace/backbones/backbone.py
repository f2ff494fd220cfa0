"""`Backbone`: images in, embeddings, attention and predictions out, for any vision transformer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pace.backbones.changes import eval_mode
from pace.backbones.find import describe
from pace.backbones.fingerprint import fingerprint
from pace.backbones.tower import Look, Tower
from pace.observations import Batch, Observations

Head = nn.Module | Callable[[Tensor], Tensor]


class Backbone:
    """A vision transformer at one or two of its blocks. The model itself is never changed.

    Parameters
    ----------
    model
        A vision transformer of timm, transformers, torchvision or open_clip, a `Tower`, or any object with the
        methods of `Model`.
    layer
        The block whose output tokens are the embeddings; negative numbers count from the end. At the last block they
        are taken after the final norm, if the model has one over all tokens. Two blocks, ``(8, 11)``, are laid side by
        side: the first tells parts and the second, `layer`, their kinds.
    head
        From pooled features to logits, instead of the model's own classifier: a module, a function, or a fitted
        scikit-learn classifier with `predict_proba`.
    count_cls
        Whether CLS counts as a patch, as in the paper. By default it does not: it has no place in the image. Registers
        and distillation tokens never count.
    attention_layer
        The block whose attention weighs the tokens, by default `layer` itself. The last block's attention shows what
        the prediction is based on.

    It has the number of `layers`, d of the layer's tokens (`dim`), the model's `preprocessing`, `has_cls` (whether its
    first token is CLS, counted or not) and `prefix_tokens`: 1 if CLS is counted, before the first patch, else 0.
    """

    def __init__(
        self,
        model: Any,
        layer: int | Sequence[int] = -1,
        head: Head | None = None,
        count_cls: bool = False,
        attention_layer: int | None = None,
    ) -> None:
        self.model, self.head, self.count_cls = model, _as_head(head), count_cls
        self._described = described = describe(model)
        self.layers, self.has_cls, self.preprocessing = described.layers, described.has_cls, described.preprocessing
        self.prefix_tokens = int(described.has_cls and count_cls)
        self.blocks = self._blocks(layer)
        self.layer = self.blocks[-1]
        self.dim = sum(map(described.dim, self.blocks))
        self.attention_layer = (
            self.layer if attention_layer is None else self._block("attention_layer", attention_layer)
        )
        if self.attention_layer != self.layer and not isinstance(described, Tower):
            kind = type(described).__name__
            raise ValueError(f"attention_layer: {kind} only gives the attention of layer {self.layer} itself")

    def __call__(self, images: Tensor) -> Batch:
        """Embeddings (B, J, d), attention (B, J) and predictions (B, N) of normalised images (B, 3, H, W)."""
        every = self.every_token(images)
        return Batch(self._kept(every.embeddings), self._kept(every.attention), every.predictions)

    def every_token(self, images: Tensor) -> Batch:
        """The same with all T tokens, including those that do not count."""
        return self._side_by_side(self._looks(images, self.blocks)).map(self._here)

    def at_blocks(self, images: Tensor, layers: Sequence[int], pooled: bool = False) -> Batch:
        """Embeddings (B, J, layers · d) of several layers with as many tokens side by side, all from one run.

        With `pooled`, what a classifier would read stands in place of the predictions. Attention is `attention_layer`'s.
        """
        looks = self._looks(images, layers)
        every = self._side_by_side(looks, pooled)
        return Batch(self._kept(every.embeddings), self._kept(every.attention), every.predictions).map(self._here)

    def pooled(self, images: Tensor) -> Tensor:
        """(B, p): what the model's own classifier reads, or would read; for training a probe."""
        with torch.no_grad():
            return self._here(self._described.look(images, self.layer).pooled)

    def split(self, images: Tensor) -> Tensor:
        """g of f = h ∘ g: all T tokens (B, T, d) of the layer, those before the patches too. Has gradients, as h has."""
        return self._here(self._tower.split(images, self.layer))

    def forward_from(self, tokens: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        """h of f = h ∘ g: logits (B, N) from such tokens. `size` of the images, if it is not the default."""
        return self._classified(*self._tower.resume(tokens.to(self._model_device), self.layer, size))

    def embed(self, images: Tensor) -> Tensor:
        """All T tokens (B, T, d) as the first block takes them: patches that know their places, and those before them."""
        return self._here(self._tower.embed(images))

    def forward_embedded(self, tokens: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        """Logits (B, N) from such tokens. Some may be left out, unless the model's attention counts places."""
        return self._classified(*self._tower.run_blocks(tokens.to(self._model_device), size))

    def observe(self, images: Any, **options: Any) -> Observations:
        """Observations of a picture, a folder, a list, a batch and more; see `pace.observing.extract.observe`."""
        from pace.observing.extract import observe

        return observe(self, images, **options)

    def __repr__(self) -> str:
        height, width = self.preprocessing.size
        rows, columns = self.grid(height, width)
        blocks = f"block{'s' * (len(self.blocks) - 1)} {' and '.join(map(str, self.blocks))}"
        where = f"{blocks} of 0 to {self.layers - 1}, attention of block {self.attention_layer}"
        head = "" if self.head is None else ", a head of its own"
        what = f"{height} x {width} pixels, {rows} x {columns} patches, d = {self.dim}{head}"
        return f"Backbone({type(self._module).__name__}, {where}, {what})"

    @property
    def device(self) -> torch.device:
        """Where images and results are: with the model, but on the CPU if that is on an Apple GPU, which lacks float64."""
        return without_apple(self._model_device)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the layer's patch tokens for an image size; ValueError for a size that does not fit."""
        return self._described.grid(height, width, self.layer)

    def fingerprint(self) -> str:
        """Changes with the weights, architecture, layers, head, and whether CLS counts."""
        return fingerprint(self._module, self.place, self.head, self.prefix_tokens, self.attention_layer)

    def model_fingerprint(self) -> str:
        """Changes with the weights and architecture, and whether CLS counts; the same at every block and for every head."""
        return fingerprint(self._module, self.prefix_tokens)

    @property
    def place(self) -> int | tuple[int, ...]:
        """The block, or both, as `layer` takes them."""
        return self.layer if len(self.blocks) == 1 else self.blocks

    @property
    def can_show_two(self) -> bool:
        """Whether it may be put at two blocks, seen with one attention."""
        return isinstance(self._described, Tower)

    def _blocks(self, given: int | Sequence[int]) -> tuple[int, ...]:
        if isinstance(given, int):
            return (self._block("layer", given),)
        blocks = tuple(self._block("layer", number) for number in given)
        size = self.preprocessing.size
        if not self.can_show_two:
            raise ValueError(f"layer: {type(self._described).__name__} shows one block at a time; found {given}")
        if not (len(blocks) == 2 and blocks[0] < blocks[1]):
            raise ValueError(f"layer: expected a block, or two in their order; found {given}")
        if self._described.grid(*size, blocks[0]) != self._described.grid(*size, blocks[1]):
            raise ValueError(f"layer: blocks {blocks[0]} and {blocks[1]} have different patches")
        return blocks

    def _block(self, name: str, number: int) -> int:
        count = self.layers
        if not -count <= number < count:
            raise ValueError(f"{name}: expected {-count} to {count - 1} for {count} blocks; found {number}")
        return number % count

    def _looks(self, images: Tensor, layers: Sequence[int]) -> list[Look]:
        with torch.no_grad():
            if isinstance(self._described, Tower):
                return self._described.look_at(images, layers, self.attention_layer)
            return [self._described.look(images, layer) for layer in layers]

    def _side_by_side(self, looks: Sequence[Look], pooled: bool = False) -> Batch:
        tokens = torch.cat([look.tokens for look in looks], -1) if len(looks) > 1 else looks[0].tokens
        return Batch(tokens, looks[-1].attention, looks[-1].pooled if pooled else self._predictions(looks[-1]))

    def _predictions(self, look: Look) -> Tensor | None:
        with torch.no_grad():
            logits = self._logits(look.pooled, look.logits)
        return None if logits is None else logits.softmax(-1, dtype=torch.float32)

    @property
    def _model_device(self) -> torch.device:
        return next(self._module.parameters()).device if isinstance(self._module, nn.Module) else torch.device("cpu")

    def _here(self, result: Tensor) -> Tensor:
        return result.to(without_apple(result.device))

    @property
    def _module(self) -> Any:
        return self._described.model if isinstance(self._described, Tower) else self._described

    @property
    def _tower(self) -> Tower:
        if not isinstance(self._described, Tower):
            raise ValueError(f"{type(self._described).__name__} cannot be split; only models with known blocks can")
        return self._described

    def _classified(self, pooled: Tensor, logits: Tensor | None) -> Tensor:
        found = self._logits(pooled, logits)
        if found is None:
            raise ValueError("this model has no classifier; give Backbone a head")
        return self._here(found)

    def _logits(self, pooled: Tensor, logits: Tensor | None) -> Tensor | None:
        if isinstance(self.head, nn.Module):
            weight = next(self.head.parameters(), pooled)
            with eval_mode(self.head):
                logits = self.head(pooled.to(weight.device, weight.dtype)).to(pooled.device)
        elif self.head is not None:
            logits = self.head(pooled)
        if logits is not None and logits.ndim != 2:
            raise ValueError(f"expected logits of shape (images, classes); found {tuple(logits.shape)}")
        return logits

    def _kept(self, tokens: Tensor) -> Tensor:
        """Tokens, or their attention, without those that do not count. The rest is not scaled up."""
        patches = tokens[:, self._described.prefix :]
        return torch.cat([tokens[:, :1], patches], 1) if self.prefix_tokens else patches


def without_apple(device: torch.device) -> torch.device:
    """The device itself, or the CPU instead of an Apple GPU."""
    return torch.device("cpu") if device.type == "mps" else device


def _as_head(head: Any) -> Head | None:
    """A scikit-learn classifier as a function from features to logits; anything else as it is."""
    if isinstance(head, nn.Module) or not hasattr(head, "fit"):
        return head  # type: ignore[no-any-return]
    kind = type(head).__name__
    if not hasattr(head, "predict_proba"):
        instead = "sklearn.calibration.CalibratedClassifierCV gives it one"
        raise ValueError(f"head: {kind} has no predict_proba, and explanations need probabilities; {instead}")
    if not hasattr(head, "classes_"):
        raise ValueError(f"head: this {kind} is not fitted; fit it on backbone.pooled(images) and labels")
    return partial(_log_probabilities, head)


def _log_probabilities(classifier: Any, features: Tensor) -> Tensor:
    found = classifier.predict_proba(features.detach().float().cpu().numpy())
    return torch.as_tensor(found, dtype=torch.float32, device=features.device).clamp_min(1e-6).log()
