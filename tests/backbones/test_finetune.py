"""Fine-tuning: it learns, resumes as if it had never stopped, and leaves files that can be loaded."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from pace import files
from pace.backbones import Backbone, finetune, load, load_finetuned
from pace.backbones.find import describe_tower
from pace.backbones.finetuning import Finetuned, split_off
from pace.backbones.training import Augmentation, Trainer, parameter_groups
from pace.files import DamagedFile, read_tensors, save_tensors
from pace.images import Color, ImageSet

timm = pytest.importorskip("timm")

SETTINGS: dict[str, Any] = {"epochs": 3, "batch_size": 16, "lr": 2e-3}


def tiny(seed: int = 0, classes: int = 5, depth: int = 2) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(seed)
    return VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=depth, num_heads=2, num_classes=classes, drop_path_rate=0.1
    )


@pytest.fixture(scope="module")
def images() -> ImageSet:
    return Color("train", n_per_class=40, size=32)  # 64 images of two classes


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def vit_of_transformers(name: str) -> Any:
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    return getattr(transformers, name)(transformers.ViTConfig(**sizes, image_size=32, patch_size=8))


def vit_of_torchvision() -> Any:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 1, 2, 32, 64)


def vit_with_two_heads() -> Any:
    from timm.models.deit import VisionTransformerDistilled

    return VisionTransformerDistilled(img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2)


def unlabelled() -> ImageSet:
    images = Color("train", n_per_class=5, size=32).subset(range(5))
    images.labels = None
    return images


def broken() -> nn.Module:
    model = tiny()
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    return model


class Tuned(NamedTuple):
    """A fine-tuned model, its file, and whether the global random numbers after it were as before."""

    result: Finetuned
    path: Path
    undisturbed: bool


@pytest.fixture(scope="module")
def tuned(images: ImageSet, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    path = tmp_path_factory.mktemp("tuned") / "m.safetensors"
    model = tiny()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    result = finetune(model, images, checkpoint=path, **SETTINGS)
    assert result.model is model
    return Tuned(result, path, torch.equal(torch.rand(3), expected))


def test_it_learns_two_classes_of_colours(images: ImageSet) -> None:
    result = finetune(tiny(), images, **{**SETTINGS, "epochs": 6})
    assert result.accuracy == 1.0
    assert result.history[-1].train_loss < result.history[0].train_loss
    assert result.class_names == ("red/yellow", "green/blue")
    assert not result.model.training
    test = Color("test", n_per_class=40, size=32)
    predictions = Backbone(result.model).observe(test).predictions
    assert predictions is not None
    assert (predictions.argmax(1).numpy() == test.labels).mean() == 1.0


def test_the_same_call_gives_the_same_weights(images: ImageSet, tuned: Tuned) -> None:
    again = finetune(tiny(), images, **SETTINGS)
    assert equal(weights(again.model), weights(tuned.result.model))
    assert again.history == tuned.result.history
    assert tuned.undisturbed, "the global generator is left alone"


def test_a_finished_run_is_not_repeated_and_another_one_is_refused(
    images: ImageSet, tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "run_epoch", None)
    before = tuned.path.read_bytes()
    again = finetune(tiny(), images, checkpoint=tuned.path, **SETTINGS)
    assert equal(weights(again.model), weights(tuned.result.model))
    first = tuned.result
    assert (again.history, again.accuracy, again.epoch) == (first.history, first.accuracy, first.epoch)
    others: list[dict[str, Any]] = [
        {"lr": 1e-3},
        {"model": tiny(seed=9)},
        {"images": Color("train", n_per_class=40, size=32, seed=3)},
        {"augment": False},
    ]
    for change in others:
        settings: Any = {"model": tiny(), "images": images, "checkpoint": tuned.path, **SETTINGS, **change}
        with pytest.raises(ValueError, match=r"m\.safetensors is of another run"):
            finetune(settings.pop("model"), settings.pop("images"), **settings)
    assert tuned.path.read_bytes() == before


def test_weights_go_into_a_fresh_model_of_the_same_architecture_only(tuned: Tuned, tmp_path: Path) -> None:
    loaded = load_finetuned(tiny(seed=1, classes=7), tuned.path)
    assert equal(weights(loaded.model), weights(tuned.result.model))
    assert (loaded.accuracy, loaded.class_names) == (tuned.result.accuracy, tuned.result.class_names)
    with pytest.raises(ValueError, match="does not fit this VisionTransformer: "):
        load_finetuned(timm.create_model("test_vit"), tuned.path)
    with pytest.raises(FileNotFoundError, match="no fine-tuned model at"):
        load_finetuned(tiny(), tmp_path / "other.safetensors")
    tensors, header = read_tensors(tuned.path, dict, "")
    header["preprocessing"]["mean"] = [0.5, 0.5]
    save_tensors(tmp_path / "grey.safetensors", tensors, header)
    with pytest.raises(DamagedFile, match=r"grey\.safetensors cannot be used: expected the mean .* of three colours"):
        load_finetuned(tiny(), tmp_path / "grey.safetensors")


def test_the_checkpoint_is_plain_safetensors_that_says_what_it_is(images: ImageSet, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    model = timm.create_model("test_vit", img_size=32, num_classes=0)
    model.pretrained_cfg = {**model.pretrained_cfg, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    result = finetune(model, images, checkpoint=path, **{**SETTINGS, "epochs": 1})
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["pace"])
    assert metadata["architecture"] == "test_vit"
    assert metadata["class_names"] == ["red/yellow", "green/blue"]
    assert metadata["preprocessing"]["size"] == [32, 32]
    assert equal(weights(load(path, model="test_vit", img_size=32)), weights(result.model))
    again = load_finetuned(timm.create_model("test_vit", img_size=32), path)
    assert Backbone(again.model).preprocessing == Backbone(result.model).preprocessing
    assert Backbone(again.model).preprocessing.mean == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    "build", [lambda: vit_of_transformers("ViTForImageClassification"), vit_of_torchvision, vit_with_two_heads]
)
def test_models_of_every_library_get_a_new_classifier_and_train(images: ImageSet, build: Any) -> None:
    result = finetune(build().half(), images, **{**SETTINGS, "epochs": 1})
    assert next(result.model.parameters()).dtype == torch.float32
    assert Backbone(result.model).observe(Color("test", n_per_class=5, size=32)).n_classes == 2
    if hasattr(result.model, "config"):
        assert result.model.config.id2label == {0: "red/yellow", 1: "green/blue"}


def test_frozen_weights_and_a_classifier_of_the_right_size_stay(images: ImageSet) -> None:
    model: Any = tiny(classes=2).requires_grad_(False)
    model.head.requires_grad_(True)
    before, head = weights(model), model.head
    after = weights(finetune(model, images, **{**SETTINGS, "epochs": 1}).model)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"head.weight", "head.bias"}
    assert model.head is head


class Stop(Exception):
    pass


@pytest.mark.parametrize("where", ["writing 0", "training 2", "writing 3"])
def test_stopped_anywhere_it_resumes_to_the_same_bits(
    images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    scores = [0.5, 1.0, 0.0]  # the best weights must survive too
    monkeypatch.setattr(Trainer, "evaluate", lambda run: (1.0, scores[len(run.history)]))
    whole = finetune(tiny(), images, checkpoint=tmp_path / "whole.safetensors", **SETTINGS)
    path = tmp_path / "parts.safetensors"
    events: list[str] = []

    def event(name: str) -> None:
        if f"{name} {events.count(name)}" == where:
            raise Stop
        events.append(name)

    real_train, real_write = Trainer.run_epoch, files.write_atomically

    def train(*arguments: Any) -> None:
        event("training")
        real_train(*arguments)

    def write(target: Path, data: bytes) -> None:
        event("writing")
        real_write(target, data)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run_epoch", train)
        patch.setattr(files, "write_atomically", write)
        with pytest.raises(Stop):
            finetune(tiny(), images, checkpoint=path, **SETTINGS)
    if path.exists():
        with pytest.raises(ValueError, match="its training has not finished"):
            load_finetuned(tiny(), path)
    resumed = finetune(tiny(), images, checkpoint=path, **SETTINGS)
    assert resumed.history == whole.history
    assert equal(weights(resumed.model), weights(whole.model))
    assert path.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_with_room_every_image_is_decoded_once_and_the_weights_are_the_same(
    images: ImageSet, tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, real = [], type(images).__getitem__
    monkeypatch.setattr(type(images), "__getitem__", lambda own, row: decoded.append(row) or real(own, row))
    monkeypatch.setattr("pace.backbones.training.room_for_pixels", lambda device: len(images) * 3 * 32 * 32)
    kept = finetune(tiny(), images, **SETTINGS)
    assert len(decoded) == len(images)
    assert equal(weights(kept.model), weights(tuned.result.model))


def test_the_best_epoch_is_kept_not_the_last(images: ImageSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([(1.0, 0.5), (0.4, 0.9), (0.5, 0.85), (0.1, 0.7)])
    seen: list[dict[str, Tensor]] = []

    def evaluate(run: Trainer) -> tuple[float, float]:
        seen.append(weights(run.tower.model))
        return next(scores)

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    result = finetune(tiny(), images, checkpoint=tmp_path / "m.safetensors", **{**SETTINGS, "epochs": 4})
    assert (result.epoch, result.accuracy) == (2, 0.85)  # six images cannot tell it from 0.9, and it comes later
    assert equal(weights(result.model), seen[2])
    assert equal(weights(load_finetuned(tiny(), tmp_path / "m.safetensors").model), seen[2])


def test_held_out_images_are_a_share_of_every_class_and_never_trained_on(images: ImageSet) -> None:
    train, held_out = split_off(images, 0.25, seed=0)
    assert not set(train.names) & set(held_out.names)
    assert set(train.names) | set(held_out.names) == set(images.names)
    assert held_out.labels is not None
    assert np.bincount(held_out.labels).tolist() == [8, 8]
    assert split_off(images, 0.25, seed=0)[1].names == held_out.names
    assert split_off(images, 0.25, seed=1)[1].names != held_out.names


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


@pytest.mark.parametrize(("depth", "expected"), [(2, (0.25, 0.5, 1, 1)), (1, (0.5, 1, 1, 1))])
def test_early_blocks_learn_at_a_smaller_rate(depth: int, expected: tuple[float, ...]) -> None:
    model = tiny(depth=depth)
    shares = {id(p): group["share"] for group in parameter_groups(describe_tower(model), 0.5) for p in group["params"]}
    found = {name: shares[id(p)] for name, p in model.named_parameters()}
    assert tuple(found[n] for n in ("pos_embed", "blocks.0.norm1.weight", "norm.weight", "head.weight")) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs and batch_size: expected 1 or more; found 0"),
        ({"lr": -1.0}, "lr: expected a number above 0"),
        ({"layer_decay": 0.0}, "layer_decay: expected a share above 0 and up to 1; found 0.0"),
        ({"validation": 1.5}, "expected an ImageSet or a share between 0 and 1; found 1.5"),
        ({"checkpoint": "model.pt"}, r"expected a name that ends in \.safetensors; found model\.pt"),
        ({"model": vit_of_transformers("ViTModel")}, "ViTModel has no classifier to train; load it with one"),
        ({"images": unlabelled()}, "images: no labels"),
        ({"model": broken()}, r"the loss is nan in epoch 1; try less than 0\.002"),
    ],
)
def test_what_cannot_be_trained_is_explained(images: ImageSet, change: dict[str, Any], message: str) -> None:
    settings: Any = {"model": tiny(), "images": images, **SETTINGS, **change}
    with pytest.raises(ValueError, match=message):
        finetune(settings.pop("model"), settings.pop("images"), **settings)
