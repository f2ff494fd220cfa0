"""`Tower`: where a vision transformer keeps its blocks, final norm and classifier, and how to read and split it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pace.backbones.attention import AttentionProbe, Windows, attention_received
from pace.backbones.changes import eval_mode, replaced_forward
from pace.backbones.preprocessing import Preprocessing


class Look(NamedTuple):
    """What a transformer computes for a batch of images at one layer, T = prefix + patches tokens.

    tokens : (B, T, d)
    attention : (B, T), of CLS to every token, or what every token receives
    pooled : (B, p), what the classifier reads
    logits : (B, N), or None without a classifier
    """

    tokens: Tensor
    attention: Tensor
    pooled: Tensor
    logits: Tensor | None


@runtime_checkable
class Model(Protocol):
    """What `Backbone` needs of a transformer. A `Tower` has it; so may an object of your own.

    layers : number of blocks
    prefix : tokens before the first patch; CLS is the first of them when `has_cls`
    dim : d of a layer's tokens
    grid : rows and columns of a layer's patches for an image size; ValueError for a size the model does not take
    look : tokens, attention, pooled features and logits of a batch
    """

    @property
    def layers(self) -> int: ...
    @property
    def prefix(self) -> int: ...
    @property
    def has_cls(self) -> bool: ...
    @property
    def preprocessing(self) -> Preprocessing: ...
    def dim(self, layer: int) -> int: ...
    def grid(self, height: int, width: int, layer: int) -> tuple[int, int]: ...
    def look(self, images: Tensor, layer: int) -> Look: ...


@dataclass(frozen=True)
class Sizes:
    """The image sizes a model takes, and the grid of patches they give.

    rule : "fixed" takes `default` only; "multiple" takes multiples of `patch`; "floor" and "ceil" take any size, and
        drop or pad the patches at the border
    """

    default: tuple[int, int]
    patch: tuple[int, int]
    rule: Literal["fixed", "multiple", "floor", "ceil"]

    def grid(self, height: int, width: int) -> tuple[int, int]:
        (high, wide), found = self.patch, f"images are {height} x {width}"
        if self.rule == "fixed" and (height, width) != self.default:
            raise ValueError(f"{found}, but this model takes {self.default[0]} x {self.default[1]} only")
        rows, columns = height // high, width // wide
        if self.rule == "multiple" and (height % high or width % wide):
            near = f"{max(1, rows) * high} x {max(1, columns) * wide}"
            raise ValueError(f"{found}, but this model takes multiples of {high} x {wide} only, such as {near}")
        if self.rule == "ceil":
            rows, columns = -(-height // high), -(-width // wide)
        if not (rows and columns):
            raise ValueError(f"{found}, smaller than one patch of {high} x {wide}")
        return rows, columns


@dataclass(frozen=True, eq=False)
class Tower:
    """A vision transformer of PyTorch modules.

    Parameters
    ----------
    model, sizes
        The whole model, and the image sizes it takes.
    blocks, dims
        The transformer's blocks in order, and d of each one's output: (images, tokens, d) or (images, rows, columns, d).
    prefix, has_cls
        Tokens before the first patch, and whether CLS is the first of them.
    run
        From images to logits, or to pooled features when there are no `classifiers`; by default `model` itself.
    norm
        The norm over all tokens after the last block, if there is one.
    classifiers
        The linear layers that make the logits; with several, their inputs are averaged to one pooled feature.
    pool
        An attention pooling head in place of CLS (SigLIP).
    merges, windows
        How often 2 x 2 tokens were merged before each block, and how a block cuts a token grid into windows (Swin).
    """

    model: nn.Module
    blocks: Sequence[nn.Module]
    dims: Sequence[int]
    sizes: Sizes
    prefix: int = 0
    has_cls: bool = False
    run: Callable[[Tensor], Tensor] | None = None
    norm: nn.Module | None = None
    classifiers: Sequence[nn.Module] = ()
    pool: nn.Module | None = None
    merges: Sequence[int] = ()
    windows: Callable[[Any, tuple[int, int]], Windows] | None = None
    preprocessing: Preprocessing = field(default_factory=Preprocessing)

    def __post_init__(self) -> None:
        # The size is stated once, in `sizes`.
        object.__setattr__(self, "preprocessing", replace(self.preprocessing, size=self.sizes.default))

    @property
    def layers(self) -> int:
        return len(self.blocks)

    def dim(self, layer: int) -> int:
        return self.dims[layer]

    def grid(self, height: int, width: int, layer: int) -> tuple[int, int]:
        rows, columns = self.sizes.grid(height, width)
        scale = 2 ** (self.merges[layer] if self.merges else 0)
        return -(-rows // scale), -(-columns // scale)

    def look(self, images: Tensor, layer: int, attention_layer: int | None = None) -> Look:
        """Tokens of a layer, with the attention of that block or another, in one run."""
        return self.look_at(images, [layer], attention_layer)[0]

    def look_at(self, images: Tensor, layers: Sequence[int], attention_layer: int | None = None) -> list[Look]:
        """The same of several layers that have as many tokens, all in one run and with one attention."""
        layer = layers[0]
        images, grid = self._checked(images, layer)
        watched = layer if attention_layer is None else attention_layer
        other = self.grid(images.shape[2], images.shape[3], watched)
        if other != grid:
            raise ValueError(
                f"attention_layer: block {watched} attends over {other[0]} x {other[1]} patches, but layer {layer} has "
                f"{grid[0]} x {grid[1]}; choose a block of the same stage"
            )
        asked = self.blocks[watched]
        if self.pool is not None and not self.has_cls and watched == self.layers - 1:
            asked = self.pool
        probe, own = AttentionProbe(slice(0, 1) if self.has_cls else slice(None)), asked.forward

        def probed(*args: Any, **kwargs: Any) -> Any:
            with probe:
                return own(*args, **kwargs)

        with torch.no_grad(), eval_mode(self.model):
            with replaced_forward(asked, probed):
                found, pooled, logits = self._follow(images, layers, grid)
            tokens = found[0]
            if len(probe.seen) != 1:
                raise ValueError(
                    f"{type(asked).__name__} computed {len(probe.seen) or 'no'} visible attentions instead of one: it "
                    "must call scaled_dot_product_attention, nn.MultiheadAttention or a softmax over (B, heads, T, T); "
                    "in transformers, load the model with attn_implementation='sdpa'"
                )
            if self.windows is not None:
                attention = attention_received(probe.seen[0], grid, self.windows(asked, grid))
            else:
                attention = probe.seen[0].mean(1)
        unseen = tokens.shape[1] - attention.shape[1]  # prefix tokens that a pooling head does not read
        if len(attention) != len(tokens) or unseen not in (0, self.prefix):
            raise ValueError(
                f"{type(asked).__name__} computed attention of shape {tuple(attention.shape)} for tokens "
                f"{tuple(tokens.shape)}; only attention between tokens can be explained"
            )
        attention = F.pad(attention, (unseen, 0)) if unseen else attention
        return [Look(tokens, attention, pooled, logits) for tokens in found]

    def split(self, images: Tensor, layer: int) -> Tensor:
        """g of f = h ∘ g: all tokens (B, T, d) of a layer."""
        images, grid = self._checked(images, layer)
        with eval_mode(self.model):
            return self._follow(images, [layer], grid)[0][0]

    def resume(self, tokens: Tensor, layer: int, size: tuple[int, int] | None) -> tuple[Tensor, Tensor | None]:
        """h of f = h ∘ g: pooled features and logits from the tokens of a layer, for images of `size`.

        The model runs on one blank image, of which little more than the embedding is computed: the blocks before the
        cut pass on what they get, and the cut returns `tokens`.
        """
        size = size or self.sizes.default
        grid = self.grid(*size, layer)
        expected = (grid[0] * grid[1] + self.prefix, self.dims[layer])
        if tuple(tokens.shape[1:]) != expected:
            raise ValueError(
                f"tokens: expected shape (images, {expected[0]}, {expected[1]}) for images of {size[0]} x {size[1]}; "
                f"found {tuple(tokens.shape)}"
            )
        cut, first = self._cut(layer), self.blocks[0].forward
        form: Any = None  # what the first block returns: the tokens, or a tuple that begins with them

        def in_place_of(value: Tensor, *_: Any, **__: Any) -> Tensor:
            return tokens.reshape(len(tokens), *grid, -1) if value.ndim == 4 else tokens

        def passing(block: nn.Module) -> Callable[..., Any]:
            def forward(value: Tensor, *args: Any, **kwargs: Any) -> Any:
                nonlocal form
                if form is None:
                    form = first(value, *args, **kwargs)
                value = in_place_of(value) if block is cut else value
                return (value, *form[1:]) if isinstance(form, tuple) else value

            return forward

        blank = next(self.model.parameters()).new_zeros(1, 3, *size)
        with eval_mode(self.model), ExitStack() as stack:
            for block in self.blocks[: layer + 1]:
                stack.enter_context(replaced_forward(block, passing(block)))
            if cut is self.norm:
                stack.enter_context(replaced_forward(cut, in_place_of))
            return self._outputs(blank)

    def embed(self, images: Tensor) -> Tensor:
        """All tokens (B, T, d) as the first block takes them: patches that know their places, and those before them."""
        if self.windows is not None:
            raise ValueError(f"{type(self.model).__name__} merges its tokens on the way; hide patches in the images")
        images, _ = self._checked(images, 0)
        seen: list[Tensor] = []
        with eval_mode(self.model), self.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0])):
            self._outputs(images)
        return seen[0]

    def run_blocks(self, tokens: Tensor, size: tuple[int, int] | None) -> tuple[Tensor, Tensor | None]:
        """Pooled features and logits from such tokens, of which any may be left out, for images of `size`."""
        first = self.blocks[0].forward
        blank = next(self.model.parameters()).new_zeros(1, 3, *(size or self.sizes.default))

        def begin(_: Tensor, *args: Any, **kwargs: Any) -> Any:
            return first(tokens, *args, **kwargs)

        with eval_mode(self.model), replaced_forward(self.blocks[0], begin):
            return self._outputs(blank)

    def _checked(self, images: Any, layer: int) -> tuple[Tensor, tuple[int, int]]:
        """The images as the model takes them, and their grid of patches."""
        is_tensor = isinstance(images, Tensor)
        if not (is_tensor and images.ndim == 4 and images.shape[1] == 3 and images.is_floating_point()):
            found = f"{images.dtype} of shape {tuple(images.shape)}" if is_tensor else type(images).__name__
            raise ValueError(f"images: expected floats of shape (images, 3, height, width); found {found}")
        weight = next(self.model.parameters())
        return images.to(weight.device, weight.dtype), self.grid(images.shape[2], images.shape[3], layer)

    def _cut(self, layer: int) -> nn.Module:
        """The module whose output are the tokens of a layer."""
        return self.norm if self.norm is not None and layer == self.layers - 1 else self.blocks[layer]

    def _follow(
        self, images: Tensor, layers: Sequence[int], grid: tuple[int, int]
    ) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """Run the model; tokens of each of the layers, pooled features, logits."""
        seen: dict[int, Any] = {}
        with ExitStack() as stack:
            for layer in layers:
                hook = lambda _, __, output, layer=layer: seen.update({layer: output})  # noqa: E731
                stack.enter_context(self._cut(layer).register_forward_hook(hook))
            pooled, logits = self._outputs(images)
        return [self._tokens(seen.get(layer), layer, grid) for layer in layers], pooled, logits

    def _tokens(self, output: Any, layer: int, grid: tuple[int, int]) -> Tensor:
        if output is None:
            raise ValueError(f"layer {layer} did not run; if the model was changed, make its Backbone again")
        tokens: Tensor = output[0] if isinstance(output, tuple) else output
        tokens = tokens.flatten(1, 2) if tokens.ndim == 4 else tokens
        if tokens.shape[1] != grid[0] * grid[1] + self.prefix:
            raise ValueError(
                f"layer {layer} gives {tokens.shape[1]} tokens, but {grid[0]} x {grid[1]} patches and "
                f"{self.prefix} prefix tokens were expected"
            )
        return tokens

    def _outputs(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run the model; pooled features and logits."""
        read: list[Tensor] = []
        with ExitStack() as stack:
            for classifier in self.classifiers:
                stack.enter_context(classifier.register_forward_hook(lambda _, args, __: read.append(args[0])))
            output = (self.run or self.model)(images)
        if not self.classifiers:
            return output, None
        if not read:
            raise ValueError("the classifier did not run; if the model was changed, make its Backbone again")
        return torch.stack(read).mean(0) if len(read) > 1 else read[0], output


def last_linear(head: nn.Module) -> list[nn.Module]:
    """The layer of a head that makes the logits; none for an identity."""
    if hasattr(head, "base_layer"):  # PEFT's, around a linear layer and beside its own
        return [head]
    layers: list[nn.Module] = [layer for layer in head.modules() if isinstance(layer, nn.Linear)]
    return layers[-1:]
