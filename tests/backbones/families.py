"""A tiny model of every family, and what its own library says about its tokens and attention.

References never use `pace`: they run the library's eager attention and read its own hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layer(NamedTuple):
    tokens: Tensor
    attention: Tensor


@dataclass(frozen=True)
class Family:
    """`build` makes the model, `reference` its layers; `logits` reads what the bare model gives, `more` sizes it takes."""

    build: Callable[[], nn.Module]
    reference: Callable[[Any, Tensor], list[Layer]]
    size: tuple[int, int] = (32, 32)
    prefix: int = 1
    has_cls: bool = True
    logits: Callable[[nn.Module, Tensor], Tensor] | None = lambda model, images: model(images)
    more: tuple[tuple[int, int], ...] = field(default=())

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.build()
        with torch.no_grad():  # fresh models attend almost evenly, and some heads are zero: both would hide mistakes
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        return model.eval()

    def images(self, size: tuple[int, int] | None = None, count: int = 2) -> Tensor:
        return torch.randn(count, 3, *(size or self.size), generator=torch.Generator().manual_seed(1))


# timm


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm.models
        from timm.models.deit import VisionTransformerDistilled

        kind = VisionTransformerDistilled if name == "VisionTransformerDistilled" else getattr(timm.models, name)
        size = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 5}
        if "Swin" in name:
            size = {"img_size": 64, "patch_size": 4, "embed_dim": 16, "num_classes": 5, "window_size": 4}
            size |= {"depths": (2, 2), "num_heads": (2, 4)}
        return kind(**size | options)

    return build


def _timm_vit(model: Any, images: Tensor) -> list[Layer]:
    model = _eager_timm(model)
    maps: list[Tensor] = []
    for block in model.blocks:
        block.attn.attn_drop.register_forward_hook(lambda _, args, __: maps.append(args[0]))
    final, layers = model.forward_intermediates(images, return_prefix_tokens=True, output_fmt="NLC")
    tokens = [torch.cat([layer[1], layer[0]], 1) if isinstance(layer, tuple) else layer for layer in layers]
    tokens[-1] = final
    attention = [_cls_row(one) if model.cls_token is not None else one.mean((1, 2)) for one in maps]
    if model.cls_token is None and getattr(model, "attn_pool", None) is not None:
        attention[-1] = _latent_row(model.attn_pool, final)
    return [Layer(*layer) for layer in zip(tokens, attention, strict=True)]


def _eager_timm(model: nn.Module) -> Any:
    model = deepcopy(model)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    return model


def _cls_row(attention: Tensor) -> Tensor:
    return attention[:, :, 0].mean(1)


def _latent_row(pool: Any, tokens: Tensor) -> Tensor:
    """SigLIP's pooling in timm, which keeps its weights to itself: softmax(q kᵀ / √d) of the latent query."""
    heads, dim = pool.num_heads, pool.head_dim
    query = pool.q(pool.latent).view(1, heads, dim)
    key = pool.kv(tokens)[..., : heads * dim].unflatten(-1, (heads, dim))
    scores = torch.einsum("lhd,bjhd->bhj", query, key) / dim**0.5
    return scores.softmax(-1).mean(1)


def _timm_swin(model: Any, images: Tensor) -> list[Layer]:
    model = _eager_timm(model)
    blocks = [block for stage in model.layers for block in stage.blocks]
    return _swin_layers(model, images, blocks, lambda block: block.attn.attn_drop, 0, "norm1", "attn", model.norm)


def _swin_layers(
    model: Any,
    images: Tensor,
    blocks: list[Any],
    weights_of: Callable[[Any], nn.Module],
    part: int,
    norm: str,
    attention: str,
    final: nn.Module,
    **options: Any,
) -> list[Layer]:
    """Attention within windows, put back by following numbered tokens through the library's own partition."""
    maps: list[Tensor] = []
    runs: list[tuple[Tensor, tuple[Any, ...]]] = []
    for block in blocks:
        weights_of(block).register_forward_hook(lambda _, args, output: maps.append(output[1] if part else args[0]))
        block.register_forward_hook(lambda _, args, output: runs.append((_first(output), args)))
    last: list[Tensor] = []
    final.register_forward_hook(lambda _, __, output: last.append(output))
    model(images, **options)
    layers = []
    for block, weights, (tokens, args) in zip(blocks, list(maps), runs, strict=True):
        tokens = last[-1] if block is blocks[-1] else tokens
        tokens = tokens.flatten(1, 2) if tokens.ndim == 4 else tokens
        layers.append(Layer(tokens, _received(weights, _numbered(block, args, norm, attention), tokens.shape[1])))
    return layers


def _numbered(block: Any, args: tuple[Any, ...], norm: str, attention: str) -> Tensor:
    """(windows, places): token numbers from 1, 0 for padding, as the block itself cuts them."""
    block = deepcopy(block)
    setattr(block, norm, nn.Identity())
    seen: list[Tensor] = []

    class Stop(Exception):
        pass

    def stop(_: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args[0])
        raise Stop

    getattr(block, attention).register_forward_pre_hook(stop)
    tokens = args[0][:1]
    count = tokens[0, ..., 0].numel()
    numbers = torch.arange(1.0, count + 1).view(1, *tokens.shape[1:-1], 1).expand_as(tokens)
    with pytest.raises(Stop):
        block(numbers, *args[1:])
    return seen[0][..., 0].long()


def _received(weights: Tensor, places: Tensor, count: int) -> Tensor:
    """Written out as a whole (tokens, tokens) matrix of the image, then averaged over the queries."""
    weights = weights.mean(1).unflatten(0, (-1, len(places)))
    whole = torch.zeros(len(weights), count + 1, count + 1)
    for window, tokens in enumerate(places):
        whole[:, tokens[:, None], tokens[None, :]] = weights[:, window]
    return whole[:, 1:, 1:].mean(1)


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


# transformers


def _hf(name: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        if "Swin" in config:
            settings = {"image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
            settings |= {"window_size": 4, "num_labels": 5}
        else:
            settings = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 3, "num_labels": 5}
            settings |= {"num_attention_heads": 4, "intermediate_size": 64}
        settings |= options
        if config in ("CLIPConfig", "SiglipConfig"):
            text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
            classes = settings.pop("num_labels")
            whole = {"vision_config": settings, "text_config": text | {"vocab_size": 99}, "num_labels": classes}
            return getattr(transformers, name)(getattr(transformers, config)(**whole, projection_dim=24))
        return getattr(transformers, name)(getattr(transformers, config)(**settings))

    return build


def _hf_vit(part: str = "") -> Callable[[Any, Tensor], list[Layer]]:
    """`part` is where the transformer is in a model that has more."""

    def reference(model: Any, images: Tensor) -> list[Layer]:
        model = deepcopy(model)
        model.set_attn_implementation("eager")
        core = model.get_submodule(part)
        options = {} if "dinov2" in core.config.model_type else {"interpolate_pos_encoding": True}
        output = core(images, output_attentions=True, output_hidden_states=True, **options)
        tokens = [*output.hidden_states[1:-1], output.last_hidden_state]
        has_cls = "siglip" not in core.config.model_type
        attention = [_cls_row(one) if has_cls else one.mean((1, 2)) for one in output.attentions]
        if not has_cls and not hasattr(model, "classifier"):
            probe = core.head.probe.expand(len(images), -1, -1)
            attention[-1] = core.head.attention(probe, tokens[-1], tokens[-1], need_weights=True)[1][:, 0]
        return [Layer(*layer) for layer in zip(tokens, attention, strict=True)]

    return reference


def _hf_swin(part: str) -> Callable[[Any, Tensor], list[Layer]]:
    def reference(model: Any, images: Tensor) -> list[Layer]:
        model = deepcopy(model)
        model.set_attn_implementation("eager")
        core = model.get_submodule(part)
        blocks = [block for stage in core.encoder.layers for block in stage.blocks]
        # The first version norms before it cuts windows, the second after.
        norm = "layernorm_before" if core.config.model_type == "swin" else "drop_path"
        return _swin_layers(
            core,
            images,
            blocks,
            lambda block: block.attention,
            1,
            norm,
            "attention",
            core.layernorm,
            output_attentions=True,
        )

    return reference


def _hf_logits(model: nn.Module, images: Tensor) -> Tensor:
    return model(images).logits


# torchvision


def _torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import torchvision.models as models
        from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

        if name == "VisionTransformer":
            return models.VisionTransformer(32, 8, 3, 4, 32, 64, num_classes=5, **options)
        second = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2} if name.endswith("2") else {}
        return models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=5, **second)

    return build


def _multi_head_vit(blocks: str, attention: str, final: str) -> Callable[[Any, Tensor], list[Layer]]:
    """Blocks around nn.MultiheadAttention, asked for its weights."""

    def reference(model: Any, images: Tensor) -> list[Layer]:
        model = deepcopy(getattr(model, "visual", model))
        layers: list[Layer] = []

        def record(block: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
            x = block.ln_1(args[0])
            weights = getattr(block, attention)(x, x, x, need_weights=True, average_attn_weights=False)[1]
            layers.append(Layer(output, _cls_row(weights)))

        for block in model.get_submodule(blocks):
            block.register_forward_hook(record)
        last: list[Tensor] = []
        model.get_submodule(final).register_forward_hook(lambda _, __, output: last.append(output))
        model(images)
        return [*layers[:-1], Layer(last[-1] if last[-1].ndim == 3 else layers[-1].tokens, layers[-1].attention)]

    return reference


def _torchvision_swin(model: Any, images: Tensor) -> list[Layer]:
    """torchvision cuts windows inside a function: its softmax is recorded, and its padding, roll and cut repeated."""
    model = deepcopy(model)
    maps: list[Tensor] = []
    softmax = F.softmax
    blocks = [block for stage in model.features[1::2] for block in stage]
    outputs: list[Tensor] = []
    for block in blocks:
        block.register_forward_hook(lambda _, __, output: outputs.append(output))
    model.norm.register_forward_hook(lambda _, __, output: outputs.append(output))
    with mock.patch.object(F, "softmax", lambda *args, **kwargs: (maps.append(softmax(*args, **kwargs)), maps[-1])[1]):
        model(images)
    outputs = [*outputs[:-2], outputs[-1]]
    layers = []
    for block, tokens, weights in zip(blocks, outputs, maps, strict=True):
        _, rows, columns, _ = tokens.shape
        height, width = block.attn.window_size
        numbers = torch.arange(1, rows * columns + 1).view(rows, columns)
        numbers = F.pad(numbers, (0, -columns % width, 0, -rows % height))
        shift = [0 if block.attn.window_size[i] >= numbers.shape[i] else block.attn.shift_size[i] for i in (0, 1)]
        numbers = torch.roll(numbers, (-shift[0], -shift[1]), (0, 1))
        cut = numbers.view(numbers.shape[0] // height, height, numbers.shape[1] // width, width)
        places = cut.permute(0, 2, 1, 3).reshape(-1, height * width)
        layers.append(Layer(tokens.flatten(1, 2), _received(weights, places, rows * columns)))
    return layers


# open_clip


def _open_clip(timm_model: str | None = None, **vision: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from open_clip.model import CLIP

        text = {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 1}
        model = CLIP(24, {"layers": 3, "width": 32, "head_width": 8, "patch_size": 8, "image_size": 32} | vision, text)
        if timm_model:
            from open_clip.timm_model import TimmModel

            model.visual = TimmModel("vit_tiny_patch16_224", embed_dim=24, pool="", proj="linear")
            model.visual.trunk = _timm(timm_model, num_classes=0)()
            model.visual.head = nn.Sequential(nn.Linear(32, 24))
            model.visual.image_size = (32, 32)
        return model

    return build


SWIN: dict[str, Any] = {"size": (64, 64), "prefix": 0, "has_cls": False}
PATCHES: dict[str, Any] = {"prefix": 0, "has_cls": False}
HF: dict[str, Any] = {"logits": _hf_logits, "more": ((48, 64),)}
BARE: dict[str, Any] = {"logits": None, "more": ((48, 64),)}

FAMILIES: dict[str, Family] = {
    "timm-vit": Family(_timm("VisionTransformer"), _timm_vit),
    "timm-vit-dynamic": Family(_timm("VisionTransformer", dynamic_img_size=True), _timm_vit, more=((48, 64),)),
    "timm-vit-no-cls": Family(_timm("VisionTransformer", class_token=False, global_pool="avg"), _timm_vit, **PATCHES),
    "timm-registers-no-cls": Family(
        _timm("VisionTransformer", class_token=False, reg_tokens=4, global_pool="avg"),
        _timm_vit,
        prefix=4,
        has_cls=False,
    ),
    "timm-clip": Family(_timm("VisionTransformer", pre_norm=True, num_classes=0), _timm_vit, logits=None),
    "timm-deit-distilled": Family(_timm("VisionTransformerDistilled"), _timm_vit, prefix=2),
    "timm-dinov2-registers": Family(
        _timm("VisionTransformer", reg_tokens=4, init_values=0.5, no_embed_class=True), _timm_vit, prefix=5
    ),
    "timm-siglip": Family(_timm("VisionTransformer", class_token=False, global_pool="map"), _timm_vit, **PATCHES),
    "timm-eva": Family(
        _timm("Eva", use_rot_pos_emb=True, qkv_fused=False, swiglu_mlp=True, dynamic_img_size=True),
        _timm_vit,
        more=((48, 64),),
    ),
    "timm-beit": Family(
        _timm("Beit", use_rel_pos_bias=True, use_abs_pos_emb=False, init_values=0.5, global_pool="token"), _timm_vit
    ),
    "timm-swin": Family(_timm("SwinTransformer"), _timm_swin, **SWIN),
    "timm-swin-dynamic": Family(
        _timm("SwinTransformer", strict_img_size=False), _timm_swin, **SWIN, more=((72, 56), (56, 88))
    ),
    "timm-swin2": Family(_timm("SwinTransformerV2"), lambda m, x: _timm_swin2(m, x), **SWIN),
    "hf-vit": Family(_hf("ViTForImageClassification", "ViTConfig"), _hf_vit("vit"), **HF),
    "hf-deit-teacher": Family(
        _hf("DeiTForImageClassificationWithTeacher", "DeiTConfig"), _hf_vit("deit"), prefix=2, **HF
    ),
    "hf-dinov2": Family(_hf("Dinov2ForImageClassification", "Dinov2Config"), _hf_vit("dinov2"), **HF),
    "hf-dinov2-registers": Family(
        _hf("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig"),
        _hf_vit("dinov2_with_registers"),
        prefix=5,
        **HF,
    ),
    "hf-clip-projection": Family(
        _hf("CLIPVisionModelWithProjection", "CLIPVisionConfig"), _hf_vit("vision_model"), **BARE
    ),
    "hf-clip": Family(_hf("CLIPModel", "CLIPConfig"), _hf_vit("vision_model"), **BARE),
    "hf-clip-classifier": Family(_hf("CLIPForImageClassification", "CLIPConfig"), _hf_vit("vision_model"), **HF),
    "hf-siglip": Family(_hf("SiglipVisionModel", "SiglipVisionConfig"), _hf_vit(), **PATCHES, **BARE),
    "hf-siglip-classifier": Family(
        _hf("SiglipForImageClassification", "SiglipConfig"), _hf_vit("vision_model"), **PATCHES, **HF
    ),
    "hf-beit": Family(
        _hf("BeitForImageClassification", "BeitConfig", use_relative_position_bias=True), _hf_vit("beit"), **HF
    ),
    "hf-beit-shared-bias": Family(
        _hf("BeitModel", "BeitConfig", use_shared_relative_position_bias=True, use_mean_pooling=False),
        _hf_vit(),
        **BARE,
    ),
    "hf-swin": Family(
        _hf("SwinForImageClassification", "SwinConfig"),
        _hf_swin("swin"),
        **SWIN,
        logits=_hf_logits,
        more=((72, 56), (50, 90)),
    ),
    "hf-swin2": Family(
        _hf("Swinv2ForImageClassification", "Swinv2Config"),
        _hf_swin("swinv2"),
        **SWIN,
        logits=_hf_logits,
        more=((72, 56),),
    ),
    "torchvision-vit": Family(
        _torchvision("VisionTransformer"), _multi_head_vit("encoder.layers", "self_attention", "encoder.ln")
    ),
    "torchvision-swin": Family(_torchvision("Swin"), _torchvision_swin, **SWIN, more=((72, 56), (16, 90))),
    "torchvision-swin2": Family(_torchvision("Swin2"), _torchvision_swin, **SWIN, more=((72, 56),)),
    "open_clip-vit": Family(_open_clip(), _multi_head_vit("transformer.resblocks", "attn", "ln_post"), logits=None),
    "open_clip-vit-norm-last": Family(
        _open_clip(final_ln_after_pool=True), _multi_head_vit("transformer.resblocks", "attn", "ln_post"), logits=None
    ),
    "open_clip-timm": Family(
        _open_clip("VisionTransformer"), lambda model, images: _timm_vit(model.visual.trunk, images), logits=None
    ),
}


def _timm_swin2(model: Any, images: Tensor) -> list[Layer]:
    model = deepcopy(model)
    blocks = [block for stage in model.layers for block in stage.blocks]
    return _swin_layers(model, images, blocks, lambda block: block.attn.attn_drop, 0, "drop_path1", "attn", model.norm)
