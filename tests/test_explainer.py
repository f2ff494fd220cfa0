import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import planted
from scipy.optimize import linear_sum_assignment
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import GridSearchCV

import pace.explainer
import pace.fitting.loop
import pace.fitting.start
from pace import PACE, Observations


@pytest.fixture(scope="module")
def data():
    return planted(0)


@pytest.fixture(scope="module")
def model(data):
    return PACE(8, device="cpu").fit(data.observations, perturbed=data.perturbed)


@pytest.mark.parametrize("family", ["full", "diag", "tied", "low_rank"])
def test_planted_concepts_are_recovered(data, family):
    model = PACE(8, covariance=family, rank=4, device="cpu").fit(data.observations, perturbed=data.perturbed)
    distance = np.linalg.norm(model.means_[:, None] - data.means[None], axis=2)
    found, truth = linear_sum_assignment(distance)
    spacing = np.linalg.norm(data.means[:, None] - data.means[None], axis=2)[np.triu_indices(8, 1)].min()
    assert distance[found, truth].max() < 0.05 * spacing
    explanation = model.explain(data.observations)
    named = np.empty(8, int)
    named[found] = truth
    assert (named[explanation.phi.argmax(2)] == data.concepts).mean() >= 0.98
    assert model.converged_
    assert len(model.empty_concepts_) == 0


@given(
    seed=st.integers(0, 10_000),
    k=st.integers(1, 6),
    family=st.sampled_from(["full", "diag", "tied", "low_rank"]),
    updates=st.sampled_from(["exact", "paper"]),
    scale=st.sampled_from([1e-3, 1.0, 1e4]),
)
@settings(max_examples=25, deadline=None)
def test_every_level_of_an_explanation_is_a_distribution(seed, k, family, updates, scale):
    rng = np.random.default_rng(seed)
    shape = rng.integers(1, 8), rng.integers(k, 12), rng.integers(1, 6)
    attention = rng.dirichlet(np.full(shape[1], 0.2), shape[0]) + 1e-9
    observations = Observations(scale * rng.normal(size=shape), attention, rng.dirichlet(np.ones(3), shape[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = PACE(k, covariance=family, updates=updates, rank=1, max_iter=3, device="cpu").fit(observations)
    explanation = model.explain(observations, use_predictions=True)
    assert explanation.theta.shape == explanation.gamma.shape == (shape[0], k)
    assert explanation.phi.shape == (*shape[:2], k)
    for level in (explanation.theta, explanation.phi):
        assert (level >= 0).all()
        np.testing.assert_allclose(level.sum(-1), 1, atol=1e-5)
    np.testing.assert_allclose(
        explanation.theta, explanation.gamma / explanation.gamma.sum(1, keepdims=True), rtol=1e-5
    )


def test_credible_intervals_cover_the_true_mixtures():
    """With concepts far apart the posterior of θ is exact, and drawn from the prior θ lies inside 90 of 100 times."""
    data = planted(3, images=400, spread=0.05, alpha=0.5, grid=(4, 4))
    even = Observations(data.observations.embeddings, np.ones((400, 17)))
    model = PACE(8, init=data.means, alpha=0.5, device="cpu").fit(even)
    low, high = model.explain(even).interval(0.9)
    covered = ((data.theta >= low) & (data.theta <= high)).mean()
    assert 0.88 < covered < 0.92


def test_the_prediction_is_withheld_unless_asked_for(data, model):
    blind = Observations(data.observations.embeddings, data.observations.attention)
    np.testing.assert_array_equal(model.explain(blind).theta, model.explain(data.observations).theta)
    used = model.explain(data.observations, use_predictions=True).theta
    assert 0 < np.abs(used - model.explain(blind).theta).max() < 0.1
    with pytest.raises(ValueError, match="use_predictions=True needs predictions"):
        model.explain(blind, use_predictions=True)


@pytest.mark.parametrize("updates", ["exact", "paper"])
@pytest.mark.parametrize("family", ["full", "tied"])
def test_mixtures_are_the_same_with_patches_and_without(data, family, updates):
    model = PACE(8, covariance=family, updates=updates, max_iter=30, tol=1e-2, device="cpu").fit(data.observations)
    whole, brief = model.explain(data.observations), model.explain(data.observations, patches=False)
    np.testing.assert_allclose(brief.gamma, whole.gamma, rtol=1e-3, atol=1e-3)
    assert brief.phi is None


def test_nearest_patches_are_the_nearest_and_never_the_prefix(data, model):
    found = model.nearest_patches(data.observations, 3, 6)
    patches = data.observations.embeddings[:, 1:]
    distance = np.linalg.norm(patches - model.means_[3], axis=2)
    expected = np.sort(distance.ravel())[:6]
    np.testing.assert_allclose(found.distances, expected, rtol=1e-4)
    np.testing.assert_allclose(distance[found.images, found.patches], expected, rtol=1e-4)


def test_it_is_a_scikit_learn_estimator(data):
    model = PACE(8, covariance="diag", device="cpu", progress=False)
    assert clone(model).get_params() == model.get_params()
    assert model.set_params(alpha=0.5).alpha == 0.5
    theta = model.fit_transform(data.observations)
    np.testing.assert_array_equal(theta, model.explain(data.observations).theta)
    assert model.n_features_in_ == 32
    assert isinstance(model.score(data.observations), float)
    better = PACE(8, covariance="diag", device="cpu").fit(data.observations).score(data.perturbed)
    assert better > PACE(2, covariance="diag", device="cpu").fit(data.observations).score(data.perturbed)


def test_the_score_is_the_bound_of_the_last_epoch_without_the_prior(data):
    model = PACE(8, covariance_prior=0.0, covariance="tied", tol=1e-9, dtype="float64", device="cpu", max_iter=300)
    model.fit(data.observations, perturbed=data.perturbed)
    score = model.score(data.observations, perturbed=data.perturbed)
    assert score == pytest.approx(model.lower_bounds_[-1].total, rel=1e-5)


def test_lower_bounds_have_all_three_terms_and_add_up(model):
    terms = np.array(model.lower_bounds_)
    assert terms.shape == (model.n_iter_, 3)
    assert [bound.total for bound in model.lower_bounds_] == pytest.approx(list(terms.sum(1)))
    assert terms[-1].all()


def test_unfitted_use_says_so(data):
    model = PACE()
    for use in (
        model.explain,
        model.transform,
        model.score,
        lambda o: model.nearest_patches(o, 0),
        lambda o: model.save("x"),
    ):
        with pytest.raises(NotFittedError, match="call fit"):
            use(data.observations)
    assert not hasattr(model, "means_")


def test_too_few_epochs_are_a_convergence_warning(data):
    with pytest.warns(ConvergenceWarning, match="raise max_iter or tol"):
        model = PACE(8, max_iter=1, device="cpu").fit(data.observations)
    assert not model.converged_
    assert model.n_iter_ == 1


def interrupting(monkeypatch, where, name, call):
    real, calls = getattr(where, name), []

    def interrupted(*arguments, **options):
        calls.append(arguments)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(where, name, interrupted)


@pytest.mark.parametrize(("call", "epochs"), [(3, 2), (1, 0)])
def test_ctrl_c_leaves_a_usable_model(data, monkeypatch, call, epochs):
    interrupting(monkeypatch, pace.fitting.loop.Fitting, "_pass", call)
    with pytest.warns(ConvergenceWarning, match=f"interrupted after {epochs} epochs"):
        model = PACE(8, tol=0.0, n_init=1, device="cpu").fit(data.observations)
    assert (model.n_iter_, model.interrupted_, len(model.lower_bounds_)) == (epochs, True, epochs)
    assert np.isfinite(model.explain(data.observations).theta).all()
    assert np.isfinite(model.partial_fit(data.observations).means_).all()


def test_ctrl_c_while_starts_are_compared_keeps_the_best_so_far(data, monkeypatch):
    interrupting(monkeypatch, pace.fitting.start, "pass_over", 5)
    with pytest.warns(ConvergenceWarning, match="interrupted after 0 epochs"):
        model = PACE(8, n_init=4, device="cpu").fit(data.observations)
    assert np.isfinite(model.explain(data.observations).theta).all()


def test_a_fit_that_fails_leaves_the_model_as_it_was(data, model, monkeypatch):
    before = clone(model).fit(data.observations)
    means = before.means_.copy()

    def broken(*anything, **more):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(pace.explainer, "update", broken)
    monkeypatch.setattr(pace.fitting.loop, "update", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        before.fit(data.perturbed)
    with pytest.raises(RuntimeError, match="out of memory"):
        before.partial_fit(data.perturbed)
    np.testing.assert_array_equal(before.means_, means)


def test_progress_is_shown_when_asked_for(data, capsys):
    PACE(8, device="cpu", progress=True).fit(data.observations)
    assert "learning concepts" in capsys.readouterr().err


def test_batches_one_at_a_time_come_near_a_full_fit(data):
    online = PACE(8, device="cpu")
    for _ in range(4):
        for start in range(0, 120, 40):
            part = slice(start, start + 40)
            online.partial_fit(data.observations[part], perturbed=data.perturbed[part])
    full = PACE(8, device="cpu").fit(data.observations, perturbed=data.perturbed)
    best = full.score(data.observations, perturbed=data.perturbed)
    assert online.n_steps_ == 12
    assert online.score(data.observations, perturbed=data.perturbed) > best - 0.01 * abs(best)


def test_parameters_that_shaped_the_model_cannot_change_between_batches(data):
    model = PACE(8, device="cpu").partial_fit(data.observations)
    for change in ({"n_concepts": 5}, {"covariance": "diag"}, {"updates": "paper"}):
        other = PACE(8, device="cpu").partial_fit(data.observations).set_params(**change)
        with pytest.raises(ValueError, match="this model was fitted with"):
            other.partial_fit(data.observations)
    assert model.set_params(dtype="float64").partial_fit(data.observations).means_.dtype == np.float64


def test_a_grid_search_over_the_number_of_concepts_works(data):
    search = GridSearchCV(PACE(covariance="diag", device="cpu", max_iter=5, tol=10.0), {"n_concepts": [1, 8]}, cv=2)
    assert search.fit(data.observations).best_params_ == {"n_concepts": 8}


def test_learned_alpha_beats_a_fixed_one(data):
    fixed = PACE(8, alpha=1.0, device="cpu").fit(data.observations)
    learned = PACE(8, alpha="learn", device="cpu").fit(data.observations)
    assert learned.score(data.observations) > fixed.score(data.observations)
    assert learned.alpha_.shape == (8,)


# -- sturdiness --------------------------------------------------------------------------------------------------------


def random(images=6, tokens=10, d=4, classes=2, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(images, tokens, d)), np.ones((images, tokens)), rng.dirichlet(np.ones(classes), images)


def sturdy(observations, perturbed=None, **parameters):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = PACE(**({"n_concepts": 3, "max_iter": 5, "device": "cpu"} | parameters)).fit(
            observations, perturbed=perturbed
        )
    explanation = model.explain(observations)
    assert np.isfinite(explanation.theta).all()
    assert np.isfinite(explanation.phi).all()
    assert np.isfinite(np.array(model.lower_bounds_)).all()
    return model


@pytest.mark.parametrize("updates", ["exact", "paper"])
@pytest.mark.parametrize("family", ["full", "diag", "tied", "low_rank"])
class TestSturdiness:
    def test_patches_without_attention_count_nothing(self, family, updates):
        embeddings, attention, predictions = random()
        attention[:, ::2] = 0
        spoilt = embeddings.copy()
        spoilt[:, ::2] = 1e3
        means = [
            sturdy(Observations(e, attention, predictions), covariance=family, updates=updates).means_
            for e in (embeddings, spoilt)
        ]
        if updates == "exact":
            np.testing.assert_allclose(*means, rtol=1e-4, atol=1e-5)
        else:  # the printed rules let every token pull on φ̄, whatever its attention
            assert np.abs(means).max() < 10

    def test_identical_images(self, family, updates):
        embeddings, attention, predictions = random(images=1)
        same = Observations(*(np.repeat(a, 5, 0) for a in (embeddings, attention, predictions)))
        model = sturdy(same, same, covariance=family, updates=updates)
        theta = model.explain(same).theta
        np.testing.assert_allclose(theta, theta[:1].repeat(5, 0), atol=1e-6)

    def test_identical_patches(self, family, updates):
        flat = Observations(np.full((4, 6, 3), 2.5), np.ones((4, 6)))
        np.testing.assert_allclose(
            sturdy(flat, covariance=family, updates=updates, n_concepts=2).means_, 2.5, atol=1e-3
        )

    def test_zero_embeddings(self, family, updates):
        sturdy(Observations(np.zeros((4, 6, 3)), np.ones((4, 6))), covariance=family, updates=updates, n_concepts=2)

    def test_one_class(self, family, updates):
        sturdy(Observations(*random(classes=1)), covariance=family, updates=updates)

    def test_one_image_with_its_perturbed_view(self, family, updates):
        sturdy(Observations(*random(1)), Observations(*random(1, seed=1)), covariance=family, updates=updates)

    def test_one_dimension_and_one_concept(self, family, updates):
        model = sturdy(Observations(*random(d=1)), covariance=family, updates=updates, n_concepts=1)
        np.testing.assert_array_equal(model.explain(Observations(*random(d=1))).interval(0.9)[0], 1)

    def test_as_many_concepts_as_patches(self, family, updates):
        sturdy(Observations(*random(2, 5)), covariance=family, updates=updates, n_concepts=10)

    def test_many_dimensions_and_few_patches_in_float32(self, family, updates):
        sturdy(Observations(*random(10, 30, 768)), covariance=family, updates=updates, max_iter=2)

    def test_half_precision_and_integers(self, family, updates):
        embeddings, attention, predictions = random()
        sturdy(Observations(embeddings.astype(np.float16), attention.astype(np.float16), predictions.astype(np.float16)),
               covariance=family, updates=updates)  # fmt: skip
        sturdy(
            Observations(torch.from_numpy((9 * embeddings).astype(np.int64)), attention),
            covariance=family,
            updates=updates,
        )


def test_concepts_that_run_empty_are_reported_and_harmless():
    data = planted(0, k=2, d=4, spread=0.1)
    far = np.concatenate([data.means, data.means + 500])
    model = PACE(4, init=far, alpha=0.01, device="cpu").fit(data.observations)
    assert list(model.empty_concepts_) == [2, 3]
    np.testing.assert_allclose(model.means_[2:], far[2:], rtol=1e-4)
    assert model.explain(data.observations).theta[:, 2:].max() < 1e-3


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"n_concepts": 61}, "n_concepts=61 is more than the 60 patches with positive attention; use at most 60"),
        ({"n_concepts": 0}, "n_concepts: expected a whole number of at least 1 or 'auto'; found 0"),
        ({"covariance": "round"}, "covariance: expected one of full, diag, tied, low_rank; found 'round'"),
        ({"updates": "best"}, "updates: expected 'exact' or 'paper'"),
        ({"alpha": -1.0}, "alpha: expected one positive number or 3 of them"),
        ({"alpha": [0.1, 0.2]}, "alpha: expected one positive number or 3 of them"),
        ({"alpha": "guess"}, "alpha: expected a number, an array, 'learn' or None"),
        ({"init": np.zeros((3, 9))}, r"init: expected means of shape \(3, 4\); found \(3, 9\)"),
        ({"init": "random"}, "init: expected 'k-means\\+\\+' or an array"),
        ({"dtype": "float16"}, "dtype: expected 'float32' or 'float64'"),
        ({"alpha": float("inf")}, "alpha: expected one positive number or 3 of them; found inf"),
        ({"alpha": ["a"]}, r"alpha: expected a number, an array, 'learn' or None; found \['a'\]"),
        ({"covariance_prior": -1.0}, "covariance_prior: expected a number of at least 0 or None; found -1.0"),
        ({"covariance_prior": "x"}, "covariance_prior: expected a number of at least 0 or None; found 'x'"),
        ({"tol": "a"}, "tol: expected a number of at least 0; found 'a'"),
        ({"tol": float("nan")}, "tol: expected a number of at least 0; found nan"),
        ({"seed": -1}, "seed: expected a whole number of at least 0; found -1"),
        ({"seed": "0"}, "seed: expected a whole number of at least 0; found '0'"),
        ({"n_concepts": True}, "n_concepts: expected a whole number of at least 1 or 'auto'; found True"),
        ({"device": "foo"}, "device: 'foo' cannot be used"),
        ({"device": "cuda:99"}, "device: 'cuda:99' cannot be used"),
        ({"device": [0]}, r"device: \[0\] cannot be used"),
        ({"refine": 2, "covariance": "diag"}, "refine: needs covariance='tied' and updates='exact'; found 'diag'"),
        ({"prune": 2}, "prune: expected True, False or 'auto'; found 2"),
        ({"n_concepts": 4, "prune": True, "alpha": 0.1}, "prune: needs updates='exact', init='k-means"),
        ({"batch_size": 0}, "batch_size: expected a whole number of at least 1 or None; found 0"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(parameters, message):
    with pytest.raises(ValueError, match=message) as caught:
        PACE(**({"n_concepts": 3, "device": "cpu"} | parameters)).fit(Observations(*random()))
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    numbers = {"n_concepts": np.int64(2), "seed": np.uint8(3), "tol": np.float32(0.5), "covariance_prior": np.int32(4)}
    assert PACE(**numbers, device="cpu").fit(Observations(*random())).means_.shape == (2, 4)


def test_what_was_found_by_the_number_of_concepts_is_not_pruned_again():
    model = PACE("auto", alpha=0.1, prune=True, device="cpu").fit(planted(0, k=2, d=4, spread=0.1).observations)
    assert len(model.means_) == model.selection_.n_concepts


def test_sparse_attention_does_not_hide_patches_from_the_start():
    attention = np.zeros((500, 1000))
    attention[np.arange(500), np.arange(500)] = 1
    sparse = Observations(np.random.default_rng(0).normal(size=(500, 1000, 2)), attention)
    assert PACE(10, covariance="diag", n_init=1, tol=10.0, device="cpu").fit(sparse).means_.shape == (10, 2)


def test_observations_that_do_not_fit_are_refused(data, model):
    with pytest.raises(ValueError, match="embeddings have 4 dimensions, but the model was fitted with 32"):
        model.explain(Observations(*random()))
    with pytest.raises(ValueError, match="predictions have 2 classes; the model was fitted with 3"):
        model.score(Observations(*random(d=32)))
    with pytest.raises(ValueError, match=r"perturbed: expected the same images.*\(120, 37, 32\); found \(6, 10, 4\)"):
        PACE(3).fit(data.observations, perturbed=Observations(*random()))
    with pytest.raises(TypeError, match=r"expected pace.Observations; found ndarray"):
        PACE(3).fit(np.zeros((3, 4, 5)))


def test_of_no_images_nothing_is_learned(data):
    none = data.observations[:0]
    fitted = PACE(2, tol=1e9, device="cpu").fit(data.observations)
    for ask in (PACE(2, device="cpu").fit, PACE(2, device="cpu").partial_fit, fitted.score):
        with pytest.raises(ValueError, match="expected at least one image; found none"):
            ask(none)
    assert fitted.transform(none).shape == (0, 2)
    with pytest.raises(ValueError, match="n: expected at least 1; found -1"):
        fitted.nearest_patches(data.observations, 0, n=-1)
