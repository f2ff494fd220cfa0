"""Observations with every token of a layer, for models whose h reads tokens that do not count for PACE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pace.baselines.head import reading
from pace.baselines.split import SplitObservations
from pace.observations import Batch, Observations

if TYPE_CHECKING:
    from pace.backbones import Backbone
    from pace.images import PreprocessingLike


class EveryToken:
    """A backbone that leaves no token out: those that do not count are in the prefix, with attention 0.

    Needed to explain a layer by its h where that reads them: CLS on the last layer, registers on an inner one.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        height, width = backbone.preprocessing.size
        rows, columns = self.grid(height, width)
        with torch.no_grad():
            tokens = self.split(torch.zeros(1, 3, height, width, device=self.device))
        self.prefix_tokens = tokens.shape[1] - rows * columns

    def __call__(self, images: Tensor) -> Batch:
        batch = self._backbone.every_token(images)
        attention = batch.attention.clone()
        attention[:, self._backbone.prefix_tokens : self.prefix_tokens] = 0
        return Batch(batch.embeddings, attention, batch.predictions)

    def observe(self, images: Any, **options: Any) -> SplitObservations:
        """What the backbone itself observes, with the tokens that it leaves out beside it; see `pace.extract.observe`."""
        from pace.observing.extract import observe

        return self.counted(observe(self, images, **options))

    def counted(self, whole: Observations) -> SplitObservations:
        """The same of what was observed with this backbone."""
        counted = self._backbone.prefix_tokens
        return SplitObservations.of(whole, counted, cls_beside=self._backbone.has_cls and not counted)

    @property
    def layer(self) -> int:
        return self._backbone.layer

    @property
    def device(self) -> torch.device:
        return self._backbone.device

    @property
    def preprocessing(self) -> PreprocessingLike:
        return self._backbone.preprocessing

    def grid(self, height: int, width: int) -> tuple[int, int]:
        return self._backbone.grid(height, width)

    def split(self, images: Tensor) -> Tensor:
        return self._backbone.split(images)

    def forward_from(self, tokens: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        return self._backbone.forward_from(tokens, size)

    def fingerprint(self) -> str:
        return f"{self._backbone.fingerprint()}, every token"


def reads_uncounted(backbone: Backbone) -> bool:
    """Whether h reads tokens of the layer that do not count, so that `EveryToken` has to observe them."""
    size = backbone.preprocessing.size
    rows, columns = backbone.grid(*size)
    read = reading(backbone, size).tokens
    return bool(read[backbone.prefix_tokens : len(read) - rows * columns].any())
