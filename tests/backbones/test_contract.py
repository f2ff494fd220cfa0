"""The same contract for every family: golden tokens, attention and logits, and a model that is left as it was."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from families import FAMILIES, Family
from torch import Tensor, nn

from pace.backbones import Backbone, Look, Preprocessing


@pytest.fixture(params=FAMILIES, scope="module")
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def model(family: Family) -> nn.Module:
    return family.model()


def _kept(tokens: Tensor, family: Family, count_cls: bool) -> Tensor:
    patches = tokens[:, family.prefix :]
    return torch.cat([tokens[:, :1], patches], 1) if family.has_cls and count_cls else patches


def _close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=1e-5)


@torch.no_grad()
def test_tokens_attention_and_predictions_are_the_librarys_own(family: Family, model: nn.Module) -> None:
    for size in (family.size, *family.more):
        images = family.images(size)
        layers = family.reference(model, images)
        assert Backbone(model).layers == len(layers)
        for (layer, expected), counted in product(enumerate(layers), (True, False)):
            backbone = Backbone(model, layer=layer, count_cls=counted)
            found = backbone(images)
            _close(found.embeddings, _kept(expected.tokens, family, counted), 1e-4)
            _close(found.attention, _kept(expected.attention, family, counted))
            rows, columns = backbone.grid(*size)
            assert found.embeddings.shape == (2, rows * columns + backbone.prefix_tokens, backbone.dim)
            spread = found.attention.amax(1) / found.attention.amin(1)
            assert spread.min() > 1.01, "an even attention would prove nothing"
        every = backbone.every_token(images)
        _close(every.embeddings, layers[-1].tokens, 1e-4)
        _close(every.attention, layers[-1].attention)
    images = family.images()
    predictions = Backbone(model)(images).predictions
    if family.logits is None:
        assert predictions is None
    else:
        _close(predictions, family.logits(model, images).softmax(-1))


@torch.no_grad()
def test_the_two_halves_of_a_split_make_the_whole_and_are_differentiable(family: Family, model: nn.Module) -> None:
    size = (family.size, *family.more)[-1]
    images = family.images(size, count=3)
    features = Backbone(model).pooled(images).shape[1]
    head = nn.Linear(features, 7)
    for layer in range(Backbone(model).layers):
        backbone = Backbone(model, layer, head=None if family.logits else head)
        tokens = backbone.split(images)
        if family.logits is None:
            expected = head(backbone.pooled(images))
        elif size == family.size:
            expected = family.logits(model, images)
        else:
            expected = backbone(images).predictions.log()
        found = backbone.forward_from(tokens, size)
        _close(found.log_softmax(-1), expected.log_softmax(-1), 1e-4)
        _close(_kept(tokens, family, count_cls=False), backbone(images).embeddings)
        assert not torch.allclose(backbone.forward_from(tokens.flip(-1), size), found), "tokens must matter"
    with torch.enable_grad():
        images.requires_grad_()
        tokens = Backbone(model, 0).split(images)
        logits = Backbone(model, 0, head=None if family.logits else head).forward_from(tokens, size)
        (to_tokens,) = torch.autograd.grad(logits[:, 0].sum(), tokens, retain_graph=True)
        (to_images,) = torch.autograd.grad((tokens * to_tokens).sum(), images)
    assert to_tokens.abs().sum() > 0
    assert to_images.abs().sum() > 0


def test_what_the_first_block_takes_makes_the_whole_too(family: Family, model: nn.Module) -> None:
    pooled = Backbone(model).pooled(family.images()).shape[1]
    backbone = Backbone(model, head=None if family.logits else nn.Linear(pooled, 3))
    for size in (family.size, *family.more):
        images = family.images(size)
        if family.size == (64, 64):  # Swin
            with pytest.raises(ValueError, match="merges its tokens on the way; hide patches in the images"):
                backbone.embed(images)
            continue
        with torch.no_grad():
            tokens = backbone.embed(images)
            found = backbone.forward_embedded(tokens, size)
            assert tokens.shape[1] - family.prefix == math.prod(backbone.grid(*size))
            _close(found.softmax(1), backbone(images).predictions)
            assert not torch.allclose(backbone.forward_embedded(tokens.flip(-1), size), found), "tokens must matter"


def test_the_attention_can_be_another_blocks(family: Family, model: nn.Module) -> None:
    images = family.images()
    own = [Backbone(model, layer) for layer in range(Backbone(model).layers)]
    seen = [backbone(images) for backbone in own]
    before = _state(model)
    refused = 0
    for layer, other in ((0, -1), (-2, -1), (-1, 0), (-1, -2)):
        backbone = Backbone(model, layer, attention_layer=other)
        assert backbone.attention_layer == own[other].layer
        if own[layer].grid(*family.size) != own[other].grid(*family.size):
            with pytest.raises(
                ValueError, match=r"attention_layer: block \d attends over \d+ x \d+ patches, but layer \d"
            ):
                backbone(images)
            refused += 1
        else:
            found = backbone(images)
            _close(found.embeddings, seen[layer].embeddings)
            _close(found.attention, seen[other].attention)
            assert (found.predictions is None) == (family.logits is None)
            if found.predictions is not None:
                _close(found.predictions, seen[layer].predictions)
            assert not torch.allclose(found.attention, seen[layer].attention)
        assert _state(model) == before
    assert refused == (2 if family.size == (64, 64) else 0), "Swin merges patches between its first block and its last"


def test_layers_may_count_from_the_end_and_must_exist() -> None:
    model, images = FAMILIES["timm-vit"].model(), FAMILIES["timm-vit"].images()
    assert Backbone(model).layer == 2
    _close(Backbone(model, -3)(images).embeddings, Backbone(model, 0)(images).embeddings)
    for wrong in (3, -4):
        with pytest.raises(ValueError, match=r"^layer: expected -3 to 2"):
            Backbone(model, wrong)
        with pytest.raises(ValueError, match=f"attention_layer: expected -3 to 2 .* found {wrong}"):
            Backbone(model, attention_layer=wrong)


def test_another_blocks_attention_costs_no_second_run() -> None:
    model = FAMILIES["timm-vit"].model()
    runs: list[str] = []
    for name, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, name=name: runs.append(name))
    Backbone(model, 0, attention_layer=-1)(FAMILIES["timm-vit"].images())
    assert runs == [0, 1, 2]


def test_an_object_that_looks_itself_has_its_own_attention_alone() -> None:
    class Own:
        layers, prefix, has_cls = 3, 0, False
        preprocessing = Preprocessing(size=(8, 8))

        def dim(self, layer: int) -> int:
            return 3

        def grid(self, height: int, width: int, layer: int) -> tuple[int, int]:
            return height, width

        def look(self, images: Tensor, layer: int) -> Look:
            tokens = images.flatten(2).mT
            return Look(tokens, tokens.norm(dim=-1), tokens.mean(1), None)

    images = torch.randn(2, 3, 8, 8)
    assert Backbone(Own(), 1, attention_layer=-2)(images).attention.shape == (2, 64)
    with pytest.raises(ValueError, match="attention_layer: Own only gives the attention of layer 1 itself"):
        Backbone(Own(), 1, attention_layer=-1)


# The user's model is never changed.


def _state(model: nn.Module) -> list[Any]:
    """All that a call could leave behind: flags, hooks, replaced methods, buffers, gradients."""
    state: list[Any] = []
    for name, module in model.named_modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, (bool, int, float, str, tuple))}
        hooks = {key: len(value) for key, value in vars(module).items() if "hook" in key and hasattr(value, "__len__")}
        state.append((name, plain, hooks, "forward" in vars(module), sorted(module._buffers)))
    state += [(name, p.requires_grad, p.grad is None, p.detach().sum().item()) for name, p in model.named_parameters()]
    return state


def _calls(family: Family, backbone: Backbone) -> Iterator[Any]:
    images = family.images()
    yield lambda: backbone(images)
    yield lambda: backbone.pooled(images)
    yield lambda: backbone.forward_from(backbone.split(images), family.size)
    if family.size != (64, 64):  # Swin
        yield lambda: backbone.forward_embedded(backbone.embed(images), family.size)
    yield backbone.fingerprint


def test_nothing_of_a_call_survives_it(family: Family, model: nn.Module) -> None:
    model.train()
    flipped = next(model.children())
    flipped.eval()  # a mixture of modes must come back as a mixture
    frozen = list(model.parameters())[::2]
    for parameter in frozen:
        parameter.requires_grad_(False)
    head = nn.Linear(Backbone(model).pooled(family.images()).shape[1], 3).train()
    before = _state(model)
    found = Backbone(model)(family.images())
    for layer in (0, -1):
        for call in _calls(family, Backbone(model, layer, head=head)):
            call()
            assert _state(model) == before
            assert head.training
    assert torch.is_grad_enabled()
    model.eval().requires_grad_(True)
    expected = Backbone(model)(family.images())  # dropout was off
    _close(found.embeddings, expected.embeddings)
    _close(found.attention, expected.attention)


def test_windows_that_shrink_for_a_small_image_grow_back() -> None:
    """transformers' Swin would keep them small, and give other results from then on."""
    family = FAMILIES["hf-swin"]
    model = family.model()
    before, expected = _state(model), Backbone(model)(family.images())
    Backbone(model)(family.images((32, 32)))
    assert _state(model) == before
    torch.testing.assert_close(Backbone(model)(family.images()).embeddings, expected.embeddings, rtol=0, atol=0)


def test_nothing_survives_a_call_that_raises(family: Family, model: nn.Module) -> None:
    model.train()
    backbone = Backbone(model, 0, head=nn.Linear(Backbone(model).pooled(family.images()).shape[1], 3))
    tokens = backbone.split(family.images())
    inside = [one for one in backbone._described.model.modules() if isinstance(one, nn.Linear)][::2]
    before, raised = _state(model), 0
    for broken in inside:

        def burst(*_: Any) -> None:
            raise RuntimeError("burst")

        own = broken.forward
        broken.forward = burst  # type: ignore[method-assign]
        try:
            for call in (lambda: backbone(family.images()), lambda: backbone.forward_from(tokens, family.size)):
                try:
                    call()
                except RuntimeError as error:
                    assert str(error) == "burst"  # noqa: PT017
                    raised += 1
        finally:
            del vars(broken)["forward"]
        assert broken.forward == own
        assert _state(model) == before
        assert torch.overrides._len_torch_function_stack() == 0
    assert raised > 1
    assert torch.is_grad_enabled()
    model.eval()


def test_fingerprints_tell_models_apart(family: Family, model: nn.Module) -> None:
    own = Backbone(model).fingerprint()
    assert own == Backbone(family.model()).fingerprint(), "the same model made again"
    Backbone(model)(family.images())
    assert own == Backbone(model).fingerprint(), "use does not change it"
    others = [Backbone(model, 0), Backbone(model, count_cls=True), Backbone(model, head=nn.Linear(3, 2))]
    changed = family.model()
    with torch.no_grad():
        last = [parameter for _, parameter in Backbone(changed)._described.model.named_parameters()][-1]
        last.view(-1)[-1] += 1e-3
    others += [Backbone(model, 0, attention_layer=-1), Backbone(model, 0, attention_layer=-2)]
    found = {own, *(other.fingerprint() for other in others), Backbone(changed).fingerprint()}
    assert len(found) == 6 + family.has_cls, "whether CLS counts is no matter where there is none"
