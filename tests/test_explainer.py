import inspect
import warnings

import numpy as np
import pytest
import torch
from planted import planted
from scipy.optimize import linear_sum_assignment
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import GridSearchCV

from pace import PACE, Observations
from pace.fitting.parameters import PARAMETERS

FAMILIES = ["full", "diag", "tied", "low_rank"]


@pytest.fixture(scope="module")
def data():
    return planted(0, images=100, d=24, grid=(4, 5))


@pytest.fixture(scope="module")
def model(data):
    return PACE(8, device="cpu").fit(data.observations, perturbed=data.perturbed)


def matched(model, data):
    """The planted concept that each learned one is, and how far their means are apart."""
    distance = np.linalg.norm(model.means_[:, None] - data.means[None], axis=2)
    found, truth = linear_sum_assignment(distance)
    return truth, distance[found, truth]


@pytest.mark.parametrize("family", FAMILIES)
def test_planted_concepts_are_recovered(data, family, model):
    if family != model.covariance:
        model = PACE(8, covariance=family, n_init=2, device="cpu").fit(data.observations, perturbed=data.perturbed)
    truth, apart = matched(model, data)
    spacing = np.linalg.norm(data.means[:, None] - data.means[None], axis=2)[np.triu_indices(8, 1)].min()
    assert apart.max() < 0.05 * spacing
    assert (truth[model.explain(data.observations).phi.argmax(2)] == data.concepts).mean() >= 0.98
    assert model.converged_
    assert len(model.empty_concepts_) == 0


def test_credible_intervals_cover_the_true_mixtures():
    """With concepts far apart the posterior of θ is exact, and drawn from the prior θ lies inside 90 of 100 times."""
    data = planted(3, images=400, spread=0.05, alpha=0.5, grid=(4, 4), d=16)
    even = Observations(data.observations.embeddings, np.ones((400, 17)))
    model = PACE(8, alpha=0.5, device="cpu").fit(even)
    low, high = model.explain(even).interval(0.9)
    theta = data.theta[:, matched(model, data)[0]]
    assert 0.88 < ((theta >= low) & (theta <= high)).mean() < 0.92


def test_a_concept_speaks_for_a_class_by_how_much_likelier_the_class_is_where_the_concept_is(data, model):
    seen = data.observations
    theta, said = model.transform(seen), np.asarray(seen.predictions)
    expected = theta.T @ said / theta.sum(0)[:, None] - said.mean(0)
    np.testing.assert_allclose(model.evidence_, expected, atol=0.05)  # θ has its prior in it
    for n in range(3):  # it ranks: images with most of the first concept are of the class more often than any others
        mean = [said[np.argsort(-theta[:, k])[:20], n].mean() for k in range(8)]
        assert np.argmax(mean) == model.evidence_[:, n].argmax()
    assert len(np.unique(model.evidence_)) == 24
    found = model.importance(theta[:2], np.array([2, 0]))
    np.testing.assert_allclose(found, theta[:2] * model.evidence_[:, [2, 0]].T)


def test_weights_count_the_patches_of_the_images_and_not_of_their_perturbed_views(data):
    shifted = Observations(
        np.repeat(data.means[3][None, None], 21, 1).repeat(100, 0) + 0.1 * data.perturbed.embeddings,
        data.perturbed.attention, data.perturbed.predictions, prefix_tokens=1,
    )  # fmt: skip
    model = PACE(8, covariance="diag", max_iter=20, n_init=1, device="cpu").fit(data.observations, perturbed=shifted)
    explanation = model.explain(data.observations)
    weight = data.observations.attention / data.observations.attention.sum(1, keepdims=True)
    held = 21 * np.einsum("mj,mjk->k", weight, explanation.phi)
    np.testing.assert_allclose(model.concept_weights_, held, atol=40)
    assert model.concept_weights_.sum() == pytest.approx(2100, rel=0.01)


def test_without_predictions_there_is_no_evidence_and_importance_is_the_share(data, model):
    theta = model.transform(data.observations)[:2]
    blind = Observations(data.observations.embeddings, data.observations.attention, prefix_tokens=1)
    plain = PACE(2, max_iter=1, n_init=1, covariance="diag", device="cpu", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        plain.fit(blind)
    assert plain.evidence_.shape == (2, 0)
    np.testing.assert_array_equal(plain.importance(theta[:, :2], np.array([2, 0])), theta[:, :2])


def test_the_prediction_is_withheld_unless_asked_for(data, model):
    blind = Observations(data.observations.embeddings, data.observations.attention, prefix_tokens=1)
    np.testing.assert_array_equal(model.explain(blind).theta, model.explain(data.observations).theta)
    used = model.explain(data.observations, use_predictions=True).theta
    assert 0 < np.abs(used - model.explain(blind).theta).max() < 0.1
    with pytest.raises(ValueError, match="use_predictions=True needs predictions"):
        model.explain(blind, use_predictions=True)


def test_nearest_patches_are_the_nearest_of_different_images_and_never_the_prefix(data, model):
    found = model.nearest_patches(data.observations, 3, 6)
    distance = np.linalg.norm(data.observations.embeddings[:, 1:] - model.means_[3], axis=2)
    np.testing.assert_allclose(found.distances, np.sort(distance.min(1))[:6], rtol=1e-4)
    np.testing.assert_array_equal(found.images, np.argsort(distance.min(1))[:6])
    np.testing.assert_array_equal(found.patches, distance.argmin(1)[found.images])


def test_it_is_a_scikit_learn_estimator(data, capsys):
    model = PACE(8, covariance="diag", device="cpu", progress=True)
    assert clone(model).get_params() == model.get_params()
    assert model.set_params(alpha=0.5).alpha == 0.5
    theta = model.fit_transform(data.observations)
    assert "learning concepts" in capsys.readouterr().err
    np.testing.assert_array_equal(theta, model.explain(data.observations).theta)
    assert model.n_features_in_ == 24
    fixed = model.score(data.observations)
    assert isinstance(fixed, float)
    learned = clone(model).set_params(alpha="learn").fit(data.observations)
    assert learned.score(data.observations) > fixed
    with pytest.warns(ConvergenceWarning, match="the bound still rises after 1 epochs; raise max_iter"):
        search = GridSearchCV(clone(model).set_params(max_iter=1), {"n_concepts": [1, 8]}, cv=2).fit(data.observations)
    assert search.best_params_ == {"n_concepts": 8}
    assert not search.best_estimator_.converged_


def test_the_bounds_have_three_terms_and_the_score_is_the_last_without_the_prior(data, model):
    terms = np.array(model.lower_bounds_)
    assert terms.shape == (model.n_iter_, 3)
    assert [bound.total for bound in model.lower_bounds_] == pytest.approx(list(terms.sum(1)))
    assert terms[-1].all()
    score = model.score(data.observations, perturbed=data.perturbed)
    prior = model._concepts.gaussians.log_prior(model._prior) / len(data.observations)
    assert score == pytest.approx(terms[-1].sum() - prior, abs=0.05)


def test_unfitted_use_says_so(data):
    model = PACE()
    uses = (model.explain, model.transform, model.score, lambda o: model.nearest_patches(o, 0), model.save)
    for use in uses:
        with pytest.raises(NotFittedError, match="call fit"):
            use(data.observations)
    assert not hasattr(model, "means_")


# -- sturdiness --------------------------------------------------------------------------------------------------------


def random(images=6, tokens=10, d=4, classes=2, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(images, tokens, d)), np.ones((images, tokens)), rng.dirichlet(np.ones(classes), images)


@pytest.mark.parametrize("updates", ["exact", "paper"])
@pytest.mark.parametrize("family", FAMILIES)
def test_explanations_of_odd_data_are_distributions(family, updates):
    def sturdy(observations, perturbed=None, **parameters):
        chosen = {"n_concepts": 3, "max_iter": 3, "n_init": 1, "device": "cpu"} | parameters
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model = PACE(covariance=family, updates=updates, **chosen).fit(observations, perturbed=perturbed)
        explanation = model.explain(observations, use_predictions=observations.n_classes > 0)
        assert explanation.phi.shape == (*observations.shape[:2], chosen["n_concepts"])
        for level in (explanation.theta, explanation.phi):
            assert (level >= 0).all()
            np.testing.assert_allclose(level.sum(-1), 1, atol=1e-5)
        shares = explanation.gamma / explanation.gamma.sum(1, keepdims=True)
        np.testing.assert_allclose(explanation.theta, shares, rtol=1e-5)
        assert np.isfinite(np.array(model.lower_bounds_)).all()
        brief, whole = model.explain(observations, patches=False), model.explain(observations)
        assert brief.phi is None
        np.testing.assert_allclose(brief.gamma, whole.gamma, rtol=1e-3, atol=1e-3)
        return model, whole

    embeddings, attention, predictions = random()
    sparse, spoilt = attention.copy(), embeddings.copy()
    sparse[:, ::2], spoilt[:, ::2] = 0, 1e3  # patches without attention count nothing
    means = [sturdy(Observations(e, sparse, predictions))[0].means_ for e in (embeddings, spoilt)]
    if updates == "exact":
        np.testing.assert_allclose(*means, rtol=1e-4, atol=1e-5)
    else:  # the printed rules let every token pull on φ̄, whatever its attention
        assert np.abs(means).max() < 10
    same = Observations(*(np.repeat(array, 5, 0) for array in random(images=1)))  # the same image five times
    theta = sturdy(same, same)[1].theta
    np.testing.assert_allclose(theta, theta[:1].repeat(5, 0), atol=1e-6)
    flat = Observations(np.full((4, 6, 3), 2.5), np.ones((4, 6)))
    np.testing.assert_allclose(sturdy(flat, n_concepts=2)[0].means_, 2.5, atol=1e-3)
    sturdy(Observations(np.zeros((4, 6, 3)), np.ones((4, 6))), n_concepts=2)
    sturdy(Observations(*random(classes=1)))
    sturdy(Observations(*random(1)), Observations(*random(1, seed=1)))
    _, single = sturdy(Observations(*random(d=1)), n_concepts=1)
    np.testing.assert_array_equal(single.interval(0.9)[0], 1)
    for scale in (1e-3, 1e4):
        sturdy(Observations(scale * embeddings, attention, predictions))
    sturdy(Observations(*random(2, 5)), n_concepts=10)  # as many as patches
    sturdy(Observations(*random(8, 20, 300)), max_iter=2)  # more dimensions than patches
    sturdy(Observations(*(array.astype(np.float16) for array in random())))
    sturdy(Observations(torch.from_numpy((9 * embeddings).astype(np.int64)), attention))


# -- arguments ---------------------------------------------------------------------------------------------------------

WRONG = {
    "n_concepts": [0, True, "many", 2.5, None],
    "parts": [0, 2.5, "many"],
    "max_concepts": [0, "auto"],
    "covariance": ["round", None],
    "updates": ["best", 1],
    "alpha": [-1.0, 0, float("inf"), "guess", ["a"], [[1.0]]],
    "prune": [2, 1, "yes"],
    "n_init": [0, 1.0],
    "max_iter": [0, "all"],
    "refine": [-1, "yes", None],
    "minibatch": [0, -3, 2.5, "auto"],
    "memory": [0, "8 apples", float("nan"), True],
    "distributed": [1, "yes"],
    "seed": [-1, "0", None],
    "device": ["foo", "cuda:99", [0]],
    "dtype": ["float16", torch.int32, None],
    "progress": [1, "yes"],
}


def refusal(observations=None, **parameters):
    with pytest.raises(ValueError, match=r".") as caught:
        PACE(**{"n_concepts": 3, "device": "cpu"} | parameters).fit(observations or Observations(*random()))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_table_of_parameters_is_the_constructor():
    signature = inspect.signature(PACE).parameters
    assert list(PARAMETERS) == list(signature) == list(WRONG)
    for name, parameter in PARAMETERS.items():
        assert parameter.default == signature[name].default
        parameter.check(parameter.default)
        assert f"    {name}" in PACE.__doc__ or f", {name} :" in PACE.__doc__


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_in_one_line(name):
    for value in WRONG[name]:
        message = refusal(**{name: value})
        if name == "device":
            assert message.startswith(f"device: {value!r} cannot be used; None takes what there is")
        else:
            assert message == f"{name}: expected {PARAMETERS[name].expected}; found {value!r}"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"n_init": 10**30}, "n_init: expected a whole number of at least 1 and at most 1000; found 10000"),
        (
            {"refine": 10**30},
            "refine: expected a whole number of at least 0 and at most 1000000 or 'auto'; found 10000",
        ),
        ({"n_concepts": 61}, "n_concepts: 61 is more than the 60 patches with positive attention; use at most 60"),
        ({"alpha": [0.1, 0.2]}, "alpha: expected one positive number or 3 of them; found [0.1, 0.2]"),
        ({"n_concepts": "auto", "updates": "paper"}, "n_concepts: 'auto' needs updates='exact'"),
        ({"refine": 2, "covariance": "diag"}, "refine: needs covariance='tied' and updates='exact'; found 'diag'"),
        ({"prune": True, "alpha": 0.1}, "prune: needs updates='exact' and alpha='learn'"),
        ({"memory": 100}, "memory: 3 tied concepts in 4 dimensions take about"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused_in_one_line(parameters, message):
    assert refusal(**parameters).startswith(message)


def test_data_that_do_not_fit_are_refused_in_one_line(data, model):
    seen, other = data.observations, Observations(*random())
    with pytest.raises(ValueError, match="embeddings have 4 dimensions, but the model was fitted with 24"):
        model.explain(other)
    with pytest.raises(ValueError, match="predictions have 2 classes; the model was fitted with 3"):
        model.score(Observations(*random(d=24)))
    with pytest.raises(ValueError, match=r"perturbed: expected the same images.*\(100, 21, 24\); found \(6, 10, 4\)"):
        PACE(3).fit(seen, perturbed=other)
    with pytest.raises(ValueError, match="perturbed: expected predictions of 3 classes as the images have, or none"):
        PACE(3).fit(seen, perturbed=Observations(seen.embeddings, seen.attention, np.full((100, 2), 0.5)))
    with pytest.raises(ValueError, match="expected predictions of 0 classes"):
        PACE(3).fit(Observations(seen.embeddings, seen.attention), perturbed=seen)
    with pytest.raises(TypeError, match=r"expected pace.Observations; found ndarray"):
        PACE(3).fit(np.zeros((3, 4, 5)))
    assert refusal(Observations(*random()[:2]), refine=2).startswith("refine: needs predictions or perturbed views")
    with pytest.raises(ValueError, match=r"expected shape \(images, .*none of them 0; found \(0, 21, 24\)"):
        PACE(3).fit(seen[:0])
    with pytest.raises(ValueError, match="n: expected at least 1; found -1"):
        model.nearest_patches(seen, 0, n=-1)
    with pytest.raises(IndexError, match="concept 8 of 8"):
        model.nearest_patches(seen, 8)
