"""Fine-tuning: it learns, goes on after a kill as if nothing had happened, and leaves files that can be loaded."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from pace.backbones import Backbone, batches, checkpoints, finetune, load, load_finetuned, training
from pace.backbones.augmentation import Augmentation
from pace.backbones.finetuning import split_off
from pace.backbones.libraries import describe_tower
from pace.images import Color, ImageSet

timm = pytest.importorskip("timm")
pytest.importorskip("kornia")

SETTINGS: dict[str, Any] = {"epochs": 3, "batch_size": 16, "lr": 2e-3, "progress": False}


def tiny(seed: int = 0, classes: int = 5) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(seed)
    return VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=classes, drop_path_rate=0.1
    )


@pytest.fixture(scope="module")
def images() -> ImageSet:
    return Color("train", n_per_class=40, size=32)  # 64 images of two classes


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_it_learns_two_classes_of_colours(images: ImageSet) -> None:
    result = finetune(tiny(), images, **{**SETTINGS, "epochs": 6})
    assert result.accuracy == 1.0
    assert result.history[-1].train_loss < result.history[0].train_loss
    assert result.class_names == ("red/yellow", "green/blue")
    assert not result.model.training
    backbone = Backbone(result.model)
    test = Color("test", n_per_class=40, size=32)
    predictions = backbone.observe(test).predictions
    assert predictions is not None
    assert (predictions.argmax(1).numpy() == test.labels).mean() == 1.0


def test_the_same_call_gives_the_same_weights_and_leaves_the_global_generator_alone(images: ImageSet) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    one = finetune(tiny(), images, **SETTINGS)
    model = tiny()
    torch.manual_seed(5)
    other = finetune(model, images, **SETTINGS)
    assert torch.equal(torch.rand(3), expected)
    assert equal(weights(one.model), weights(other.model))
    assert one.history == other.history
    assert other.model is model


class Stop(Exception):
    pass


@pytest.mark.parametrize("where", ["weights 0", "state 0", "training 2", "end"])
def test_stopped_anywhere_it_goes_on_to_the_same_bits(
    images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    # Every epoch improves, so that both files are written after each.
    monkeypatch.setattr(training.Trainer, "evaluate", lambda run, *_: (1.0, run.step / 100))
    whole = finetune(tiny(), images, checkpoint=tmp_path / "whole.safetensors", **SETTINGS)
    path = tmp_path / "parts.safetensors"
    events: list[str] = []

    def event(name: str) -> None:
        if f"{name} {events.count(name)}" == where or (where, name, events.count(name)) == ("end", "weights", 3):
            raise Stop
        events.append(name)

    real_train, real_write = training.Trainer.run_epoch, checkpoints.write_atomically

    def train(*arguments: Any) -> float:
        event("training")
        return real_train(*arguments)

    def write(target: Path, data: bytes) -> None:
        event("state" if ".resume" in target.name else "weights")
        real_write(target, data)

    with monkeypatch.context() as patch:
        patch.setattr(training.Trainer, "run_epoch", train)
        patch.setattr(checkpoints, "write_atomically", write)
        with pytest.raises(Stop):
            finetune(tiny(), images, checkpoint=path, **SETTINGS)
    resumed = finetune(tiny(), images, checkpoint=path, **SETTINGS)
    assert resumed.history == whole.history
    assert equal(weights(resumed.model), weights(whole.model))
    assert path.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert not (tmp_path / "parts.resume.safetensors").exists()


def test_a_finished_run_is_not_repeated(images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = finetune(tiny(), images, checkpoint=tmp_path / "m.safetensors", **SETTINGS)
    monkeypatch.setattr(training.Trainer, "run_epoch", None)
    again = finetune(tiny(), images, checkpoint=tmp_path / "m.safetensors", **SETTINGS)
    assert equal(weights(again.model), weights(first.model))
    assert (again.history, again.accuracy, again.epoch) == (first.history, first.accuracy, first.epoch)


def test_the_best_epoch_is_kept_not_the_last(images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([(1.0, 0.5), (0.4, 0.9), (0.5, 0.85), (0.1, 0.7)])
    seen: list[dict[str, Tensor]] = []

    def evaluate(run: Any, *_: Any) -> tuple[float, float]:
        seen.append(weights(run.model))
        return next(scores)

    monkeypatch.setattr(training.Trainer, "evaluate", evaluate)
    result = finetune(tiny(), images, checkpoint=tmp_path / "m.safetensors", **{**SETTINGS, "epochs": 4})
    assert (result.epoch, result.accuracy) == (2, 0.85)  # six images cannot tell it from 0.9, and it comes later
    assert equal(weights(result.model), seen[2])
    assert equal(weights(load_finetuned(tiny(), tmp_path / "m.safetensors").model), seen[2])


def test_the_checkpoint_is_plain_safetensors_that_says_what_it_is(images: ImageSet, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    model = timm.create_model("test_vit", img_size=32, num_classes=0)
    result = finetune(model, images, checkpoint=path, **SETTINGS)
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["pace"])
    assert metadata["architecture"] == "test_vit"
    assert metadata["class_names"] == ["red/yellow", "green/blue"]
    assert metadata["preprocessing"]["size"] == [32, 32]
    assert metadata["accuracy"] == result.accuracy
    again = load(path, model="test_vit", img_size=32)
    assert equal(weights(again), weights(result.model))


def test_weights_go_into_a_fresh_model_of_the_same_architecture_only(images: ImageSet, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    result = finetune(tiny(), images, checkpoint=path, **SETTINGS)
    loaded = load_finetuned(tiny(seed=1, classes=7), path)
    assert equal(weights(loaded.model), weights(result.model))
    assert (loaded.accuracy, loaded.class_names) == (result.accuracy, result.class_names)
    half = timm.create_model("test_vit", img_size=32, num_classes=2)
    half.pretrained_cfg = {**half.pretrained_cfg, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    trained = finetune(half, images, checkpoint=tmp_path / "half.safetensors", **SETTINGS).preprocessing
    again = load_finetuned(timm.create_model("test_vit", img_size=32), tmp_path / "half.safetensors")
    assert trained == again.preprocessing == Backbone(again.model).preprocessing
    assert trained.mean == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="do not fit test_vit"):
        load_finetuned(timm.create_model("test_vit"), path)
    with pytest.raises(FileNotFoundError, match="no fine-tuned model at"):
        load_finetuned(tiny(), tmp_path / "other.safetensors")


KILLED = """
import os, signal, sys
sys.path[:0] = {path!r}
import test_finetune
from pace.backbones import finetune, training
real = training.Trainer.run_epoch
def train(run, *arguments):
    if run.step >= 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(run, *arguments)
training.Trainer.run_epoch = train
finetune(
    test_finetune.tiny(), test_finetune.Color("train", n_per_class=40, size=32), checkpoint=sys.argv[1],
    **test_finetune.SETTINGS
)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_killed_run_leaves_a_loadable_checkpoint(images: ImageSet, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    code = KILLED.format(path=[str(Path(__file__).parent), *sys.path])
    ended = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert ended.returncode == -9, ended.stderr
    assert load_finetuned(tiny(), path).accuracy > 0
    resumed = finetune(tiny(), images, checkpoint=path, **SETTINGS)
    assert resumed.history == finetune(tiny(), images, **SETTINGS).history


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 1e-3}, r"m\.safetensors belongs to another run: lr was 0\.002, now 0\.001"),
        ({"model": tiny(seed=9)}, "model was .*, now "),
        ({"images": Color("train", n_per_class=40, size=32, seed=3)}, "images was "),
        ({"augment": False}, "augment was .*, now none"),
    ],
)
def test_another_run_does_not_go_on_from_this_ones_checkpoint(
    images: ImageSet, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "m.safetensors"
    finetune(tiny(), images, checkpoint=path, **SETTINGS)
    before = path.read_bytes()
    model = change.pop("model", tiny())
    unchanged = weights(model)
    with pytest.raises(ValueError, match=message):
        finetune(model, change.pop("images", images), checkpoint=path, **{**SETTINGS, **change})
    assert path.read_bytes() == before
    assert equal(weights(model), unchanged)


def test_images_that_do_not_fit_in_memory_are_decoded_as_they_are_used(
    images: ImageSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = finetune(tiny(), images, **SETTINGS)
    monkeypatch.setattr(batches, "_CACHE_BYTES", 0)
    streamed = finetune(tiny(), images, **SETTINGS)
    assert streamed.history == kept.history
    assert equal(weights(streamed.model), weights(kept.model))


def test_held_out_images_are_a_share_of_every_class_and_never_trained_on(images: ImageSet) -> None:
    train, held_out = split_off(images, 0.25, seed=0)
    assert not set(train.names) & set(held_out.names)
    assert set(train.names) | set(held_out.names) == set(images.names)
    assert held_out.labels is not None
    assert np.bincount(held_out.labels).tolist() == [8, 8]
    assert split_off(images, 0.25, seed=0)[1].names == held_out.names
    assert split_off(images, 0.25, seed=1)[1].names != held_out.names


def test_a_classifier_with_the_right_number_of_classes_is_kept(images: ImageSet) -> None:
    model: Any = tiny(classes=2)
    head = model.head
    finetune(model, images, **{**SETTINGS, "epochs": 1})
    assert model.head is head


def heads() -> dict[str, Any]:
    def of_transformers() -> Any:
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            image_size=32,
            patch_size=8,
        )
        return ViTForImageClassification(config)

    def of_torchvision() -> Any:
        from torchvision.models import VisionTransformer

        return VisionTransformer(32, 8, 2, 2, 32, 64)

    def distilled() -> Any:
        from timm.models.deit import VisionTransformerDistilled

        return VisionTransformerDistilled(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)

    return {"transformers": of_transformers, "torchvision": of_torchvision, "two heads": distilled}


@pytest.mark.parametrize("kind", list(heads()))
def test_models_of_every_library_get_a_new_classifier_and_train(images: ImageSet, kind: str) -> None:
    model = heads()[kind]()
    result = finetune(model, images, **{**SETTINGS, "epochs": 1})
    backbone = Backbone(result.model)
    assert backbone.observe(Color("test", n_per_class=40, size=32)).n_classes == 2
    if kind == "transformers":
        assert result.model.config.id2label == {0: "red/yellow", 1: "green/blue"}


def test_half_precision_weights_are_trained_in_single_precision(images: ImageSet) -> None:
    result = finetune(tiny().half(), images, **{**SETTINGS, "epochs": 1})
    assert next(result.model.parameters()).dtype == torch.float32


def test_frozen_weights_stay(images: ImageSet) -> None:
    model: Any = tiny(classes=2).requires_grad_(False)
    model.head.requires_grad_(True)
    before = weights(model)
    after = weights(finetune(model, images, **{**SETTINGS, "epochs": 1}).model)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"head.weight", "head.bias"}


def test_augmentation_depends_on_seed_and_number_alone_and_stays_in_range(images: ImageSet) -> None:
    batch = torch.stack([images[index] for index in range(8)]) / 255
    augment = Augmentation(seed=1)
    whole = augment(batch, torch.arange(8))
    assert whole.min() >= 0
    assert whole.max() <= 1
    halves = torch.cat([augment(batch[:3], range(3)), augment(batch[3:], range(3, 8))])
    assert torch.allclose(whole, halves, atol=1e-6)
    assert not torch.equal(whole, augment(batch, torch.arange(8, 16)))
    assert not torch.equal(whole, Augmentation(seed=2)(batch, torch.arange(8)))


def test_without_strength_augmentation_only_mirrors(images: ImageSet) -> None:
    batch = torch.stack([images[index] for index in range(8)]) / 255
    result = Augmentation(scale=(1.0, 1.0), jitter=0.0, hue=0.0)(batch, range(8))
    for image, changed in zip(batch, result, strict=True):
        # Even the whole area is cut a little to other proportions, so compare the middle, roughly.
        nearest = min((image - changed).abs().mean(), (image.flip(-1) - changed).abs().mean())
        assert nearest < 0.15


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs and batch_size: expected 1 or more; found 0"),
        ({"lr": -1.0}, "lr: expected a number above 0"),
        ({"layer_decay": 0.0}, "layer_decay: expected a share above 0 and up to 1; found 0.0"),
        ({"warmup": 1.0}, "warmup: expected a share from 0 to below 1"),
        ({"validation": 1.5}, "expected an ImageSet or a share between 0 and 1; found 1.5"),
        ({"checkpoint": "model.pt"}, r"expected a name that ends in \.safetensors; found model\.pt"),
    ],
)
def test_wrong_settings_are_explained(images: ImageSet, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        finetune(tiny(), images, **{**SETTINGS, **change})


def test_a_model_without_a_classifier_is_explained(images: ImageSet) -> None:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8
    )
    with pytest.raises(ValueError, match="ViTModel has no classifier to train; load it with one"):
        finetune(ViTModel(config), images, **SETTINGS)


def test_images_without_labels_are_explained(images: ImageSet) -> None:
    unlabelled = images.subset(range(10))
    unlabelled.labels = None
    with pytest.raises(ValueError, match="images: no labels"):
        finetune(tiny(), unlabelled, **SETTINGS)


def test_a_loss_that_explodes_is_explained(images: ImageSet) -> None:
    model = tiny()
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match=r"the loss is nan after 4 steps; try less than 0\.002"):
        finetune(model, images, **SETTINGS)


def test_early_blocks_learn_at_a_smaller_rate(images: ImageSet) -> None:
    start, moved = weights(tiny()), {}
    for decay in (1.0, 0.1):
        tuned = finetune(tiny(), images, **SETTINGS, weight_decay=0, layer_decay=decay).model
        moved[decay] = {
            name: float((weight - start[name]).abs().mean())
            for name, weight in weights(tuned).items()
            if name in start and weight.shape == start[name].shape
        }
    for name, share in {
        "pos_embed": 0.01,
        "blocks.0.attn.qkv.weight": 0.1,
        "blocks.1.attn.qkv.weight": 1,
        "norm.weight": 1,
    }.items():
        assert share / 2 < moved[0.1][name] / moved[1.0][name] < 2 * share, name


def test_what_comes_after_a_single_block_learns_at_the_full_rate() -> None:
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=2)
    shares = {id(p): share for p, share in training.learning_rate_shares(describe_tower(model), 0.5)}
    found = {name: shares[id(p)] for name, p in model.named_parameters()}
    assert (found["pos_embed"], found["blocks.0.norm1.weight"], found["norm.weight"], found["head.weight"]) == (
        0.5,
        1,
        1,
        1,
    )
