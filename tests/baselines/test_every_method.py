"""What every method must do, whichever it is."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor

from pace import Backbone, Explanation, Observations
from pace.baselines import EXPLAINERS, EveryToken, SplitObservations, TrueColors, explainer, reads_uncounted
from pace.observing.extract import observe

SMALL = {
    "pace": {"n_concepts": 4, "n_init": 1, "max_iter": 3, "covariance": "diag"},
    "pace-paper": {"n_concepts": 4, "n_init": 1, "max_iter": 3, "covariance": "diag"},
    "shap": {"samples": 3},
    "shap-kernel": {"samples": 40},
    "lime": {"samples": 60, "alpha": 0.001},
    "saliency": {},
    "agi": {"classes": 2, "max_steps": 4},
    "craft": {"n_concepts": 5, "designs": 8},
    "craft-sobol": {"n_concepts": 5, "designs": 8},
    "craft-per-class": {"n_concepts": 5, "designs": 8},
    "kmeans": {"n_concepts": 5},
    "gmm": {"n_concepts": 5},
    "semi-nmf": {"n_concepts": 5},
    "sae": {"n_concepts": 5, "steps": 20},
    "sae-8x": {"n_concepts": 2, "steps": 20},
    "sae-matryoshka": {"n_concepts": 8, "steps": 20},
    "position": {"n_concepts": 5},
    "attention-rank": {"n_concepts": 5},
    "lot": {"n_concepts": 5},
    "random": {"n_concepts": 5},
    "embedding": {},
    "majority": {},
}
CHANCE = {"shap-kernel", "lime", "shap", "agi", "craft-sobol"}  # another seed, another explanation
DATASET = {
    *("pace", "pace-paper", "craft", "craft-sobol", "kmeans", "gmm", "semi-nmf"),
    *("sae", "sae-8x", "sae-matryoshka", "lot", "random"),
}
PATCHES = DATASET | {"saliency", "agi", "craft-per-class", "position", "attention-rank"}
IMAGES = 12

pytestmark = pytest.mark.filterwarnings("ignore:the bound still rises")


def vit(registers: int = 0) -> torch.nn.Module:
    import timm.models

    torch.manual_seed(0)
    model = timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=16, depth=3, num_heads=2, num_classes=4, reg_tokens=registers
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def pixels(seed: int) -> Tensor:
    return torch.rand(IMAGES, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def scene():
    """A backbone at an inner layer, so that h is curved and reads every token; train, and two views of other images."""
    backbone = Backbone(vit(), layer=1, count_cls=True)
    test = pixels(1)
    views = (pixels(0), test, (test + 0.05 * pixels(2)).clamp(0, 1))
    return backbone, *(backbone.observe(view) for view in views)


def make(name, scene):
    _, train, test, perturbed = scene
    if name == "true-colors":
        rng = np.random.default_rng(0)
        return TrueColors([(o, rng.integers(5, size=(len(o), *o.grid))) for o in (train, test, perturbed)])
    return explainer(name, **SMALL[name])


ALL = [*EXPLAINERS, "true-colors"]


@pytest.fixture(scope="module")
def fitted(scene):
    made = {}

    def get(name):
        if name not in made:
            backbone, train, _, _ = scene
            made[name] = make(name, scene).fit(backbone, train, perturbed=train, seed=3)
        return made[name]

    return get


@pytest.mark.parametrize("name", ALL)
def test_it_explains_every_image_in_the_shape_all_share(name, scene, fitted):
    test = scene[2]
    method = fitted(name)
    found = method.explain(test, seed=1)
    assert isinstance(found, Explanation)
    assert method.name == name
    assert found.theta.shape[0] == len(test)
    assert found.theta.dtype == np.float32
    assert np.isfinite(found.theta).all()
    assert (found.grid, found.prefix_tokens) == (test.grid, test.prefix_tokens)
    if name in ("shap", "shap-kernel", "lime", "saliency", "agi", "embedding"):
        assert found.n_concepts == test.dim
    assert (found.phi is not None) == method.patch_level == (name in PATCHES | {"true-colors"})
    if found.phi is not None:
        assert found.phi.shape == (len(test), test.n_tokens, found.n_concepts)
        assert found.patch_map(0, 0).shape == test.grid
    if name in PATCHES - {"pace", "pace-paper", "craft-sobol", "lot"}:
        weights = None if name in ("saliency", "agi") else test.attention / test.attention.sum(1, keepdim=True)
        mean = found.phi.mean(1) if weights is None else np.einsum("mj,mjk->mk", weights, found.phi)
        np.testing.assert_allclose(found.theta, mean, rtol=1e-4, atol=1e-6)
    assert method.explain(test, seed=1, patches=False).phi is None
    if name in DATASET:
        assert method.concepts_.shape == (found.n_concepts, test.dim)
    else:
        assert method.concepts_ is None


@pytest.mark.parametrize("name", ALL)
def test_it_says_how_much_each_concept_matters_in_some_of_the_images(name, scene, fitted):
    rows, method = [1, 4, 7], fitted(name)
    found = method.explain(scene[2], seed=1)[rows]
    importance = method.importance(scene[2][rows], found)
    if name.startswith("pace"):
        classes = scene[2].predictions[rows].argmax(1).numpy()
        np.testing.assert_allclose(importance, found.theta * method.model_.evidence_[:, classes].T)
    elif name in ("craft", "craft-per-class"):  # Sobol indices, as one image alone has them
        assert importance.shape == found.theta.shape
        np.testing.assert_allclose(method.importance(scene[2][[4]], found[1])[0], importance[1], rtol=1e-3, atol=1e-5)
        assert (importance >= 0).all()
        assert not np.allclose(importance, found.theta)
    else:
        np.testing.assert_array_equal(importance, found.theta)


@pytest.mark.parametrize("name", ALL)
def test_the_seed_decides_and_chance_is_chance(name, scene, fitted):
    """From arrays as well as tensors."""
    backbone, train, test, _ = scene
    first = fitted(name).explain(test, seed=1)
    differs = not np.array_equal(fitted(name).explain(test, seed=2).theta, first.theta)
    assert differs == (name in CHANCE)
    if name == "true-colors":
        return  # it knows its observations by identity
    again = make(name, scene).fit(backbone, train, perturbed=train, seed=3)
    arrays = Observations(
        *(tensor.numpy() for tensor in (test.embeddings, test.attention, test.predictions)), test.grid, prefix_tokens=1
    )
    second, scale = again.explain(arrays, seed=1).theta, np.abs(first.theta).max()
    np.testing.assert_allclose(second, first.theta, atol=2e-3 * scale)
    assert np.median(np.abs(second - first.theta)) <= 1e-4 * scale


@pytest.mark.parametrize("name", ALL)
def test_the_model_the_observations_and_the_random_state_are_left_as_they_were(name):
    model = vit().train()
    model.patch_embed.requires_grad_(False)
    backbone = Backbone(model, layer=1, count_cls=True)
    train, test = backbone.observe(pixels(0)), backbone.observe(pixels(1))

    def state():
        observed = [t for o in (train, test) for t in (o.embeddings, o.attention, o.predictions)]
        random = torch.from_numpy(np.random.get_state()[1].copy())  # noqa: NPY002
        return [t.clone() for t in (*observed, *model.state_dict().values(), torch.random.get_rng_state(), random)]

    before = state()
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    method = make(name, (backbone, train, test, test))
    with torch.inference_mode():  # in which no gradient can be taken unless a method leaves it
        method.fit(backbone, train, perturbed=train)
        method.explain(test)
        assert torch.is_inference_mode_enabled()
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted
    assert all(torch.equal(now, then) for now, then in zip(state(), before, strict=True))


@pytest.mark.parametrize("name", ["saliency", "shap", "agi", "craft-per-class", "kmeans"])
def test_without_predictions_the_model_is_asked_for_the_class(name, scene, fitted):
    test = scene[2]
    bare = Observations(test.embeddings, test.attention, grid=test.grid, prefix_tokens=1)
    np.testing.assert_allclose(fitted(name).explain(bare).theta, fitted(name).explain(test).theta, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["saliency", "lime", "craft-sobol"])
def test_observations_of_another_shape_are_refused(name, fitted):
    other = Observations(torch.zeros(2, 5, 16) + 1, torch.ones(2, 5), torch.full((2, 4), 0.25))
    with pytest.raises(ValueError, match="observations have 5 tokens"):
        fitted(name).explain(other)
    with pytest.raises(ValueError, match="is not fitted"):
        explainer(name).explain(other)


def test_a_point_explanation_says_that_it_has_no_intervals(fitted, scene):
    found = fitted("saliency").explain(scene[2])
    with pytest.raises(ValueError, match="no uncertainty"):
        found.interval()
    assert found[[0, 2]].theta.shape == (2, 16)


def test_an_unknown_name_is_answered_with_those_there_are():
    with pytest.raises(ValueError, match="expected one of pace, pace-paper, shap"):
        explainer("deeplift")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("shap", {"repeats": 0}), ("shap", {"samples": 2.5}), ("lime", {"samples": 0}), ("lime", {"alpha": -1}),
        ("agi", {"classes": 0}), ("agi", {"step": 0}), ("craft", {"n_concepts": 0}), ("craft", {"designs": 0}),
        ("kmeans", {"n_concepts": "many"}), ("kmeans", {"sample": 0}),
    ],
)  # fmt: skip
def test_values_that_cannot_work_are_refused_when_the_method_is_made(name, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}: expected"):
        explainer(name, **options)


# registers


@pytest.fixture(scope="module")
def registered():
    """A backbone at an inner layer whose h reads four registers, and two sets of observations with these beside them."""
    backbone = Backbone(vit(registers=4), layer=1, count_cls=True)
    return backbone, *(EveryToken(backbone).observe(pixels(seed)) for seed in (0, 1))


def test_registers_of_an_inner_layer_are_asked_for(registered):
    backbone, train, _ = registered
    plain = backbone.observe(pixels(0))
    with pytest.raises(ValueError, match="reads 4 tokens"):
        explainer("saliency").fit(backbone, plain)
    assert reads_uncounted(backbone)
    assert not reads_uncounted(Backbone(vit(registers=4), count_cls=True))
    for name in ("embeddings", "attention", "predictions"):
        torch.testing.assert_close(getattr(train, name), getattr(plain, name))
    assert (train.grid, train.prefix_tokens, train.rest.shape) == (plain.grid, 1, (IMAGES, 4, 16))
    whole = observe(EveryToken(backbone), pixels(0))
    torch.testing.assert_close(train.rest, whole.embeddings[:, 1:5])
    assert not whole.attention[:, 1:5].any()


@pytest.mark.parametrize("name", EXPLAINERS)
def test_registers_of_an_inner_layer_are_part_of_the_model_and_not_of_the_explanation(name, registered):
    backbone, train, test = registered
    method = explainer(name, **SMALL[name]).fit(backbone, train)
    found = method.explain(test, seed=1)
    assert np.isfinite(found.theta).all()
    if found.phi is not None:
        assert found.phi.shape[:2] == (IMAGES, 17)
        assert found.patch_map(0, 0).shape == test.grid
    if hasattr(method, "head_"):
        (part,) = method.head_.parts(test, IMAGES)
        with torch.no_grad():
            torch.testing.assert_close(part.logits(part.tokens).softmax(1), test.predictions)
        turned = copy.copy(test)
        object.__setattr__(turned, "rest", test.rest.flip(0))
        same = np.array_equal(method.explain(turned, seed=1).theta, found.theta)
        assert same == (name in ("craft", "craft-per-class"))  # which run the model for importance alone


# CLS that does not count as a patch, as by default


@pytest.fixture(scope="module", params=[(1, 2), (-1, 0)], ids=lambda p: f"layer {p[0]}, {p[1]} registers")
def with_and_without(request):
    """What is needed where CLS counts, and where it does not: backbone, train, test."""
    layer, registers = request.param
    both = [Backbone(vit(registers), layer, count_cls=counted) for counted in (True, False)]
    return [(backbone, *(EveryToken(backbone).observe(pixels(seed)) for seed in (0, 1))) for backbone in both]


@pytest.mark.parametrize("name", ["saliency", "shap", "shap-kernel", "lime", "agi"])
def test_attributions_explain_through_cls_whether_it_counts_or_not(name, with_and_without):
    (backbone, train, test), (other, patches, more) = with_and_without
    assert reads_uncounted(other)
    assert (patches.n_tokens, patches.prefix_tokens, patches.cls_beside, train.cls_beside) == (16, 0, True, False)
    expected = explainer(name, **SMALL[name]).fit(backbone, train).explain(test, seed=1)
    found = explainer(name, **SMALL[name]).fit(other, patches).explain(more, seed=1)
    assert np.abs(expected.theta).max() > 0
    np.testing.assert_array_equal(found.theta, expected.theta)
    if expected.phi is not None:  # how much of it is CLS can be seen
        np.testing.assert_array_equal(found.phi, expected.phi)
        assert found.prefix_tokens == 1
        assert found.patch_map(0, 0).shape == more.grid


@pytest.mark.parametrize("name", ["craft", "craft-per-class"])
def test_craft_learns_from_patches_alone_and_asks_the_model_through_cls(name, with_and_without):
    _, (backbone, train, test) = with_and_without
    method = explainer(name, **SMALL[name]).fit(backbone, train)
    found = method.explain(test, seed=1)
    assert found.phi.shape[:2] == (IMAGES, 16)
    assert found.prefix_tokens == 0
    turned = copy.copy(train)
    object.__setattr__(turned, "rest", train.rest.flip(0))
    plain = explainer(name, **SMALL[name], split=0)
    first, second = (plain.fit(backbone, seen).dictionaries_ for seen in (train, turned))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["saliency", "shap", "craft-sobol"])
def test_observations_on_disk_serve_where_cls_does_not_count(name, with_and_without, tmp_path):
    _, (backbone, train, test) = with_and_without
    stored = EveryToken(backbone).observe(pixels(1), store=tmp_path / "stored")
    method = explainer(name, **SMALL[name]).fit(backbone, train)
    expected = method.explain(test, seed=1)
    scale = np.abs(expected.theta).max()
    np.testing.assert_allclose(method.explain(stored, seed=1).theta, expected.theta, atol=0.03 * scale)  # float16
    some, one = stored[[3, 1]], stored[2]
    assert some.cls_beside
    if name == "saliency":
        np.testing.assert_allclose(method.explain(some).theta, expected.theta[[3, 1]], atol=0.03 * scale)
    assert (one.embeddings.shape, one.rest.shape) == ((1, 16, 16), (1, *test.rest.shape[1:]))
    torch.testing.assert_close(torch.tensor(np.asarray(one.rest)).float(), test.rest[2:3], rtol=1e-2, atol=1e-2)


def test_without_cls_beside_them_the_last_layer_cannot_be_attributed_to():
    backbone = Backbone(vit())
    with pytest.raises(ValueError, match=r"reads 1 tokens .* \(CLS, .*EveryToken\(backbone\)\.observe"):
        explainer("saliency").fit(backbone, backbone.observe(pixels(0)))
    whole = observe(EveryToken(backbone), pixels(0))
    with pytest.raises(ValueError, match="none of the observed tokens"):
        explainer("saliency").fit(backbone, SplitObservations.of(whole, 0))
