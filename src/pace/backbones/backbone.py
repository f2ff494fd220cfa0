"""`Backbone`: images in, embeddings, attention and predictions out, for any vision transformer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pace.backbones.find import find
from pace.backbones.fingerprint import fingerprint
from pace.backbones.guard import undisturbed
from pace.backbones.preprocessing import Preprocessing
from pace.backbones.tower import Tower
from pace.observations import Batch

if TYPE_CHECKING:
    from pace.observations import Observations

Head = nn.Module | Callable[[Tensor], Tensor]


class Backbone:
    """What a vision transformer says about images at one of its layers. The model itself is never changed.

    Parameters
    ----------
    model
        A vision transformer of timm, transformers, torchvision or open_clip, a `Tower`, or any object with the
        methods of `Model`.
    layer
        The block whose output tokens are the embeddings, negative from the end. Of the last block they are taken
        after the final norm, if the model has one over all tokens.
    head
        From pooled features to logits, instead of the model's own classifier.
    count_cls
        Whether CLS counts as a patch, as in the paper. By default it does not: it has no place in the image. Registers and
        distillation tokens never do.
    attention_layer
        The block whose attention weighs the tokens, negative from the end; by default `layer` itself. The last one says
        what the prediction really looks at.
    """

    def __init__(
        self,
        model: Any,
        layer: int = -1,
        head: Head | None = None,
        count_cls: bool = False,
        attention_layer: int | None = None,
    ) -> None:
        self.model = model
        self._sight = find(model)
        self.layer = self._block("layer", layer)
        self.attention_layer = (
            self.layer if attention_layer is None else self._block("attention_layer", attention_layer)
        )
        if self.attention_layer != self.layer and not isinstance(self._sight, Tower):
            raise ValueError(
                f"attention_layer: {type(self._sight).__name__} gives the attention of layer {self.layer} alone; only models "
                "with known blocks give that of another"
            )
        self.head = head
        self.count_cls = count_cls

    def __call__(self, images: Tensor) -> Batch:
        """Embeddings (B, J, d), attention (B, J) and predictions (B, N) of normalised images (B, 3, H, W)."""
        every = self.every_token(images)
        return Batch(self._kept(every.embeddings), self._kept(every.attention), every.predictions)

    def every_token(self, images: Tensor) -> Batch:
        """The same with all T tokens of the layer, those that do not count among them."""
        with torch.no_grad():
            look = (
                self._sight.look(_images(images), self.layer)
                if self.attention_layer == self.layer
                else self._tower.look(_images(images), self.layer, self.attention_layer)
            )
            logits = self._logits(look.pooled, look.logits)
        predictions = None if logits is None else logits.softmax(-1, dtype=torch.float32)
        return Batch(look.tokens, look.attention, predictions)

    def pooled(self, images: Tensor) -> Tensor:
        """(B, p): what the model's own classifier reads, or would read; for training a probe."""
        with torch.no_grad():
            return self._sight.look(_images(images), self.layer).pooled

    def split(self, images: Tensor) -> Tensor:
        """g of f = h ∘ g: all T tokens (B, T, d) of the layer, with CLS, registers and distillation tokens.

        Differentiable, like `forward_from`, as far as the surrounding grad mode allows.
        """
        return self._tower.split(_images(images), self.layer)

    def forward_from(self, tokens: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        """h of f = h ∘ g: logits (B, N) from such tokens. `size` of the images, where it is not the usual one."""
        logits = self._logits(*self._tower.resume(tokens, self.layer, size))
        if logits is None:
            raise ValueError("this model has no classifier; give Backbone a head")
        return logits

    def observe(self, images: Any, **options: Any) -> Observations:
        """Observations of a tensor, a DataLoader, a folder or a dataset; see `pace.observing.extract.observe`."""
        from pace.observing.extract import observe

        return observe(self, images, **options)

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return self._sight.layers

    @property
    def dim(self) -> int:
        """d of the layer's tokens."""
        return self._sight.dim(self.layer)

    @property
    def has_cls(self) -> bool:
        """Whether the model has a CLS token, counted or not. It is the first of all tokens."""
        return self._sight.has_cls

    @property
    def prefix_tokens(self) -> int:
        """Tokens before the first patch: 1 if there is a CLS token and it is counted, else 0."""
        return int(self.has_cls and self.count_cls)

    @property
    def preprocessing(self) -> Preprocessing:
        return self._sight.preprocessing

    @property
    def device(self) -> torch.device:
        """Where the model is, and the results will be."""
        parameters = self._module.parameters() if isinstance(self._module, nn.Module) else ()
        return next((parameter.device for parameter in parameters), torch.device("cpu"))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the layer's patch tokens for an image size; ValueError for a size that does not fit."""
        return self._sight.grid(height, width, self.layer)

    def fingerprint(self) -> str:
        """Another one for other weights, architecture, layer, head, count_cls or attention_layer."""
        # Stores on disk are known by such fingerprints. So the layer's own attention goes without saying, and a model without
        # CLS has the one it had when CLS counted by default.
        other = () if self.attention_layer == self.layer else (self.attention_layer,)
        return fingerprint(self._module, self.layer, self.head, self.count_cls or not self.has_cls, *other)

    def _block(self, name: str, number: int) -> int:
        if not -self.layers <= number < self.layers:
            raise ValueError(
                f"{name}: expected {-self.layers} to {self.layers - 1} for {self.layers} blocks; found {number}"
            )
        return number % self.layers

    @property
    def _module(self) -> Any:
        return self._sight.model if isinstance(self._sight, Tower) else self._sight

    @property
    def _tower(self) -> Tower:
        if not isinstance(self._sight, Tower):
            raise ValueError(f"{type(self._sight).__name__} cannot be split; only models with known blocks can")
        return self._sight

    def _logits(self, pooled: Tensor, logits: Tensor | None) -> Tensor | None:
        if isinstance(self.head, nn.Module):
            weight = next(chain(self.head.parameters(), self.head.buffers()), pooled)
            with undisturbed(self.head):
                logits = self.head(pooled.to(weight.device, weight.dtype)).to(pooled.device)
        elif self.head is not None:
            logits = self.head(pooled)
        if logits is not None and logits.ndim != 2:
            raise ValueError(f"expected logits of shape (images, classes); found {tuple(logits.shape)}")
        return logits

    def _kept(self, tokens: Tensor) -> Tensor:
        """Tokens or their attention without those that are not counted. What remains is not scaled up."""
        patches = tokens[:, self._sight.prefix :]
        if not self.prefix_tokens:
            return patches
        return tokens if self._sight.prefix == 1 else torch.cat([tokens[:, :1], patches], 1)


def _images(images: Tensor) -> Tensor:
    if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
        found = (
            f"{images.dtype} of shape {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        )
        raise ValueError(f"images: expected normalised floats of shape (images, 3, height, width); found {found}")
    return images
