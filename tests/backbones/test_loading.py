"""Local files only: nothing here touches the network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from safetensors.torch import save_file

from pace.backbones import Backbone, load

SHARED = Path(__file__).parents[2].parent / "shared" / "weights" / "dinov2_vits14_reg4_fp16.safetensors"


@pytest.fixture
def tiny() -> torch.nn.Module:
    import timm

    torch.manual_seed(0)
    return timm.create_model("test_vit", num_classes=5).eval()


def test_weights_in_a_file_make_the_model_they_came_from(tmp_path: Path, tiny: torch.nn.Module) -> None:
    save_file(tiny.state_dict(), tmp_path / "tiny.safetensors")
    found = load(tmp_path / "tiny.safetensors", model="test_vit")
    images = torch.randn(2, 3, 160, 160)
    torch.testing.assert_close(found(images), tiny(images))
    assert not found.training


def test_weights_without_a_classifier_make_a_model_without_one(tmp_path: Path, tiny: torch.nn.Module) -> None:
    bare = {name: weight for name, weight in tiny.state_dict().items() if not name.startswith("head.")}
    save_file(bare, tmp_path / "tiny.safetensors")
    found = load(tmp_path / "tiny.safetensors", model="test_vit")
    assert Backbone(found)(torch.randn(1, 3, 160, 160)).predictions is None


def test_the_normalisation_is_that_of_the_weights_or_as_told(tmp_path: Path, tiny: torch.nn.Module) -> None:
    file = tmp_path / "tiny.safetensors"
    save_file(tiny.state_dict(), file)
    assert Backbone(load(file, model="test_vit", normalize="half")).preprocessing.mean == (0.5, 0.5, 0.5)
    usual = Backbone(load(file, model="test_vit")).preprocessing
    assert usual == Backbone(tiny).preprocessing  # one model's setting is not another's
    trained_with = {"preprocessing": {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}}
    save_file(tiny.state_dict(), file, {"pace": json.dumps(trained_with)})
    found = Backbone(load(file, model="test_vit")).preprocessing
    assert (found.mean, found.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    with pytest.raises(ValueError, match="normalize: expected imagenet, half, clip; found none"):
        load(file, model="test_vit", normalize="none")


def test_positions_are_resampled_to_the_size_asked_for(tmp_path: Path, tiny: torch.nn.Module) -> None:
    save_file(tiny.state_dict(), tmp_path / "tiny.safetensors")
    found = load(tmp_path / "tiny.safetensors", model="test_vit", img_size=(96, 64))
    backbone = Backbone(found)
    assert backbone.preprocessing.size == (96, 64)
    assert backbone.grid(96, 64) == (6, 4)
    assert backbone(torch.randn(1, 3, 96, 64)).embeddings.shape == (1, 24, backbone.dim)


def test_a_transformers_folder_keeps_its_classifier_and_its_preprocessing(tmp_path: Path) -> None:
    family = FAMILIES["hf-dinov2"]
    model = family.model()
    model.save_pretrained(tmp_path)
    settings = {"size": {"shortest_edge": 64}, "do_center_crop": True, "crop_size": {"height": 48, "width": 48}}
    settings |= {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    found = load(tmp_path)
    torch.testing.assert_close(found(family.images()).logits, model(family.images()).logits)
    preprocessing = Backbone(found).preprocessing
    assert preprocessing.size == (48, 48)
    assert (preprocessing.mean, preprocessing.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert (preprocessing.interpolation, preprocessing.crop_ratio) == ("bilinear", 0.75)


def test_a_timm_folder(tmp_path: Path, tiny: torch.nn.Module) -> None:
    save_file(tiny.state_dict(), tmp_path / "model.safetensors")
    config = {
        "architecture": "test_vit",
        "num_classes": 5,
        "pretrained_cfg": {"input_size": [3, 160, 160], "fixed_input_size": True},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    images = torch.randn(1, 3, 160, 160)
    found = load(tmp_path)
    torch.testing.assert_close(found(images), tiny(images))
    assert Backbone(found).preprocessing.size == (160, 160)


def test_what_cannot_be_loaded_says_why(tmp_path: Path, tiny: torch.nn.Module) -> None:
    path = tmp_path / "tiny.safetensors"
    save_file(tiny.state_dict(), path)
    with pytest.raises(ValueError, match=r"which architecture is this\? .*\(in Python, model=\)"):
        load(path)
    with pytest.raises(ValueError, match="tests_vit: timm has no such model; did you mean test_vit"):
        load(path, model="tests_vit")
    with pytest.raises(ValueError, match=r"tiny.safetensors: not the weights of vit_tiny_patch16_224") as caught:
        load(path, model="vit_tiny_patch16_224")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="timm has no such model"):
        load("vit_no_such_thing")
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        load(tmp_path / "elsewhere.safetensors")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load(tmp_path)
    (tmp_path / "model.pth").write_bytes(b"")
    with pytest.raises(ValueError, match=r"model\.pth: not a file of PyTorch, or a damaged one"):
        load(tmp_path / "model.pth", model="test_vit")


@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/weights")
def test_real_dinov2_weights_at_another_size() -> None:
    """Stored in float16 for 37 x 37 patches, loaded in float32 for 16 x 16."""
    model = load(SHARED, img_size=224)  # recognised
    assert model.pretrained_cfg["architecture"] == "vit_small_patch14_reg4_dinov2"
    backbone = Backbone(model)
    found = backbone(torch.randn(1, 3, 224, 224))
    assert backbone.grid(224, 224) == (16, 16)
    assert found.embeddings.shape == (1, 256, 384)
    assert found.embeddings.dtype == torch.float32
    assert 0 < found.attention.sum() < 1, "CLS and registers take their share"
    assert found.predictions is None
    assert backbone.preprocessing.mean == (0.485, 0.456, 0.406)
