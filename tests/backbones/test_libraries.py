"""Which models are recognised, and what is said of those that are not."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES
from torch import Tensor, nn

from pace.backbones import Backbone, Look, Model, Preprocessing, Sizes, Tower


def _vit() -> nn.Module:
    return FAMILIES["timm-vit"].model()


def test_importing_needs_no_optional_library() -> None:
    code = (
        "import sys, pace.backbones; "
        "print([name for name in ('timm', 'transformers', 'torchvision', 'open_clip', 'sklearn') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_wrapped_models_are_unwrapped() -> None:
    class Adapted(nn.Module):
        """As PEFT wraps a model."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def get_base_model(self) -> nn.Module:
            return self.inner

    model, images = _vit(), FAMILIES["timm-vit"].images()
    expected = Backbone(model)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager"), Adapted(model), averaged):
        found = Backbone(wrapped)
        assert found.fingerprint() == expected.fingerprint()
        torch.testing.assert_close(found(images).attention, expected(images).attention)


class Normalize(nn.Module):
    """As people write it: pixels up to 1 or, with mean and deviation of that size, up to 255."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("mean", scale * torch.tensor([0.1, 0.2, 0.3]).view(1, 3, 1, 1))
        self.register_buffer("std", scale * torch.tensor([0.4, 0.5, 0.6]).view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std


class LightningModule(nn.Module):
    """By its name alone."""


class Lit(LightningModule):
    def __init__(self, transformer: nn.Module, classifier: nn.Module | None = None) -> None:
        super().__init__()
        self.normalize, self.net, self.classifier, self.loss = Normalize(), transformer, classifier, nn.MSELoss()

    def forward(self, images: Tensor) -> Tensor:
        features = self.net(self.normalize(images))
        return features if self.classifier is None else self.classifier(features)


def _bare() -> nn.Module:
    model = _vit()
    model.reset_classifier(0)
    return model


WRAPPED = {
    "sequential": lambda: nn.Sequential(Normalize(), _vit()),
    "sequential in parallel": lambda: nn.DataParallel(nn.Sequential(Normalize(), _vit())),
    "sequential compiled": lambda: nn.Sequential(Normalize(), torch.compile(_vit(), backend="eager")),
    "sequential to 255": lambda: nn.Sequential(Normalize(255), _vit(), nn.Softmax(-1)),
    "sequential with a classifier": lambda: nn.Sequential(Normalize(), _bare(), nn.ReLU(), nn.Linear(32, 4)),
    "lightning": lambda: Lit(_vit()),
    "lightning with a classifier": lambda: Lit(_bare(), nn.Sequential(nn.Dropout(), nn.Linear(32, 4))),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_model_predicts_as_it_does_itself_and_its_normalisation_is_kept(name: str) -> None:
    """The wrapper gets pixels, the backbone normalised ones."""
    torch.manual_seed(0)
    model = WRAPPED[name]().eval()
    before = ["forward" in vars(part) for part in model.modules()]
    pixels = torch.rand(2, 3, 32, 32)
    backbone = Backbone(model, 0)
    how = backbone.preprocessing
    torch.testing.assert_close((how.mean, how.std), ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)))
    mean, std = torch.tensor(how.mean).view(3, 1, 1), torch.tensor(how.std).view(3, 1, 1)
    found = backbone((pixels - mean) / std)
    expected = model(255 * pixels) if "255" in name else model(pixels).softmax(-1)
    torch.testing.assert_close(found.predictions, expected.detach())
    assert found.embeddings.shape == (2, 16, 32)
    tokens = backbone.split((pixels - mean) / std)
    torch.testing.assert_close(backbone.forward_from(tokens).softmax(-1), expected)
    assert ["forward" in vars(part) for part in model.modules()] == before, "left as it was"


def test_lightning_modules_with_two_transformers_ask_which() -> None:
    with pytest.raises(ValueError, match=r"pass model\.net, with head="):
        Backbone(Lit(_bare(), _bare()))


class Lora(nn.Module):
    """As PEFT puts itself around a linear layer."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A, self.lora_B = nn.Linear(base_layer.in_features, 2), nn.Linear(2, base_layer.out_features)

    def forward(self, values: Tensor) -> Tensor:
        return self.base_layer(values) + self.lora_B(self.lora_A(values))


class ModulesToSave(nn.Module):
    """As PEFT keeps a classifier that is trained as a whole."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original_module = original
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(original.in_features, original.out_features)})

    def forward(self, values: Tensor) -> Tensor:
        return self.modules_to_save["default"](values)


@pytest.mark.parametrize(("family", "head"), [("timm-vit", "head"), ("hf-vit", "classifier")])
@pytest.mark.parametrize("around", [Lora, ModulesToSave])
def test_adapters_are_seen_through_to_the_classifier(family: str, head: str, around: type) -> None:
    torch.manual_seed(0)
    one = FAMILIES[family]
    model, images = one.model(), one.images()
    setattr(model, head, around(getattr(model, head)))
    block = (model.blocks if family == "timm-vit" else model.vit.layers)[0]
    name = next(name for name, part in block.named_modules() if isinstance(part, nn.Linear))
    parent, _, last = name.rpartition(".")
    setattr(block.get_submodule(parent), last, Lora(block.get_submodule(name)))
    backbone = Backbone(model.eval())
    torch.testing.assert_close(backbone(images).predictions, one.logits(model, images).softmax(-1).detach())
    assert backbone.pooled(images).shape == (2, 32), "what the classifier reads, not its adapter"


def test_no_forward_pass_makes_float64_which_apple_gpus_lack() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Single(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            assert getattr(output, "dtype", None) != torch.float64, f"{func} made float64"
            return output

    for family in ("timm-vit", "timm-swin", "hf-vit", "torchvision-vit", "open_clip-vit"):
        model, images = FAMILIES[family].model(), FAMILIES[family].images()
        backbone = Backbone(model, 0, head=nn.Linear(Backbone(model).pooled(images).shape[1], 2))
        with Single():
            backbone(images)
            backbone.forward_from(backbone.split(images))


def test_what_comes_from_an_apple_gpu_is_on_the_cpu() -> None:
    """No such GPU here: its name alone."""
    from pace import PACE
    from pace.backbones.backbone import without_apple
    from pace.observations import Observations

    assert without_apple(torch.device("mps")) == torch.device("cpu")
    assert without_apple(torch.device("cuda:1")) == torch.device("cuda:1")
    with pytest.raises(ValueError, match="device: concepts are computed in float64, which Apple GPUs lack"):
        PACE(2, device="mps").fit(Observations(torch.zeros(2, 4, 3), torch.ones(2, 4)))


def test_a_model_compiled_in_place_is_looked_into_all_the_same() -> None:
    compilations = 0

    def count(graph: Any, _: Any) -> Any:
        nonlocal compilations
        compilations += 1
        return graph.forward

    model, images = _vit(), FAMILIES["timm-vit"].images()
    expected = Backbone(model, 0)(images)
    model.compile(backend=count)
    with torch.no_grad():
        model(images)
    before, compiled = compilations, model._compiled_call_impl
    found = Backbone(model, 0)(images)
    torch.testing.assert_close(found.attention, expected.attention)
    assert compilations == before, "looking must not compile the model anew"
    assert model._compiled_call_impl is compiled


@pytest.mark.parametrize("family", ["timm-vit", "timm-swin", "open_clip-vit"])
def test_gradients_are_right_when_the_model_checkpoints_its_blocks(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reentrant checkpoints would run the replaced blocks again, after they were put back."""
    from timm.models import _manipulate

    monkeypatch.setattr(_manipulate, "use_reentrant_ckpt", lambda: True)
    model, images = FAMILIES[family].model(), FAMILIES[family].images()
    backbone = Backbone(model, 0, head=nn.Linear(Backbone(model).pooled(images).shape[1], 2))
    tokens = backbone.split(images).detach().requires_grad_()
    (expected,) = torch.autograd.grad(backbone.forward_from(tokens).sum(), tokens)
    getattr(model, "set_grad_checkpointing")(True)  # noqa: B009
    (found,) = torch.autograd.grad(backbone.forward_from(tokens).sum(), tokens)
    torch.testing.assert_close(found, expected)
    assert any(getattr(module, "grad_checkpointing", False) for module in model.modules()), "the flag is put back"


def test_fused_attention_stays_on() -> None:
    from torch.overrides import TorchFunctionMode

    class Count(TorchFunctionMode):
        fused = written_out = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            output = func(*args, **(kwargs or {}))
            self.fused += func is F.scaled_dot_product_attention
            self.written_out += "softmax" in func.__name__ and output.shape[-1] == output.shape[-2]
            return output

    family = FAMILIES["hf-vit"]
    with Count() as count:
        Backbone(family.model())(family.images())
    assert (count.fused, count.written_out) == (3, 0), "in every block, the watched one too"


# Wrong input.


def test_models_without_a_vision_transformer_are_refused() -> None:
    from torchvision.models import resnet18

    with pytest.raises(ValueError, match=r"ResNet is a convolutional network, .*a ViT, Swin or DINOv2 would serve"):
        Backbone(resnet18(num_classes=2))
    with pytest.raises(ValueError, match=r"linear.Linear is not a vision transformer of timm, "):
        Backbone(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"expected a torch module .* found builtins.str"):
        Backbone("vit_base_patch16_224")


def test_a_transformer_inside_an_unknown_model_is_pointed_at() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleDict({"vision": _vit()})

    with pytest.raises(ValueError, match=r"pass model\.encoder\.vision, with head="):
        Backbone(Mine())


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("timm-vit", (48, 32), "images are 48 x 32, but this model takes 32 x 32 only"),
        ("timm-vit-dynamic", (36, 48), "multiples of 8 x 8 only, such as 32 x 48"),
        ("timm-swin", (32, 32), "takes 64 x 64 only"),
        ("torchvision-vit", (64, 64), "takes 32 x 32 only"),
        ("torchvision-swin", (3, 64), "smaller than one patch of 4 x 4"),
        ("open_clip-vit", (40, 32), "takes 32 x 32 only"),
        ("hf-vit", (7, 32), "smaller than one patch of 8 x 8"),
    ],
)
def test_wrong_sizes_say_which_would_work(family: str, size: tuple[int, int], message: str) -> None:
    backbone = Backbone(FAMILIES[family].model())
    for ask in (lambda: backbone(torch.zeros(1, 3, *size)), lambda: backbone.grid(*size)):
        with pytest.raises(ValueError, match=message):
            ask()


def test_wrong_images_and_tokens_say_what_was_found() -> None:
    backbone = Backbone(_vit())
    with pytest.raises(ValueError, match=r"found torch.uint8 of shape \(1, 3, 32, 32\)"):
        backbone(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
    with pytest.raises(
        ValueError, match=r"\(images, 3, height, width\); found torch.float32 of shape \(1, 1, 32, 32\)"
    ):
        backbone(torch.zeros(1, 1, 32, 32))
    with pytest.raises(ValueError, match=r"found torch.float32 of shape \(3, 32, 32\)"):
        backbone(torch.zeros(3, 32, 32))
    with pytest.raises(ValueError, match="found list"):
        backbone([torch.zeros(3, 32, 32)])  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"expected shape \(images, 17, 32\) for images of 32 x 32; found \(1, 16, 32\)"
    ):
        backbone.forward_from(torch.zeros(1, 16, 32))
    with pytest.raises(ValueError, match="no classifier; give Backbone a head"):
        Backbone(FAMILIES["timm-clip"].model()).forward_from(torch.zeros(1, 17, 32))


def test_a_classifier_changed_behind_the_backbones_back_is_noticed() -> None:
    model, images = _vit(), FAMILIES["timm-vit"].images()
    backbone = Backbone(model)
    model.reset_classifier(3)
    with pytest.raises(ValueError, match="make its Backbone again"):
        backbone(images)
    assert Backbone(model)(images).predictions.shape == (2, 3)
    model.blocks = model.blocks[:1]
    with pytest.raises(ValueError, match="layer 1 did not run"):
        Backbone(Tower(model, list(_vit().blocks), [32] * 3, Sizes((32, 32), (8, 8), "fixed"), 1, True), 1)(images)


# Models of one's own.


class Strange(nn.Module):
    """A transformer of no library: one block of hand-written attention, CLS, four patches of a 2 x 2 image."""

    def __init__(self, hidden: bool = False) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.randn(1, 1, 8))
        self.embed = nn.Linear(3, 8)
        self.block = StrangeBlock(hidden)
        self.out = nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        tokens = torch.cat([self.cls.expand(len(images), -1, -1), self.embed(images.flatten(2).mT)], 1)
        return self.out(self.block(tokens)[:, 0])


class StrangeBlock(nn.Module):
    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.hidden = hidden
        self.qk = nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qk(tokens).chunk(2, -1))
        scores = query @ key.mT
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True) if self.hidden else scores.softmax(-1)
        return tokens + weights.mean(1) @ tokens


def _tower(model: Strange) -> Tower:
    return Tower(
        model,
        [model.block],
        dims=[8],
        sizes=Sizes((2, 2), (1, 1), "fixed"),
        prefix=1,
        has_cls=True,
        classifiers=[model.out],
    )


def test_a_described_tower_is_a_backbone() -> None:
    torch.manual_seed(0)
    model, images = Strange(), torch.randn(2, 3, 2, 2)
    backbone = Backbone(_tower(model), count_cls=True)
    assert backbone.preprocessing == Preprocessing(size=(2, 2))
    found = backbone(images)
    assert found.embeddings.shape == (2, 5, 8)
    torch.testing.assert_close(found.attention.sum(1), torch.ones(2))
    torch.testing.assert_close(found.predictions, model(images).softmax(-1).detach())
    torch.testing.assert_close(backbone.forward_from(backbone.split(images)), model(images))
    assert backbone.fingerprint() != Backbone(_tower(Strange()), count_cls=True).fingerprint()


def test_attention_that_cannot_be_seen_is_an_error_and_never_even() -> None:
    with pytest.raises(ValueError, match=r"StrangeBlock computed no visible attentions.*attn_implementation"):
        Backbone(_tower(Strange(hidden=True)))(torch.randn(1, 3, 2, 2))


def test_channel_attention_is_refused() -> None:
    """XCiT attends over channels, so its attention says nothing about tokens."""

    class Channels(StrangeBlock):
        def forward(self, tokens: Tensor) -> Tensor:
            heads = tokens.unflatten(-1, (1, 8)).transpose(1, 2)
            return tokens + (heads @ (heads.mT @ heads).softmax(-1))[:, 0]

    model = Strange()
    model.block = Channels(False)
    with pytest.raises(ValueError, match="only attention between tokens can be explained"):
        Backbone(_tower(model))(torch.randn(1, 3, 2, 2))


class Answers:
    """The protocol, answered without any module."""

    layers, prefix, has_cls = 2, 1, True
    preprocessing = Preprocessing(size=(4, 4))

    def dim(self, layer: int) -> int:
        return 3

    def grid(self, height: int, width: int, layer: int) -> tuple[int, int]:
        return height, width

    def look(self, images: Tensor, layer: int) -> Look:
        tokens = torch.cat([images.mean((2, 3))[:, None], images.flatten(2).mT], 1) + layer
        attention = tokens.abs().sum(-1)
        return Look(tokens, attention / attention.sum(1, keepdim=True), tokens[:, 0], None)


def test_any_object_with_the_protocol_is_a_backbone() -> None:
    assert isinstance(Answers(), Model)
    backbone = Backbone(Answers(), head=lambda pooled: 2 * pooled, count_cls=True)
    images = torch.rand(2, 3, 4, 4)
    found = backbone(images)
    assert (found.embeddings.shape, backbone.prefix_tokens, backbone.dim) == ((2, 17, 3), 1, 3)
    torch.testing.assert_close(found.predictions, (2 * (images.mean((2, 3)) + 1)).softmax(-1))
    assert backbone.device == torch.device("cpu")
    assert Backbone(Answers())(images).embeddings.shape == (2, 16, 3)
    assert backbone.fingerprint() != Backbone(Answers(), count_cls=True).fingerprint()
    with pytest.raises(ValueError, match="Answers cannot be split"):
        backbone.split(images)
