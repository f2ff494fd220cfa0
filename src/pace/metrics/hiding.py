"""What a transformer predicts while patches are hidden, and which other patches to compare with.

A `Predict` takes image numbers (B,) and which patches are kept (B, patches), and returns predictions (B, N). `hide` makes one
from a transformer; any other function works too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pace.metrics.declare import Array
from pace.metrics.inputs import as_array

if TYPE_CHECKING:
    from torch import Tensor

    from pace.backbones import Backbone
    from pace.images import ImageSet

Predict = Callable[[Array, Array], Any]
How = Literal["grey", "blur", "mean", "left out"]

WAYS: tuple[How, ...] = ("grey", "blur", "mean", "left out")
_DRAWS = 3  # of other patches to compare with
_AT_ONCE = 128  # images with hidden patches that go through the model together


@dataclass(frozen=True, eq=False)
class Hiding:
    """Some of the images that are explained, and what is predicted for them while patches are hidden.

    rows : (n,) their places among the images whose φ is scored
    predict : image numbers, 0 to n − 1, and kept patches → predictions
    attention : (n, patches) the transformer's attention to their patches

    Nothing is predicted twice.
    """

    rows: Array
    predict: Predict
    attention: Array
    _known: dict[tuple[int, bytes], Array] = field(default_factory=dict, init=False, repr=False)

    @property
    def passes(self) -> int:
        """How many images, whole or not, have been predicted so far."""
        return len(self._known)

    def shares(self, images: Array, kept: Array) -> Array:
        """p(ŷ) (B,) of images (B,) with some patches kept (B, patches); ŷ is the prediction for the whole image."""
        classes = self.predictions(images, np.ones_like(kept)).argmax(1)
        found: Array = self.predictions(images, kept)[np.arange(len(images)), classes]
        return found

    def predictions(self, images: Array, kept: Array) -> Array:
        """(B, N) of all classes."""
        keys = [(int(image), mask.tobytes()) for image, mask in zip(images, kept, strict=True)]
        new = {key: place for place, key in enumerate(keys) if key not in self._known}
        places = np.array(list(new.values()), np.int64)
        places = places[np.argsort(kept[places].sum(1), kind="stable")]  # as many kept side by side: see `hide_tokens`
        for start in range(0, len(places), _AT_ONCE):
            some = places[start : start + _AT_ONCE]
            found = as_array(self.predict(images[some], kept[some]))
            if found.ndim != 2 or len(found) != len(some):
                raise ValueError(f"predict: expected predictions ({len(some)}, classes); found shape {found.shape}")
            if not ((found >= -1e-6).all() and (np.abs(found.sum(1) - 1) <= 0.02).all()):
                raise ValueError("predict: expected probabilities that sum to 1; apply softmax to logits")
            self._known.update((keys[place], shares) for place, shares in zip(some, found, strict=True))
        return np.stack([self._known[key] for key in keys])


def hide(backbone: Backbone, images: ImageSet | Tensor, rows: Array, how: How | Tensor = "grey") -> Hiding:
    """Some of the images, with patches hidden in one of four ways, or replaced by others.

    "grey" paints them over in the mean colour, "blur" with a blurred image; "mean" puts the mean patch in their place at the
    input of the first block, and "left out" leaves them out there. A tensor (D, d) holds patches as `Backbone.embed` gives
    them, one of which, drawn by lot, takes the place of each there. A tensor of images (M, 3, H, W) in [0, 1] has the size
    that the model takes.
    """
    import torch

    if isinstance(how, str) and how not in WAYS:
        raise ValueError(f"how: expected one of {', '.join(WAYS)}; found {how!r}")
    shown = normalized(backbone, images, rows)
    height, width = shown.shape[2:]
    grid, parts = backbone.grid(height, width), torch.split(shown, _AT_ONCE)
    attention = np.concatenate([as_array(backbone(part).attention[:, backbone.prefix_tokens :]) for part in parts])
    if isinstance(how, str) and (how == "grey" or how == "blur"):
        predict = hide_patches(lambda some: backbone(some).predictions, shown, grid, how)
    else:
        with torch.no_grad():
            tokens = torch.cat([backbone.embed(part) for part in parts])

        def forward(some: Any) -> Any:
            return backbone.forward_embedded(some, (height, width)).softmax(-1, dtype=torch.float32)

        predict = hide_tokens(forward, tokens, math.prod(grid), how)
    return Hiding(np.asarray(rows), predict, attention)


def normalized(backbone: Backbone, images: ImageSet | Tensor, rows: Array) -> Tensor:
    """Some of the images, as `hide` takes them, as the model does."""
    import torch

    from pace.images import normalize
    from pace.metrics.ground_truth import sample_images

    taken = images[rows] if isinstance(images, torch.Tensor) else sample_images(images, rows, backbone.preprocessing)
    return normalize(taken.to(backbone.device), backbone.preprocessing)


def hide_patches(
    forward: Callable[[Any], Any], images: Any, grid: tuple[int, int], how: Literal["grey", "blur"] | Tensor = "grey"
) -> Predict:
    """Hide patches in the images themselves; a tensor like `images` holds others, which are seen there instead.

    forward : normalised images → predictions: ``lambda images: backbone(images).predictions``
    images : tensor (n, 3, H, W), normalised, so that 0 is the mean colour
    grid : rows and columns of the patches
    """
    import torch
    import torch.nn.functional as F

    cover = _cover(images, grid, how)

    def predict(numbers: Array, kept: Array) -> Any:
        chosen = torch.as_tensor(numbers, device=images.device)
        mask = torch.as_tensor(kept, device=images.device, dtype=images.dtype).reshape(len(chosen), 1, *grid)
        mask = F.interpolate(mask, images.shape[2:], mode="nearest-exact")
        with torch.no_grad():
            return forward(images[chosen] * mask + cover[chosen] * (1 - mask))

    return predict


def hide_tokens(
    forward: Callable[[Any], Any], tokens: Any, patches: int, how: Literal["mean", "left out"] | Tensor = "mean"
) -> Predict:
    """Hide patches among the tokens: the mean of all patches replaces them, other patches (D, d) do, or they are left out.

    forward : tokens → predictions: ``lambda tokens: backbone.forward_embedded(tokens).softmax(-1)``
    tokens : tensor (n, T, d), such as `Backbone.embed` gives; the last `patches` tokens are the patches

    After the last block of a model that reads only CLS, no patch has any effect.
    """
    import torch

    prefix, others = tokens.shape[1] - patches, tokens[:, -patches:].mean((0, 1), keepdim=True)[0]
    leaves_out = isinstance(how, str) and how == "left out"
    if not isinstance(how, str):  # the same in every image, so that changes can be compared
        others = how[torch.randint(len(how), (patches,), generator=torch.Generator().manual_seed(0)).to(how.device)]

    def replaced(chosen: Any, mask: Any) -> Any:
        hidden = torch.where(mask[:, :, None], chosen[:, prefix:], others)
        return forward(torch.cat([chosen[:, :prefix], hidden], 1))

    def left_out(chosen: Any, mask: Any) -> Any:
        mask = torch.cat([mask.new_ones(len(mask), prefix), mask], 1)
        counts = mask.sum(1)
        found = [(counts == count).nonzero()[:, 0] for count in counts.unique()]  # as many tokens go through together
        parts = [forward(chosen[some][mask[some]].view(len(some), -1, chosen.shape[2])) for some in found]
        return torch.cat(parts)[torch.cat(found).argsort()]

    def predict(numbers: Array, kept: Array) -> Any:
        chosen = tokens[torch.as_tensor(numbers, device=tokens.device)]
        with torch.no_grad():
            return (left_out if leaves_out else replaced)(chosen, torch.as_tensor(kept, device=tokens.device))

    if leaves_out:
        _check_left_out(predict, patches)
    return predict


def _check_left_out(predict: Predict, patches: int) -> None:
    """Attention may count places, and pooling may need a patch; an image without patches shows either."""
    try:
        if np.isfinite(as_array(predict(np.zeros(1, np.int64), np.zeros((1, patches), bool)))).all():
            return
        why = "it averages its patches"
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
    raise ValueError(f"patches cannot be left out of this model ({why}); hide them in another way")


def _cover(images: Any, grid: tuple[int, int], how: Any) -> Any:
    """What is seen where a patch is hidden; blurred by a Gaussian as wide as a patch, so that nothing of its size is left."""
    from pace.images.pixels import blur

    if not isinstance(how, str):
        return how
    if how == "grey":
        return images.new_zeros(images.shape)

    height, width = images.shape[2:]
    sigma = max(height / grid[0], width / grid[1])
    reach = min(math.ceil(3 * sigma), height - 1, width - 1)
    return blur(images, images.new_full((len(images),), sigma), 2 * reach + 1)


def elsewhere(gone: Array, grid: tuple[int, int] | None, generator: np.random.Generator) -> Array:
    """(n, draws, patches): masks (n, patches) moved over the picture by lot, around its edges."""
    rows, columns = grid or (1, gone.shape[1])
    draws = [
        [
            np.roll(mask.reshape(rows, columns), generator.integers((rows, columns)), (0, 1)).ravel()
            for _ in range(_DRAWS)
        ]
        for mask in gone
    ]
    return np.array(draws)


def as_attended(gone: Array, attention: Array, generator: np.random.Generator) -> Array:
    """(n, draws, patches): patches by lot, until they have the attention of the masks (n, patches)."""
    order = generator.random((len(gone), _DRAWS, gone.shape[1])).argsort(2)
    held = np.take_along_axis(np.repeat(attention[:, None], _DRAWS, 1), order, 2)
    wanted = (attention * gone).sum(1)[:, None, None]
    found = np.empty(order.shape, bool)
    np.put_along_axis(found, order, held.cumsum(2) - held / 2 < wanted, 2)
    return found
