from __future__ import annotations

import pytest
import torch
from families import FAMILIES
from torch import nn

from pace.backbones import Backbone, linear_probe, zero_shot


@pytest.mark.parametrize("classes", [2, 4])
def test_a_probe_is_the_logistic_regression_it_was_fitted_by(classes: int) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import scale

    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(80) % classes
    features = 3 * torch.randn(80, 6, generator=generator) + labels[:, None] + 5
    features[:, 0] = 1.0  # a feature that never changes must not matter
    probe = linear_probe(features, labels)
    expected = LogisticRegression(max_iter=1000).fit(scale(features.double().numpy()), labels)
    expected = expected.predict_proba(scale(features.double().numpy()))
    torch.testing.assert_close(probe(features).softmax(-1).double(), torch.from_numpy(expected), atol=1e-4, rtol=1e-3)
    assert isinstance(probe, nn.Linear)
    assert not probe.weight.requires_grad


@pytest.mark.parametrize(
    ("labels", "found"), [([0, 0, 2, 2], "found 2 from"), ([1, 1, 2, 2], "found 2 from"), ([0] * 4, "found 1")]
)
def test_probes_need_an_example_of_every_class(labels: list[int], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        linear_probe(torch.randn(4, 3), labels)


def test_zero_shot_predictions_are_those_of_clip() -> None:
    """transformers' CLIPModel compares images with texts itself: the same scores must come out."""
    family = FAMILIES["hf-clip"]
    model, images = family.model(), family.images()
    texts = torch.randint(0, 98, (3, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=texts, pixel_values=images).logits_per_image.softmax(-1)
        text_features = model.get_text_features(texts).pooler_output
    found = Backbone(model, head=zero_shot(text_features, float(model.logit_scale.exp())))(images).predictions
    assert found is not None
    torch.testing.assert_close(found, expected)


def test_zero_shot_predictions_are_those_of_open_clip() -> None:
    family = FAMILIES["open_clip-vit"]
    model, images = family.model(), family.images()
    texts = torch.randint(0, 50, (3, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.get_logits(images, texts)[0].softmax(-1)
        head = zero_shot(model.encode_text(texts), float(model.logit_scale.exp()))
    found = Backbone(model, head=head)(images).predictions
    assert found is not None
    torch.testing.assert_close(found, expected)


def test_a_head_may_be_any_function_and_replaces_the_models_own() -> None:
    family = FAMILIES["timm-vit"]
    model, images = family.model(), family.images()
    found = Backbone(model, head=lambda features: features[:, :3])(images).predictions
    pooled = model.forward_head(model.forward_features(images), pre_logits=True)
    torch.testing.assert_close(found, pooled[:, :3].softmax(-1).detach())
    with pytest.raises(ValueError, match=r"expected logits of shape \(images, classes\); found \(2, 1, 32\)"):
        Backbone(model, head=lambda features: features[:, None])(images)


def test_a_head_of_another_precision_is_met_halfway() -> None:
    family = FAMILIES["timm-vit"]
    found = Backbone(family.model().to(torch.bfloat16), head=nn.Linear(32, 4).double())(family.images())
    assert found.embeddings.dtype == torch.bfloat16
    assert found.predictions is not None
    assert found.predictions.dtype == torch.float32


@pytest.mark.parametrize(
    ("family", "pooled"),
    [
        ("timm-vit", lambda m, x: m.forward_head(m.forward_features(x), pre_logits=True)),
        ("timm-siglip", lambda m, x: m.forward_head(m.forward_features(x), pre_logits=True)),
        ("timm-swin", lambda m, x: m.forward_head(m.forward_features(x), pre_logits=True)),
        ("hf-vit", lambda m, x: m.vit(x).last_hidden_state[:, 0]),
        ("hf-dinov2", lambda m, x: _cls_and_mean(m.dinov2(x).last_hidden_state)),
        ("hf-clip-projection", lambda m, x: m(x).image_embeds),
        ("hf-clip", lambda m, x: m.get_image_features(x).pooler_output),
        ("hf-siglip", lambda m, x: m(x).pooler_output),
        ("hf-swin", lambda m, x: m.swin(x).pooler_output),
        ("hf-beit-shared-bias", lambda m, x: m(x).pooler_output),
        ("torchvision-swin", lambda m, x: m.norm(m.features(x)).mean((1, 2))),
        ("open_clip-vit", lambda m, x: m.encode_image(x)),
    ],
)
@torch.no_grad()
def test_pooled_features_are_what_the_librarys_head_reads(family: str, pooled: object) -> None:
    model, images = FAMILIES[family].model(), FAMILIES[family].images()
    torch.testing.assert_close(Backbone(model).pooled(images), pooled(model, images), atol=1e-5, rtol=1e-5)  # type: ignore[operator]


def _cls_and_mean(tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], 1)
