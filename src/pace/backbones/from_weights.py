"""A model from the weights in a file: recognised by their names and shapes, then made by the library it is of."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pace.backbones.find import CONVOLUTIONAL
from pace.backbones.preprocessing import NORMALIZATIONS, Channels
from pace.backbones.weight_files import CLIP, TIMM, TORCHVISION, Weights, read_weights

_SIZES = {(192, 12): "tiny", (384, 12): "small", (512, 12): "medium", (768, 12): "base"}  # by d and depth
_SIZES |= {(1024, 24): "large", (1280, 32): "huge", (1536, 40): "giant"}
_HEAD_WIDTHS = {1280: 80, 1408: 88, 1664: 104}  # of an attention head, by d; else 64
_NAME_IT = "name it, as in --architecture vit_base_patch16_224 (in Python, model=)"


def load_weights(path: Path, architecture: str | None, options: dict[str, Any]) -> Any:
    """The model that a file's weights make. `options` are those of the library's constructor; ``img_size`` resizes
    position embeddings."""
    weights, place, notes = read_weights(path)
    if _is_convolutional(weights):
        raise ValueError(f"{path}: the weights of {CONVOLUTIONAL}")
    size, what = options.get("img_size"), architecture
    try:
        if CLIP in weights and (architecture is None or architecture in import_module("open_clip").list_models()):
            what = what or "a CLIP of open_clip"
            return _clip(weights, architecture, size)
        if TORCHVISION in weights and (architecture is None or is_torchvision(architecture)):
            what = what or "a VisionTransformer of torchvision"
            return torchvision_vit(weights, size)
        if architecture is not None:
            return _timm(weights, known(architecture), options, _normalization(notes))
        what, native = recognise({name: tuple(value.shape) for name, value in weights.items()}, path)
        # DINO, MAE and DeiT use the names of timm's own ViT, whose pixels go from -1 to 1.
        imagenet = what.startswith("vit_") and what.endswith("_224") and "clip" not in what
        imagenet &= place == "model" or "head.weight" not in weights
        usual = NORMALIZATIONS["imagenet"] if imagenet else None
        return _timm(weights, what, {"img_size": native} | options, _normalization(notes) or usual)
    except RuntimeError as error:
        hint = "" if architecture else f"; if it is another, {_NAME_IT}"
        raise ValueError(f"{path}: not the weights of {what}: {misfit(error)}{hint}") from error


def _is_convolutional(weights: Weights) -> bool:
    attends = any(name.startswith("attn") or ".attn" in name or "attention" in name for name in weights)
    return not attends and sum(value.ndim == 4 for value in weights.values()) > 2


def _normalization(notes: dict[str, Any]) -> tuple[Channels, Channels] | None:
    """As `finetune` noted it."""
    noted = notes.get("preprocessing")
    return (tuple(noted["mean"]), tuple(noted["std"])) if noted else None


def misfit(error: RuntimeError) -> str:
    """In one line what `load_state_dict` says on many: how many weights do not fit, with one example of each kind."""
    text, parts = str(error), []
    sizes = re.findall(r"size mismatch for (\S+): .*?\[(.*?)\].*?\[(.*?)\]", text, re.S)
    if sizes:
        name, has, needs = sizes[0]
        parts.append(f"{len(sizes)} of another shape ({name} is {has}, expected {needs})")
    for kind, word in (("Missing", "missing"), ("Unexpected", "left over")):
        if found := re.search(rf"{kind} key\(s\) in state_dict: (.*)", text):
            names = re.findall(r'"(.*?)"', found[1])
            parts.append(f"{len(names)} {word} ({names[0]})")
    return ", ".join(parts) or " ".join(text.split())[:300]


# timm, and what shares its names.


def recognise(shapes: Mapping[str, tuple[int, ...]], path: Path) -> tuple[str, int]:
    """timm's name for a vision transformer by the names and shapes of its weights, and the image size it has now."""
    depth = len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})
    width, _, patch, *_ = (*shapes.get(TIMM, ()), 0, 0, 0)
    size, positions = _SIZES.get((width, depth)), shapes.get("pos_embed", (1, 0, 0))[1]
    before = next((n for n in (0, 1, 2) if math.isqrt(max(positions - n, 0)) ** 2 == positions - n), positions)
    side = math.isqrt(positions - before)
    if "reg_token" in shapes or "register_tokens" in shapes:
        name = f"vit_{size}_patch{patch}_reg4_dinov2"
    elif {"blocks.0.ls1.gamma", "blocks.0.gamma_1"} & shapes.keys():
        name = f"vit_{size}_patch{patch}_dinov2" if before else f"deit3_{size}_patch{patch}_224"
    elif "dist_token" in shapes:
        name = f"deit_{size}_distilled_patch{patch}_224"
    else:
        name = f"vit_{size}_patch{patch}{'_clip' if 'norm_pre.weight' in shapes else ''}_224"
    if size is None or not side or not import_module("timm").is_model(name):
        raise ValueError(f"{path}: which architecture is this? Its weights do not tell; {_NAME_IT}")
    return name, side * patch


def known(name: str) -> str:
    """A name that timm has."""
    timm = import_module("timm")
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), 3)
        raise ValueError(f"{name}: timm has no such model" + (f"; did you mean {', '.join(near)}?" if near else ""))
    return name


def _timm(weights: Weights, name: str, options: dict[str, Any], normalization: tuple[Channels, Channels] | None) -> Any:
    no_use: tuple[str, ...] = ("decoder", "mask_token") if "decoder_pos_embed" in weights else ()  # MAE's other half
    no_use += ("visual.proj",) if CLIP in weights else ()
    weights = {key: value for key, value in weights.items() if not key.startswith(no_use)}
    classes = next((len(weights[key]) for key in ("head.weight", "head.fc.weight") if key in weights), 0)
    overlay: dict[str, Any] = {"state_dict": weights, "custom_load": False, "num_classes": classes}
    if normalization is not None:
        overlay |= dict(zip(("mean", "std"), normalization, strict=True))
    pool = {"global_pool": "avg"} if "fc_norm.weight" in weights and "norm.weight" not in weights else {}
    how = {"pretrained": True, "num_classes": classes, "pretrained_cfg_overlay": overlay}
    # timm's own loading translates names, and resizes position and patch embeddings.
    model = import_module("timm").create_model(name, **how | pool | options)
    model.pretrained_cfg["state_dict"] = None  # else the weights would stay in memory twice
    return model


def _resized(positions: Tensor, patch: int, size: Any) -> tuple[Tensor, int]:
    """Position embeddings (CLS and a square of patches, d) for another image size, as timm does it; and that size."""
    side = math.isqrt(len(positions) - 1)
    size = side * patch if size is None else size
    if not isinstance(size, int) or size % patch:
        raise ValueError(f"img_size: expected a multiple of the patch size, {patch}; found {size}")
    resample = import_module("timm.layers").resample_abs_pos_embed
    return resample(positions[None], [size // patch] * 2, num_prefix_tokens=1)[0], size


def _depth(weights: Weights, blocks: str) -> int:
    return len({name.removeprefix(blocks).split(".")[0] for name in weights if name.startswith(blocks)})


# torchvision.


def is_torchvision(name: str) -> bool:
    return name in import_module("torchvision").models.list_models(include=["vit_?_*", "swin_*"])


def torchvision_vit(weights: Weights, size: Any = None) -> Any:
    width, _, patch, _ = weights[TORCHVISION].shape
    if width not in (768, 1024, 1280):  # any number of heads would fit its shapes
        raise ValueError(
            f"a VisionTransformer of torchvision with d = {width}, and weights do not tell its number of heads; "
            "load them into the model in Python, and pass that to Backbone"
        )
    positions, size = _resized(weights["encoder.pos_embedding"][0], patch, size)
    linear = [value for name, value in weights.items() if ".mlp." in name and value.ndim == 2]
    classifier = [value for name, value in weights.items() if name.startswith("heads.") and value.ndim == 2]
    model = import_module("torchvision").models.VisionTransformer(
        size,
        patch,
        num_layers=_depth(weights, "encoder.layers."),
        num_heads=width // _HEAD_WIDTHS.get(width, 64),
        hidden_dim=width,
        mlp_dim=len(linear[0]),
        num_classes=len(classifier[-1]) if classifier else 1,
        representation_size=len(classifier[0]) if len(classifier) > 1 else None,
    )
    if not classifier:
        model.heads = nn.Sequential()
    model.load_state_dict(weights | {"encoder.pos_embedding": positions[None]})
    return model


# CLIP, of OpenAI and open_clip, with its texts.


def _clip(weights: Weights, name: str | None, size: Any) -> Any:
    library = import_module("open_clip.model")
    # Not to be seen in weights: OpenAI's models have another GELU. Their own files have such entries.
    config: Any = import_module("open_clip").get_model_config(name) if name else {}
    quick = config.get("quick_gelu", "input_resolution" in weights)
    about = ("input_resolution", "context_length", "vocab_size")
    weights = {key: value.float() for key, value in weights.items() if key not in about}
    if "text_projection" not in weights:
        raise ValueError(f"only the image tower of a CLIP: save the whole model, or {_NAME_IT}")
    width, _, patch, _ = weights["visual.conv1.weight"].shape
    positions, size = _resized(weights["visual.positional_embedding"], patch, size)
    context, text_width = weights["positional_embedding"].shape
    vision = library.CLIPVisionCfg(
        layers=_depth(weights, "visual.transformer.resblocks."),
        width=width,
        head_width=min(width, _HEAD_WIDTHS.get(width, 64)),
        mlp_ratio=len(weights["visual.transformer.resblocks.0.mlp.c_fc.weight"]) / width,
        patch_size=patch,
        image_size=size,
    )
    text = library.CLIPTextCfg(
        context_length=context,
        vocab_size=len(weights["token_embedding.weight"]),
        width=text_width,
        heads=max(1, text_width // 64),
        layers=_depth(weights, "transformer.resblocks."),
    )
    model = library.CLIP(weights["text_projection"].shape[1], vision, text, quick_gelu=quick)
    model.load_state_dict(weights | {"visual.positional_embedding": positions})
    return model
