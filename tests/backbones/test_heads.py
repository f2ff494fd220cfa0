from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from families import FAMILIES
from torch import nn

from pace.backbones import Backbone, linear_probe, zero_shot
from pace.backbones.heads import Neighbours, fit_head, load_head, save_head, zero_shot_from_names


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
    ("labels", "found"),
    [([0, 0, 2, 2], "1 of 3 classes have no image"), ([-1, 0, 1, 1], "found 3 from"), ([0] * 4, "found 1")],
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


def _clumps(count: int = 60, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % classes
    centres = 4 * torch.randn(classes, 8, generator=generator)
    return centres[labels] + torch.randn(count, 8, generator=generator), labels


@pytest.mark.parametrize("kind", ["probe", "knn", "clusters", "zero-shot"])
def test_every_head_reads_features_alone_and_is_the_same_from_its_file(kind: str, tmp_path: Path) -> None:
    features, labels = _clumps()
    head = zero_shot(torch.randn(3, 8)) if kind == "zero-shot" else fit_head(kind, features, labels)
    save_head(head, tmp_path / "head.safetensors")
    again = load_head(tmp_path / "head.safetensors")
    assert type(again) is type(head)
    new = torch.randn(4, 8, requires_grad=True)
    assert torch.equal(again(new), head(new))
    assert not again(new).isnan().any()
    assert torch.autograd.grad(head(new).sum(), new)[0].isfinite().all(), "explanations by gradients need them"
    assert not any(weight.requires_grad for weight in again.parameters())
    if kind != "zero-shot":
        found = head(features).argmax(1)
        same = found[:, None] == found
        assert torch.equal(same, labels[:, None] == labels), "as the labels group the images"


def test_an_image_is_not_its_own_neighbour() -> None:
    """Else k-NN would say of the images it knows what their labels say, whatever the model sees."""
    features, labels = _clumps()
    wrong = labels.clone()
    wrong[0] = (labels[0] + 1) % 3
    found = fit_head("knn", features, wrong)(features).argmax(1)
    assert found[0] == labels[0]
    everything_alike = Neighbours(torch.ones(4, 2), torch.eye(2)[[0, 0, 0, 1]])(torch.ones(1, 2)).exp()
    torch.testing.assert_close(everything_alike, torch.tensor([[0.75, 0.25]]))


def test_classes_without_an_image_are_told_by_a_probe_and_make_no_clusters() -> None:
    features, labels = torch.randn(8, 4), torch.tensor([0, 2, 5, 101] * 2)
    with pytest.raises(ValueError, match="labels: 98 of 102 classes have no image; a probe needs one of each"):
        fit_head("probe", features, labels)
    assert fit_head("clusters", features, labels)(features).shape == (8, 4)


def test_clusters_need_no_labels_and_the_others_say_that_they_do() -> None:
    features, _ = _clumps()
    assert fit_head("clusters", features)(features).shape == (60, 3)  # one for 20 images
    for kind in ("probe", "knn"):
        with pytest.raises(ValueError, match=f"head: {kind} needs labels"):
            fit_head(kind, features)


@pytest.mark.parametrize("family", ["open_clip-vit", "hf-clip"])
def test_names_of_classes_are_enough_for_a_clip(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = FAMILIES[family].model(), FAMILIES[family].images()
    seen: list[list[str]] = []

    def tokens(texts: list[str], *_: object, **__: object) -> torch.Tensor:
        seen.append(texts)
        return torch.arange(8 * len(texts)).view(len(texts), 8) % 49

    class Words(dict[str, torch.Tensor]):
        def to(self, device: object) -> Words:
            return self

    tokenizer = SimpleNamespace(from_pretrained=lambda _: lambda texts, **how: Words(input_ids=tokens(texts)))
    monkeypatch.setattr("open_clip.tokenize", tokens)
    monkeypatch.setattr("transformers.AutoTokenizer", tokenizer)
    found = Backbone(model, head=zero_shot_from_names(model, ["wren", "crow"]))(images).predictions
    assert seen == [["a photo of a wren.", "a photo of a crow."]]
    with torch.no_grad():
        if family == "hf-clip":
            expected = model(input_ids=tokens(seen[0]), pixel_values=images).logits_per_image
        else:
            expected = model.get_logits(images, tokens(seen[0]))[0]
    torch.testing.assert_close(found, expected.softmax(-1))
    with pytest.raises(ValueError, match="names of 2 classes or more; found 1"):
        zero_shot_from_names(model, ["wren"])
    with pytest.raises(ValueError, match=r"VisionTransformer has no text encoder .*such as openai/clip"):
        zero_shot_from_names(FAMILIES["timm-vit"].model(), ["wren", "crow"])


def test_a_scikit_learn_classifier_is_a_head_if_it_gives_probabilities() -> None:
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import LinearSVC

    family = FAMILIES["timm-vit"]
    model, images = family.model(), family.images(count=6)
    features, names = Backbone(model).pooled(images).numpy(), np.array(["wren", "crow"] * 3)
    prints = set()
    for classifier in (
        make_pipeline(StandardScaler(), LogisticRegression()).fit(features, names),
        RandomForestClassifier(5, random_state=0).fit(features, names),
        RandomForestClassifier(5, random_state=1).fit(features, names),
    ):
        backbone = Backbone(model, head=classifier)
        found = backbone(images).predictions
        torch.testing.assert_close(
            found.double(), torch.from_numpy(classifier.predict_proba(features)).double(), atol=1e-5, rtol=1e-4
        )
        prints |= {backbone.fingerprint(), Backbone(model, head=classifier).fingerprint()}
    assert len(prints) == 3
    with pytest.raises(ValueError, match=r"head: LinearSVC has no predict_proba.*CalibratedClassifierCV"):
        Backbone(model, head=LinearSVC().fit(features, names))
    with pytest.raises(ValueError, match="head: this LogisticRegression is not fitted"):
        Backbone(model, head=LogisticRegression())
