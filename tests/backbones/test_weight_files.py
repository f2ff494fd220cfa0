"""Files of weights as people have them: what is around the weights, what they are recognised as, what is refused."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pace.backbones import Backbone, Tower, load
from pace.backbones.find import describe
from pace.backbones.from_weights import is_torchvision, recognise

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def tiny() -> nn.Module:
    import timm

    torch.manual_seed(0)
    return timm.create_model("test_vit", img_size=32, num_classes=3).eval()


def _below(prefix: str, weights: Weights) -> Weights:
    return {prefix + name: value for name, value in weights.items()}


def _zeros(weights: Weights) -> Weights:
    return {name: torch.zeros_like(value) for name, value in weights.items()}


WRAPPINGS: dict[str, Callable[[Weights], Any]] = {
    "bare.pt": lambda w: w,
    "parallel.pth": lambda w: _below("module.", w),
    "compiled.bin": lambda w: {"model": _below("_orig_mod.", w), "optimizer": {"state": {}}},
    "compiled-block.pt": lambda w: {name.replace("blocks.0.", "blocks.0._orig_mod."): v for name, v in w.items()},
    "lightning.ckpt": lambda w: {
        "state_dict": _below("model._orig_mod.", w) | {"loss.weight": torch.ones(3)},
        "hyper_parameters": {"lr": 0.1},
        "epoch": 3,
    },
    "timm-average.pth": lambda w: {
        "state_dict": _zeros(w),
        "state_dict_ema": _below("module.", w),
        "args": argparse.Namespace(model="any"),
    },
    "average-beside.ckpt": lambda w: {"state_dict": _below("net.", _zeros(w)) | _below("ema_net.module.", w)},
    "dino-training.pth": lambda w: {
        "student": _below("module.backbone.", _zeros(w)),
        "teacher": _below("backbone.", w) | {"head.mlp.0.weight": torch.ones(2, 2)},
    },
}


@pytest.mark.parametrize("name", WRAPPINGS)
def test_weights_are_found_in_what_was_saved_around_them(name: str, tmp_path: Path, tiny: nn.Module) -> None:
    torch.save(WRAPPINGS[name](tiny.state_dict()), tmp_path / name)
    found = load(tmp_path / name, model="test_vit", img_size=32)
    images = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(found(images), tiny(images))
    assert found.pretrained_cfg["state_dict"] is None, "no second copy stays in memory"


def _shapes(name: str, **options: Any) -> dict[str, tuple[int, ...]]:
    import timm

    with torch.device("meta"):
        model = timm.create_model(name, **options)
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("vit_tiny_patch16_224", 224),
        ("vit_base_patch32_224", 384),
        ("vit_small_patch14_dinov2", 518),
        ("vit_small_patch14_reg4_dinov2", 224),
        ("deit_tiny_distilled_patch16_224", 224),
        ("deit3_small_patch16_224", 224),
        ("vit_base_patch16_clip_224", 224),
    ],
)
def test_architectures_are_recognised_with_the_size_their_positions_have(name: str, size: int) -> None:
    assert recognise(_shapes(name, img_size=size), Path("x.pth")) == (name, size)


def test_the_original_dinov2_is_recognised_and_what_is_not_known_is_not_guessed() -> None:
    shapes = _shapes("vit_small_patch14_reg4_dinov2", img_size=28)
    original = {key: shape for key, shape in shapes.items() if key not in ("reg_token", "pos_embed")}
    original |= {"register_tokens": (1, 4, 384), "pos_embed": (1, 5, 384), "mask_token": (1, 384)}
    assert recognise(original, Path("x.pth")) == ("vit_small_patch14_reg4_dinov2", 28)
    for unknown in (_shapes("test_vit"), _shapes("beit_base_patch16_224"), _shapes("vit_small_patch16_dinov3"), {}):
        with pytest.raises(ValueError, match=r"x\.pth: which architecture is this\?"):
            recognise(unknown, Path("x.pth"))


def test_an_mae_checkpoint_is_loaded_without_being_told_what_it_is(tmp_path: Path) -> None:
    import timm

    encoder = timm.create_model("vit_tiny_patch16_224", num_classes=0).eval()
    width = {"mask_token": torch.ones(1, 1, 192), "decoder_pos_embed": torch.ones(1, 197, 8)}
    torch.save({"model": encoder.state_dict() | width}, tmp_path / "mae.pth")
    found = load(tmp_path / "mae.pth")
    images = torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(found(images), encoder(images))
    assert Backbone(found).preprocessing.mean == (0.485, 0.456, 0.406), "not timm's own -1 to 1"
    smaller = Backbone(load(tmp_path / "mae.pth", img_size=64, normalize="half"))
    assert (smaller.grid(64, 64), smaller.preprocessing.mean) == ((4, 4), (0.5, 0.5, 0.5))


@pytest.mark.parametrize("classes", [None, 5])
def test_torchvisions_vit_from_a_file(classes: int | None, tmp_path: Path) -> None:
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    model = VisionTransformer(64, 32, 1, 12, 768, 32, num_classes=classes or 2).eval()
    nn.init.normal_(model.heads.head.weight)
    if classes is None:
        model.heads = nn.Sequential()
    torch.save(_below("module.", model.state_dict()), tmp_path / "vit.pth")
    found, images = load(tmp_path / "vit.pth"), torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(found(images), model(images))
    predictions = Backbone(found)(images).predictions
    assert (None if predictions is None else predictions.shape[1]) == classes
    larger = Backbone(load(tmp_path / "vit.pth", img_size=96, normalize="clip"))
    assert larger(torch.randn(1, 3, 96, 96)).embeddings.shape == (1, 9, 768)
    assert larger.preprocessing.mean[0] == 0.48145466
    narrow = {"conv_proj.weight": torch.ones(32, 3, 8, 8)}
    torch.save(narrow, tmp_path / "narrow.pth")
    with pytest.raises(ValueError, match="d = 32, and weights do not tell its number of heads"):
        load(tmp_path / "narrow.pth")


def test_torchvisions_models_by_name_are_prepared_for_as_their_published_weights_say() -> None:
    assert is_torchvision("vit_b_16")
    assert not is_torchvision("resnet50")
    with torch.device("meta"):
        model = load("swin_t", pretrained=False)
    tower = describe(model)
    assert isinstance(tower, Tower)
    assert (tower.preprocessing.crop_ratio, tower.preprocessing.interpolation) == (224 / 232, "bicubic")
    assert model.pretrained_cfg["label_names"][0] == "tench"


@pytest.mark.parametrize("openai", [False, True])
def test_a_whole_clip_is_recognised_and_keeps_its_texts(openai: bool, tmp_path: Path) -> None:
    from open_clip.model import CLIP

    vision = {"layers": 1, "width": 64, "head_width": 64, "patch_size": 16, "image_size": 32}
    text = {"layers": 1, "width": 64, "heads": 1, "vocab_size": 49408, "context_length": 77}
    torch.manual_seed(0)
    clip = CLIP(8, vision, text, quick_gelu=openai).eval()
    marks = {"input_resolution": torch.tensor(32)} if openai else {}
    torch.save({"state_dict": _below("module.", clip.state_dict() | marks)}, tmp_path / "clip.pt")
    found, images = load(tmp_path / "clip.pt"), torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(Backbone(found).pooled(images), clip.encode_image(images).detach())
    texts = torch.randint(1, 1000, (3, 77))
    torch.testing.assert_close(found.encode_text(texts), clip.encode_text(texts))
    assert Backbone(load(tmp_path / "clip.pt", img_size=64)).grid(64, 64) == (4, 4)
    tower = {name: value for name, value in clip.state_dict().items() if name.startswith("visual.")}
    torch.save(tower, tmp_path / "tower.pt")
    with pytest.raises(ValueError, match="only the image tower of a CLIP: save the whole model"):
        load(tmp_path / "tower.pt")


def test_what_is_more_than_weights_is_refused_with_what_would_do(tmp_path: Path, tiny: nn.Module) -> None:
    file = tmp_path / "it.pt"

    def refused(content: Any, says: str) -> None:
        torch.save(content, file)
        with pytest.raises(ValueError, match=says) as caught:
            load(file)
        assert str(caught.value).startswith(str(file))
        assert "\n" not in str(caught.value)

    refused(tiny, r"more than weights \(timm\.\S+, .*torch.save\(model.state_dict\(\)")
    refused({"state_dict": tiny.state_dict(), "config": Path("x")}, "more than weights")
    refused({"blocks.0.attn.qkv.lora_A.weight": torch.ones(1)}, "LoRA weights; save the model that .*merge_and_unload")
    refused({"vit.embeddings.patch_embeddings.projection.weight": torch.ones(1)}, "the folder that has its config.json")
    refused({"epoch": 3}, "no weights found in it")
    refused([1, 2], "no weights found in it")
    torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)).save(str(file))
    with pytest.raises(ValueError, match="a TorchScript archive can run code"):
        load(file)


def test_the_weights_of_a_convolutional_network_are_told_as_such(tmp_path: Path) -> None:
    layers = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1), nn.Linear(4, 2)
    )
    torch.save(layers.state_dict(), tmp_path / "net.pth")
    for named in ({}, {"model": "resnet18"}):
        with pytest.raises(ValueError, match=r"net.pth: the weights of a convolutional network, .* DINOv2 would serve"):
            load(tmp_path / "net.pth", **named)


def test_weights_that_do_not_fit_are_counted_in_one_line(tmp_path: Path, tiny: nn.Module) -> None:
    weights = {name: value for name, value in tiny.state_dict().items() if name != "norm.bias"}
    torch.save(weights | {"extra": torch.ones(1), "norm.weight": torch.ones(7)}, tmp_path / "it.pt")
    with pytest.raises(ValueError, match="not the weights of test_vit: ") as caught:
        load(tmp_path / "it.pt", model="test_vit", img_size=32)
    says = "1 of another shape (norm.weight is 7, expected 64), 1 missing (norm.bias), 1 left over (extra)"
    assert str(caught.value).endswith(says)
