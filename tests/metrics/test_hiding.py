"""Patches hidden in a transformer, in four ways."""

import numpy as np
import pytest
import torch

from pace.backbones import Backbone
from pace.images import Color
from pace.metrics import concept_effect, hide, hide_patches, hide_tokens
from pace.metrics.hiding import WAYS


def test_hidden_tokens_are_replaced_by_the_mean_patch_and_prefix_tokens_stay():
    tokens = torch.arange(12.0).reshape(1, 4, 3)
    seen = []
    hide_tokens(seen.append, tokens, 3)(np.array([0]), np.array([[True, False, True]]))
    expected = tokens.clone()
    expected[0, 2] = tokens[0, 1:].mean(0)
    torch.testing.assert_close(seen[0], expected)
    torch.testing.assert_close(tokens, torch.arange(12.0).reshape(1, 4, 3))


def test_tokens_left_out_are_not_there_and_images_keep_their_places():
    tokens = torch.arange(24.0).reshape(2, 4, 3)
    seen = []

    def forward(some):
        seen.append(some)
        return some.sum((1, 2))[:, None]

    kept = np.array([[True, False, True], [True, True, True], [False, False, True], [True, True, False]])
    found = hide_tokens(forward, tokens, 3, "left out")(np.array([0, 1, 1, 0]), kept)
    expected = [tokens[i][torch.tensor([True, *mask])].sum() for i, mask in zip([0, 1, 1, 0], kept, strict=True)]
    torch.testing.assert_close(found[:, 0], torch.stack(expected))
    assert [some.shape[:2] for some in seen] == [(1, 1), (1, 2), (2, 3), (1, 4)]  # first, an image without patches


def test_tokens_can_be_replaced_by_those_of_other_images():
    tokens, others, seen = torch.zeros(2, 4, 3), torch.arange(6.0).reshape(2, 3) + 1, []
    hide_tokens(seen.append, tokens, 3, others)(np.array([0, 1]), np.array([[True, False, False], [True, True, True]]))
    assert (seen[0][0, :2] == 0).all()
    assert (seen[0][1] == 0).all()
    assert all(any(torch.equal(row, other) for other in others) for row in seen[0][0, 2:])


def test_hidden_patches_are_covered_where_the_grid_says():
    images, seen = torch.rand(2, 3, 16, 32), []
    kept = np.array([[True, False, True, True]])
    for how in ("grey", "blur"):
        hide_patches(seen.append, images, (2, 2), how)(np.array([1]), kept)
    grey, blurred = (found[0] for found in seen)
    assert grey[:, :8, 16:].abs().sum() == 0
    assert 0 < blurred[:, :8, 16:].std() < images.std() / 5
    for found in (grey, blurred):
        torch.testing.assert_close(found[:, :8, :16], images[1, :, :8, :16])
        torch.testing.assert_close(found[:, 8:], images[1, :, 8:])


@pytest.fixture(scope="module")
def vit():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)

    def make(name="VisionTransformer", **options):
        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
        model = getattr(timm.models, name)(**sizes, **options)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        return model

    return make


@pytest.mark.parametrize("how", WAYS)
def test_patches_of_a_transformer_are_hidden_in_four_ways(vit, how):
    backbone, images = Backbone(vit(reg_tokens=1), layer=0, count_cls=True), Color("test", size=32)
    hiding = hide(backbone, images, np.array([1, 4, 7]), how)
    seen = backbone.observe(images.subset([1, 4, 7]))
    np.testing.assert_allclose(hiding.attention, seen.attention[:, 1:], atol=1e-6)
    numbers, kept = np.array([0, 1, 2]), np.ones((3, 16), bool)
    np.testing.assert_allclose(hiding.predict(numbers, kept), seen.predictions, atol=1e-5)
    kept[:, :5] = False
    hidden = hiding.predict(numbers, kept)
    assert np.abs(np.asarray(hidden) - np.asarray(seen.predictions)).max() > 1e-3
    torch.testing.assert_close(hiding.predict(numbers[1:], kept[1:]), hidden[1:])
    phi = np.random.default_rng(0).random((8, 17, 4))
    assert -1 <= concept_effect(hiding, phi, np.ones((3, 4)), prefix_tokens=1) <= 1


def test_models_that_need_every_patch_say_so(vit):
    images, rows = Color("test", size=32), np.array([0])
    for model, why in (
        (vit(class_token=False, global_pool="avg"), "it averages its patches"),
        (vit("Eva", use_rot_pos_emb=True), "size of tensor"),
    ):
        with pytest.raises(ValueError, match=rf"patches cannot be left out of this model \(.*{why}"):
            hide(Backbone(model), images, rows, "left out")
    with pytest.raises(ValueError, match="how: expected one of grey, blur, mean, left out; found 'black'"):
        hide(Backbone(vit()), images, rows, "black")
