"""What every method must do, whichever it is."""

import copy
import inspect
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from pace import Backbone, Explanation, Observations
from pace.baselines import EXPLAINERS, EveryToken, SplitObservations, TrueColors, explainer, reads_uncounted
from pace.observing.extract import observe

SMALL = {
    "pace": {"n_concepts": 4, "n_init": 1, "max_iter": 3, "covariance": "diag", "negatives": 4},
    "pace-paper": {"n_concepts": 4, "n_init": 1, "max_iter": 3, "covariance": "diag", "negatives": 4},
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
    "embedding": {},
    "majority": {},
}
CHANCE = {"shap-kernel", "lime", "shap", "agi", "craft-sobol"}  # another seed, another explanation
PATCHES = {
    "pace",
    "pace-paper",
    "saliency",
    "agi",
    "craft",
    "craft-sobol",
    "craft-per-class",
    "kmeans",
    "gmm",
    "semi-nmf",
}
DATASET = {"pace", "pace-paper", "craft", "craft-sobol", "kmeans", "gmm", "semi-nmf"}
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


def make(name, scene, **options):
    _, train, test, perturbed = scene
    if name == "true-colors":
        rng = np.random.default_rng(0)
        return TrueColors([(o, rng.integers(5, size=(len(o), *o.grid))) for o in (train, test, perturbed)])
    return explainer(name, **SMALL[name] | options)


def _numpys_state():
    return np.random.get_state()[1].copy()  # noqa: NPY002


ALL = [*EXPLAINERS, "true-colors"]


@pytest.fixture(scope="module")
def fitted(scene):
    made = {}

    def get(name):
        if name not in made:
            backbone, train, _, _ = scene
            perturbed = train if name.startswith("pace") else None
            made[name] = make(name, scene).fit(backbone, train, perturbed=perturbed, seed=3)
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
    assert (found.phi is not None) == (name in PATCHES | {"true-colors"})
    if found.phi is not None:
        assert found.phi.shape == (len(test), test.n_tokens, found.n_concepts)
        assert found.patch_map(0, 0).shape == test.grid
    assert method.explain(test, seed=1, patches=False).phi is None


@pytest.mark.parametrize("name", ALL)
def test_the_dataset_level_describes_every_concept_or_is_none(name, scene, fitted):
    concepts = fitted(name).concepts_
    if name in DATASET:
        assert concepts.shape == (fitted(name).explain(scene[2]).n_concepts, scene[2].dim)
    else:
        assert concepts is None


@pytest.mark.parametrize("name", sorted(PATCHES - {"pace", "pace-paper", "craft-sobol"}))
def test_theta_is_the_mean_of_phi(name, scene, fitted):
    found = fitted(name).explain(scene[2])
    np.testing.assert_allclose(found.theta, found.phi.mean(1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_the_seed_decides_and_chance_is_chance(name, scene, fitted):
    backbone, train, test, _ = scene
    again = make(name, scene).fit(backbone, train, perturbed=train if name.startswith("pace") else None, seed=3)
    if name == "true-colors":
        again = fitted(name)
    first = fitted(name).explain(test, seed=1)
    np.testing.assert_array_equal(again.explain(test, seed=1).theta, first.theta)
    differs = not np.array_equal(fitted(name).explain(test, seed=2).theta, first.theta)
    assert differs == (name in CHANCE)


@pytest.mark.parametrize("name", ALL)
def test_the_batch_size_changes_nothing(name, scene):
    if name in ("majority", "true-colors"):
        pytest.skip("has no batches")
    backbone, train, test, _ = scene
    pair = train if name.startswith("pace") else None
    options = {} if name == "embedding" else {"batch_size": None}
    whole = make(name, scene, **options).fit(backbone, train, perturbed=pair)
    cut = make(name, scene, batch_size=5).fit(backbone, train, perturbed=pair)
    first, second = whole.explain(test, seed=1), cut.explain(test, seed=1)
    scale = np.abs(first.theta).max()
    np.testing.assert_allclose(second.theta, first.theta, atol=2e-3 * scale)
    assert np.median(np.abs(second.theta - first.theta)) <= 1e-4 * scale


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ALL)
def test_the_model_the_observations_and_the_grad_mode_are_left_as_they_were(name, mode, scene):
    model = vit().train()
    model.patch_embed.requires_grad_(False)
    backbone = Backbone(model, layer=1, count_cls=True)
    train, test = backbone.observe(pixels(0)), backbone.observe(pixels(1))
    before = copy.deepcopy([(o.embeddings, o.attention, o.predictions) for o in (train, test)])
    weights = copy.deepcopy(model.state_dict())
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    random_state, numpy_state = torch.random.get_rng_state(), _numpys_state()
    method = make(name, (backbone, train, test, test))
    with mode():
        method.fit(backbone, train, perturbed=train if name.startswith("pace") else None)
        method.explain(test)
        assert torch.is_grad_enabled() == (mode is torch.enable_grad)
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert np.array_equal(_numpys_state(), numpy_state)
    for observations, values in zip((train, test), before, strict=True):
        for now, then in zip(
            (observations.embeddings, observations.attention, observations.predictions), values, strict=True
        ):
            assert torch.equal(now, then)


@pytest.mark.parametrize("name", ["kmeans", "gmm", "semi-nmf", "embedding"])
def test_what_asks_no_model_needs_no_predictions(name, scene, fitted):
    backbone, train, test, _ = scene
    bare, other = (Observations(o.embeddings, o.attention, grid=o.grid, prefix_tokens=1) for o in (train, test))
    found = make(name, scene).fit(backbone, bare, seed=3).explain(other)
    np.testing.assert_array_equal(found.theta, fitted(name).explain(test).theta)


@pytest.mark.parametrize("name", ["saliency", "shap", "agi", "craft-per-class"])
def test_without_predictions_the_model_is_asked_for_the_class(name, scene, fitted):
    test = scene[2]
    bare = Observations(test.embeddings, test.attention, grid=test.grid, prefix_tokens=1)
    np.testing.assert_allclose(fitted(name).explain(bare).theta, fitted(name).explain(test).theta, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_arrays_serve_as_well_as_tensors(name, scene, fitted):
    if name == "true-colors":
        pytest.skip("knows its observations by identity")
    test = scene[2]
    arrays = Observations(
        test.embeddings.numpy(), test.attention.numpy(), test.predictions.numpy(), grid=test.grid, prefix_tokens=1
    )
    np.testing.assert_allclose(
        fitted(name).explain(arrays).theta, fitted(name).explain(test).theta, rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("name", ["saliency", "shap", "shap-kernel", "lime", "agi", "craft-sobol"])
def test_observations_of_another_shape_are_refused(name, scene, fitted):
    other = Observations(torch.zeros(2, 5, 16) + 1, torch.ones(2, 5), torch.full((2, 4), 0.25))
    with pytest.raises(ValueError, match="observations have 5 tokens"):
        fitted(name).explain(other)


def test_a_point_explanation_says_that_it_has_no_intervals(fitted, scene):
    found = fitted("saliency").explain(scene[2])
    with pytest.raises(ValueError, match="no uncertainty"):
        found.interval()
    assert found[[0, 2]].theta.shape == (2, 16)


@pytest.mark.parametrize("name", ALL)
def test_nobody_is_given_labels(name, scene):
    method = make(name, scene)
    asked = [list(inspect.signature(call).parameters) for call in (method.fit, method.explain)]
    assert asked == [["backbone", "train", "perturbed", "seed", "device"], ["observations", "seed", "patches"]]


def test_an_unknown_name_is_answered_with_those_there_are():
    with pytest.raises(ValueError, match="expected one of pace, pace-paper, shap"):
        explainer("deeplift")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("shap", {"repeats": 0}), ("shap", {"samples": 2.5}), ("lime", {"samples": 0}), ("lime", {"alpha": -1}),
        ("agi", {"classes": 0}), ("agi", {"step": 0}), ("craft", {"n_concepts": 0}), ("craft", {"designs": 0}),
        ("kmeans", {"n_concepts": "many"}), ("saliency", {"batch_size": 0}), ("embedding", {"batch_size": -1}),
    ],
)  # fmt: skip
def test_values_that_cannot_work_are_refused_when_the_method_is_made(name, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}: expected"):
        explainer(name, **options)


def test_repeats_are_the_papers_where_there_is_chance():
    repeats = {name: make().repeats for name, make in EXPLAINERS.items()}
    assert (repeats["shap"], repeats["lime"], repeats["saliency"]) == (100, 10, 1)


# registers


@pytest.mark.parametrize("name", EXPLAINERS)
def test_registers_are_no_hindrance_on_the_last_layer(name):
    backbone = Backbone(vit(registers=2), count_cls=True)
    train, test = (backbone.observe(pixels(seed)) for seed in (0, 1))
    found = explainer(name, **SMALL[name]).fit(backbone, train).explain(test)
    assert np.isfinite(found.theta).all()


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
        assert same == (name in ("craft", "craft-per-class"))  # which ask the model for importance alone


@pytest.mark.parametrize("name", ["saliency", "shap", "lime", "agi", "craft-sobol"])
def test_observations_on_disk_serve_where_registers_are_read(name, registered, tmp_path):
    backbone, train, test = registered
    stored = EveryToken(backbone).observe(pixels(1), store=tmp_path / "stored")
    method = explainer(name, **SMALL[name]).fit(backbone, train)
    expected = method.explain(test, seed=1)
    scale = np.abs(expected.theta).max()
    np.testing.assert_allclose(method.explain(stored, seed=1).theta, expected.theta, atol=0.02 * scale)  # float16
    some = method.explain(stored[[3, 1]], seed=1) if name in ("saliency", "agi") else None
    if some is not None:
        np.testing.assert_allclose(some.theta, expected.theta[[3, 1]], atol=0.02 * scale)
    one = stored[2]
    assert (one.embeddings.shape, one.rest.shape, one.attention.shape) == ((1, 17, 16), (1, 4, 16), (1, 17))
    torch.testing.assert_close(torch.from_numpy(stored.rest[2]).float(), test.rest[2], rtol=1e-2, atol=1e-2)


# CLS that does not count as a patch, as by default


@pytest.fixture(
    scope="module", params=[(1, 0), (1, 2), (-1, 0), (-1, 2)], ids=lambda p: f"layer {p[0]}, {p[1]} registers"
)
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


@pytest.mark.parametrize("name", ["craft", "craft-sobol", "craft-per-class"])
def test_craft_learns_from_patches_alone_and_asks_the_model_through_cls(name, with_and_without):
    _, (backbone, train, test) = with_and_without
    method = explainer(name, **SMALL[name]).fit(backbone, train)
    found = method.explain(test, seed=1)
    assert found.phi.shape[:2] == (IMAGES, 16)
    assert found.prefix_tokens == 0
    assert (method.importance_.sum(1) > 0).any()
    turned = copy.copy(train)
    object.__setattr__(turned, "rest", train.rest.flip(0))
    plain = explainer(name, **SMALL[name], split=0)
    first, second = (plain.fit(backbone, seen).dictionaries_ for seen in (train, turned))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["saliency", "shap", "lime", "agi", "craft-sobol"])
def test_observations_on_disk_serve_where_cls_does_not_count(name, with_and_without, tmp_path):
    _, (backbone, train, test) = with_and_without
    stored = EveryToken(backbone).observe(pixels(1), store=tmp_path / "stored")
    method = explainer(name, **SMALL[name]).fit(backbone, train)
    expected = method.explain(test, seed=1)
    scale = np.abs(expected.theta).max()
    np.testing.assert_allclose(method.explain(stored, seed=1).theta, expected.theta, atol=0.03 * scale)  # float16
    assert stored[[3, 1]].cls_beside


def test_without_cls_beside_them_the_last_layer_cannot_be_attributed_to():
    backbone = Backbone(vit())
    with pytest.raises(ValueError, match=r"reads 1 tokens .* \(CLS, .*EveryToken\(backbone\)\.observe"):
        explainer("saliency").fit(backbone, backbone.observe(pixels(0)))
    whole = observe(EveryToken(backbone), pixels(0))
    with pytest.raises(ValueError, match="none of the tokens that were observed"):
        explainer("saliency").fit(backbone, SplitObservations.of(whole, 0))
    with pytest.raises(ValueError, match="cls_beside: CLS is the first token, and the first 1 count"):
        SplitObservations.of(whole, 1, cls_beside=True)


def test_every_token_is_seen_in_one_run_of_the_model():
    model, runs = vit(registers=2), []
    backbone = Backbone(model, 1)
    every = EveryToken(backbone)
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    found = every(pixels(0))
    assert len(runs) == 1
    torch.testing.assert_close(found.embeddings, every.split(pixels(0)))
    assert not found.attention[:, :3].any()
    torch.testing.assert_close(found.attention[:, 3:], backbone(pixels(0)).attention)


def test_importing_the_baselines_brings_in_no_optional_library():
    optional = {"captum", "timm", "transformers", "torchvision", "kornia", "matplotlib", "PIL"}
    program = "import sys, pace.baselines; print(' '.join(sys.modules))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not optional & set(found)
