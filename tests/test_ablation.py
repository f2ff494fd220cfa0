"""Concepts taken away, on planted predictions and on a tiny transformer that learned a shortcut."""

import numpy as np
import pytest
import torch
from torch import nn

import pace
from pace import PACE, Backbone
from pace.ablation import Ablation, hide_somehow, numbers, take_away
from pace.metrics import Hiding

PATCHES, GRID = 36, (6, 6)
RNG = np.random.default_rng(0)


def hidden(evidence, attention=None):
    """p(class 1) is the share of the evidence (n, patches) that is kept."""

    def predict(images, kept):
        share = (evidence[images] * kept).sum(1) / evidence[images].sum(1)
        return np.stack([1 - share, share], 1)

    shape = evidence.shape
    return Hiding(np.arange(len(evidence)), predict, np.ones(shape) if attention is None else attention)


def test_the_concept_that_counts_changes_the_prediction_and_others_do_not():
    concept = np.repeat([0, 1, 2], 12)
    hiding = hidden((concept == 1)[None] * 1.0, attention=(1 + 2.0 * (concept == 1))[None])
    phi, twice = np.eye(3)[concept][None], np.zeros(3, int)
    done = take_away(hiding, phi, twice, [[1], [0], [0, 1]], grid=GRID)
    assert done.of_prediction()["before"] == pytest.approx([1, 1, 1])
    assert done.of_prediction()["after"] == pytest.approx([0, 1, 0])
    assert done.change[0] == pytest.approx([1, -1])
    assert done.patches == pytest.approx([12, 12, 24])
    np.testing.assert_array_equal(done.low, done.after)  # nothing is uncertain, so the interval has no width
    assert (done.area[:2, 1] > 0).all()  # as many patches elsewhere hold only some of the evidence
    assert done.attention[0, 1] < done.attention[1, 1]  # the concept gets more attention, so more patches go by lot


def test_an_uncertain_concept_has_the_interval_of_what_may_come_out():
    concept = np.repeat([0, 1], 18)
    sure, unsure = np.eye(2)[concept], np.full((PATCHES, 2), 0.5)
    unsure[concept == 1] = [0.4, 0.6]
    unsure[concept == 0] = [1.0, 0.0]
    hiding = hidden(np.stack([concept == 1] * 2) * 1.0)
    done = take_away(hiding, np.stack([sure, unsure]), np.arange(2), [[1], [1]], compare=False)
    assert done.after[:, 1] == pytest.approx([0, 0.4], abs=0.03)  # it is there with probability 0.6
    assert (done.low[1, 1], done.high[1, 1]) == (0, 1)
    assert np.isnan(done.area).all()


@pytest.mark.parametrize("block", [1, 6, 36])
def test_the_interval_holds_the_true_effect_whether_patches_err_alone_or_together(block):
    images = 400
    chance = RNG.beta(0.3, 0.3, (images, PATCHES // block)).repeat(block, 1)
    true = (RNG.random((images, PATCHES // block)).repeat(block, 1) < chance)[:, :PATCHES]
    evidence = RNG.random((images, PATCHES)) + 0.1
    hiding, phi = hidden(evidence), np.stack([chance, 1 - chance], 2)
    done = take_away(hiding, phi, np.arange(images), [[0]] * images, compare=False)
    truth = hiding.predict(np.arange(images), ~true)[:, 1]
    inside = (done.low[:, 1] - 1e-9 <= truth) & (truth <= done.high[:, 1] + 1e-9)
    assert inside.mean() >= 0.85
    assert done.after[:, 1].mean() == pytest.approx(truth.mean(), abs=0.03)


@pytest.fixture(scope="module")
def biased():
    """A transformer that tells two kinds of objects, and nearly always by a tag in the corner instead."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, mlp_ratio=2, num_classes=2
    )
    model.pretrained_cfg = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3}

    def draw(count, tagged):
        label = torch.arange(count) % 2
        images = 0.5 + 0.05 * torch.randn(count, 3, 32, 32)
        for image, kind, tag in zip(images, label, tagged(label), strict=True):
            row, column = (8 + 8 * torch.randint(2, (2,))).tolist()
            image[:, row : row + 8, column : column + 8] += torch.tensor([0.1, -0.1, 0.0])[:, None, None] * (
                2 * kind - 1
            )
            if tag:
                image[:, :8, :8] = torch.tensor([1.0, 0.1, 0.8])[:, None, None]
        return images.clamp(0, 1), label

    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    images, label = draw(256, lambda label: (label == 1) & (torch.rand(len(label)) < 0.9))
    for _ in range(60):
        some = torch.randint(len(images), (64,))
        loss = nn.functional.cross_entropy(model(images[some] * 2 - 1), label[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    backbone = Backbone(model.eval(), layer=0, attention_layer=-1)
    concepts = PACE(4, covariance="diag", parts=None, refine=0, seed=0).fit(backbone.observe(images))
    return backbone, concepts, images, draw(40, lambda label: torch.ones(len(label)))


def test_without_the_shortcut_the_prediction_is_repaired(biased):
    backbone, concepts, _, (tagged, label) = biased
    tag = int(concepts.explain(backbone.observe(tagged)).phi[:, 0].mean(0).argmax())
    done = pace.ablate(backbone, concepts, tagged, tag)
    wrong = (label == 0).numpy() & (done.predicted == 1)
    assert wrong.sum() >= 10
    assert (done.after[wrong].argmax(1) == 0).mean() >= 0.9
    assert (done.area[wrong].argmax(1) == 1).mean() >= 0.6


def test_the_shortcut_is_listed_and_what_does_not_make_the_class_is_not(biased):
    backbone, concepts, images, (tagged, _) = biased
    tag = int(concepts.explain(backbone.observe(tagged)).phi[:, 0].mean(0).argmax())
    objects = np.zeros((len(images), 4, 4))
    objects[:, 1:3, 1:3] = 1
    found = pace.shortcuts(backbone, concepts, images, objects=objects)
    assert (found[0].concept, found[0].label) == (tag, 1)  # the object itself may follow, which class 1 alone has
    assert all(one.taken - one.elsewhere >= 0.5 for one in found)
    one = found[0]
    assert one.outside > 0.5
    assert one.alone >= 0.9
    every = pace.shortcuts(backbone, concepts, images, objects=objects, least=-1)
    assert found == every[: len(found)]
    assert len(every) > len(found)
    assert all(one.outside > 0.5 or one.alone >= 0.9 for one in every)


def test_where_one_class_is_predicted_there_are_no_shortcuts(biased):
    backbone, concepts, _, (tagged, label) = biased
    assert not pace.shortcuts(backbone, concepts, tagged[label == 1][:4])  # there are no others to put it into


def test_a_concept_can_be_put_in_the_place_of_another(biased):
    backbone, concepts, images, (tagged, _) = biased
    phi = concepts.explain(backbone.observe(tagged)).phi
    tag, rest = int(phi[:, 0].mean(0).argmax()), int(phi[:, -1].mean(0).argmax())
    done = pace.ablate(backbone, concepts, tagged, rest, to=tag, reference=images)
    assert isinstance(done, Ablation)
    assert (done.after[:, 1] >= done.before[:, 1] - 0.05).all()  # tags everywhere
    with pytest.raises(ValueError, match="no patch of the reference images shows this concept"):
        pace.ablate(backbone, concepts, tagged, tag, to=tag, reference=torch.full((1, 3, 32, 32), 0.5))


def test_one_picture_is_enough_and_json_has_the_predicted_class(biased):
    backbone, concepts, _, (tagged, _) = biased
    one = pace.ablate(backbone, concepts, tagged[:1], [0, 1, 2, 3])
    row = numbers(one)[0]
    assert row.keys() == {"class", "before", "after", "low", "high", "area", "attention"}
    assert row["before"] == pytest.approx(float(backbone(tagged[:1] * 2 - 1).predictions.max()), abs=1e-3)
    with pytest.raises(ValueError, match="concepts: expected numbers from 0 to 3; found 4"):
        pace.ablate(backbone, concepts, tagged[:1], 4)


def test_a_model_that_averages_its_patches_gets_the_mean_patch_instead():
    timm = pytest.importorskip("timm")
    model = timm.models.VisionTransformer(
        img_size=32,
        patch_size=8,
        embed_dim=16,
        depth=1,
        num_heads=2,
        num_classes=2,
        class_token=False,
        global_pool="avg",
    )
    images = torch.rand(2, 3, 32, 32)
    hiding = hide_somehow(Backbone(model), images, np.arange(2))
    assert np.isfinite(hiding.predictions(np.arange(2), np.zeros((2, 16), bool))).all()
    with pytest.raises(ValueError, match="it averages its patches"):
        hide_somehow(Backbone(model), images, np.arange(2), "left out")
