"""Learning online, from minibatches: as good as from everything at once, without keeping anything of an image."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from planted import planted
from sklearn.exceptions import ConvergenceWarning

from pace import PACE, Observations
from pace.fitting.loop import Course, Fitting, shuffled


@pytest.fixture(scope="module")
def data():
    return planted(0, images=240, d=12, grid=(4, 4))


def fit(data, paired=True, **parameters):
    chosen = {"n_concepts": 8, "n_init": 2, "negatives": 16, "device": "cpu"} | parameters
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return PACE(**chosen).fit(data.observations, perturbed=data.perturbed if paired else None)


@pytest.mark.parametrize("family", ["full", "diag", "tied", "low_rank"])
def test_minibatches_come_within_a_hundredth_of_full_batches(data, family):
    online = fit(data, covariance=family, rank=2, minibatch=40, max_iter=15)
    full = fit(data, covariance=family, rank=2, max_iter=40)
    scores = [model.score(data.observations, perturbed=data.perturbed) for model in (online, full)]
    assert scores[0] > scores[1] - 0.01 * abs(scores[1])
    assert online.n_steps_ == online.n_iter_ == len(online.lower_bounds_)
    assert online.n_steps_ % 6 == 0
    # On the scale of all images, as if each had been seen once.
    np.testing.assert_allclose(online.concept_weights_.sum(), full.concept_weights_.sum(), rtol=1e-3)


def test_the_heads_are_learned_online_too(data):
    online, full = fit(data, minibatch=40, max_iter=15), fit(data)
    terms = [np.array(model.lower_bounds_)[-6:].mean(0) for model in (online, full)]
    assert terms[0][1] > np.array(online.lower_bounds_)[0][1] + 0.02  # faithfulness
    assert terms[0][1] > terms[1][1] - 0.02
    predicted = data.observations.predictions.argmax(1)
    right = [(m.transform(data.observations) @ m.label_head_).argmax(1) == predicted for m in (online, full)]
    assert right[0].mean() >= right[1].mean() - 0.02
    assert right[1].mean() > 0.7
    np.testing.assert_allclose(np.abs(online.label_head_).mean(), np.abs(full.label_head_).mean(), rtol=0.1)


def test_no_memory_is_kept_of_any_image(data, monkeypatch):
    courses, pause = [], Fitting._pause

    def watch(self):
        courses.append(self._course)
        pause(self)

    monkeypatch.setattr(Fitting, "_pause", watch)
    fit(data, minibatch=100, max_iter=1)
    held = [value for name, value in vars(courses[-1]).items() if name not in ("bounds", "concepts", "prior")]
    assert isinstance(courses[-1], Course)
    assert courses[-1].memory is None
    for value in held:
        tensors = value.tensors().values() if hasattr(value, "tensors") else []
        assert all(240 not in tensor.shape for tensor in tensors)


def test_online_learning_is_repeatable_and_shuffles_by_the_seed(data):
    one, two, other = (fit(data, minibatch=64, max_iter=2, init=data.means, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(one.means_, two.means_)
    assert one.lower_bounds_ == two.lower_bounds_
    assert not np.array_equal(one.means_, other.means_)


def test_a_warm_start_goes_on_from_what_was_learned(data):
    model = fit(data, minibatch=64, max_iter=3)
    first, steps, means = model.lower_bounds_[0].total, model.n_steps_, model.means_
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.set_params(warm_start=True, max_iter=1).fit(data.observations, perturbed=data.perturbed)
    assert model.lower_bounds_[0].total > first
    assert model.n_steps_ == steps + 4
    assert np.abs(model.means_ - means).max() < 0.1 * np.abs(means).max()
    full = fit(data, max_iter=3).set_params(warm_start=True, tol=0.01)
    began, before = full.lower_bounds_[0].total, full.lower_bounds_[-1].total
    bounds = [bound.total for bound in full.fit(data.observations, perturbed=data.perturbed).lower_bounds_]
    assert bounds[0] > began  # images are not remembered between fits, so it may be a little below where that one ended
    assert bounds[-1] >= before
    with pytest.raises(ValueError, match="this model was fitted with 8"):
        full.set_params(n_concepts=4).fit(data.observations)


@pytest.mark.parametrize("go_on", [PACE.fit, PACE.partial_fit])
def test_what_is_given_anew_counts_from_then_on_or_is_refused(data, go_on):
    seen = data.observations[:40]
    model = PACE(4, covariance="diag", max_iter=2, tol=1.0, device="cpu", warm_start=True).fit(seen)
    go_on(model.set_params(alpha=0.5, covariance_prior=1e9), seen)
    assert model.alpha_.tolist() == [0.5] * 4
    np.testing.assert_allclose(model.covariances_[0], model.covariances_[1], rtol=1e-3)  # the prior's own
    model = PACE(4, covariance="low_rank", rank=2, max_iter=2, tol=1.0, device="cpu", warm_start=True).fit(seen)
    with pytest.raises(ValueError, match="rank: this model was fitted with 2"):
        go_on(model.set_params(rank=3), seen)


@pytest.mark.parametrize(
    "around", [torch.no_grad, torch.inference_mode, partial(torch.autocast, "cpu", torch.bfloat16)]
)
def test_torch_modes_around_a_fit_do_not_change_it(data, around):
    def learned():
        model = PACE(4, refine=2, max_iter=2, tol=1.0, device="cpu")
        model.fit(data.observations[:40], perturbed=data.perturbed[:40])
        return model.means_, model.transform(data.observations[:40]), model.score(data.observations[:40])

    expected = learned()
    with around():
        found = learned()
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)


def test_predictions_that_come_late_are_refused_rather_than_ignored(data):
    seen = data.observations
    without = Observations(seen.embeddings, seen.attention)
    started = PACE(4, max_iter=2, tol=1.0, device="cpu").fit(without).set_params(warm_start=True)
    with pytest.raises(ValueError, match="fitted without any; clone it"):
        started.fit(seen)
    with pytest.raises(ValueError, match="fitted without any; clone it"):
        PACE(4, device="cpu").partial_fit(without[:40]).partial_fit(seen[:40])


@pytest.mark.parametrize("refine", [0, 5])
def test_perturbed_views_with_other_classes_are_refused(data, refine):
    seen, perturbed = data.observations, data.perturbed
    fewer = Observations(perturbed.embeddings, perturbed.attention, np.full((len(perturbed), 2), 0.5, np.float32))
    model = PACE(4, refine=refine, device="cpu")
    with pytest.raises(ValueError, match=f"perturbed: expected predictions of {seen.n_classes} classes .* found 2"):
        model.fit(seen, perturbed=fewer)
    with pytest.raises(ValueError, match="expected predictions of 0 classes"):
        model.fit(Observations(seen.embeddings, seen.attention), perturbed=perturbed)


def test_partial_fit_goes_on_after_minibatches(data):
    model = fit(data, minibatch=64, max_iter=1)
    model.partial_fit(data.observations[:50], perturbed=data.perturbed[:50])
    assert model.n_steps_ == 5


def test_ctrl_c_between_minibatches_leaves_a_usable_model(data, monkeypatch):
    pause, calls = Fitting._pause, []

    def stop(self):
        pause(self)
        calls.append(1)
        if len(calls) == 4:  # the first is after the start
            raise KeyboardInterrupt

    monkeypatch.setattr(Fitting, "_pause", stop)
    with pytest.warns(ConvergenceWarning, match="interrupted after 3 minibatches; the model is usable"):
        model = PACE(8, minibatch=32, n_init=1, device="cpu").fit(data.observations)
    assert model.interrupted_
    assert np.isfinite(model.transform(data.observations)).all()


def test_a_minibatch_larger_than_the_set_is_the_set(data):
    model = fit(data, minibatch=10_000, max_iter=2)
    assert model.n_steps_ == 2


@pytest.mark.parametrize("wrong", [0, -3, 2.5])
def test_minibatches_that_make_no_sense_are_refused(data, wrong):
    with pytest.raises(ValueError, match="minibatch: expected a whole number of at least 1 or None"):
        fit(data, minibatch=wrong)


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**31), epoch=st.integers(0, 99))
@examples(max_examples=60, deadline=None)
def test_a_shuffle_is_a_permutation_and_each_place_can_be_had_alone(n, seed, epoch):
    order = shuffled(np.arange(n), n, (seed, epoch))
    assert np.array_equal(np.sort(order), np.arange(n))
    some = np.arange(0, n, 7)
    assert np.array_equal(shuffled(some, n, (seed, epoch)), order[some])


def test_a_shuffle_looks_random():
    order = shuffled(np.arange(5000), 5000, (3, 1))
    assert abs(np.corrcoef(np.arange(5000), order)[0, 1]) < 0.05
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    other = shuffled(np.arange(5000), 5000, (3, 2))
    assert (order == other).mean() < 0.005
