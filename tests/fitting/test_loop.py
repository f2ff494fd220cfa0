"""The fit itself: epochs and minibatches, Ctrl-C, going on, and what must not change it."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from fits import drawn, fit, same_bits
from planted import planted
from sklearn.exceptions import ConvergenceWarning

from pace import PACE, Observations
from pace.fitting.loop import Plan

SMALL = drawn(23)


@pytest.fixture(scope="module")
def data():
    return planted(0, k=6, images=120, d=8, grid=(3, 3))


@pytest.mark.parametrize("family", ["full", "diag", "tied", "low_rank"])
def test_minibatches_come_within_a_hundredth_of_full_batches(data, family):
    online = fit(data=data, n_concepts=6, covariance=family, minibatch=30, max_iter=8)
    full = fit(data=data, n_concepts=6, covariance=family, max_iter=30)
    scores = [model.score(data.observations, perturbed=data.perturbed) for model in (online, full)]
    assert scores[0] > scores[1] - 0.01 * abs(scores[1])
    assert online.n_steps_ == online.n_iter_ == len(online.lower_bounds_)
    assert online.n_steps_ % 4 == 0
    # On the scale of all images, as if each had been seen once.
    np.testing.assert_allclose(online.concept_weights_.sum(), full.concept_weights_.sum(), rtol=1e-3)
    if family == "tied":  # the heads are learned as well
        terms = [np.array(model.lower_bounds_)[-4:].mean(0) for model in (online, full)]
        assert terms[0][1] > np.array(online.lower_bounds_)[0][1] + 0.02  # faithfulness
        assert terms[0][1] > terms[1][1] - 0.02
        predicted = data.observations.predictions.argmax(1)
        right = [(m.transform(data.observations) @ m.label_head_).argmax(1) == predicted for m in (online, full)]
        assert right[0].mean() >= right[1].mean() - 0.02
        assert right[1].mean() > 0.7


def test_every_epoch_visits_every_image_once_in_an_order_of_its_own():
    plan = Plan("tied", 2, 0.0, minibatch=64, seed=3)
    epochs = [[plan.minibatch_at(4 * epoch + step, 200) for step in range(4)] for epoch in (0, 1)]
    assert [len(images) for images in epochs[0]] == [64, 64, 64, 8]
    one, two = (np.concatenate(epoch) for epoch in epochs)
    assert sorted(one) == sorted(two) == list(range(200))
    assert (one == two).mean() < 0.05
    assert abs(np.corrcoef(np.arange(200), one)[0, 1]) < 0.2
    assert len(replace(plan, minibatch=10_000).minibatch_at(1, 200)) == 200


@pytest.mark.parametrize("parameters", [{}, {"minibatch": 8}])
def test_the_same_seed_gives_the_same_bits_and_another_one_others(parameters):
    one, two, other = (fit(n_concepts=5, seed=seed, **parameters) for seed in (0, 0, 1))
    same_bits(one, two)
    assert not np.array_equal(one.means_, other.means_)


@pytest.mark.parametrize(
    ("place", "call", "parameters", "after"),
    [
        ("start.expect_all", 5, {"n_init": 3}, "0 epochs; the concepts are where learning would have started"),
        ("loop.expect", 1, {}, "0 epochs; the concepts are where learning would have started"),
        ("loop.expect", 3, {}, "2 epochs; the model is usable"),
        ("loop.update", 2, {}, "1 epochs; the model is usable"),
        ("loop.update", 4, {"minibatch": 8}, "3 minibatches; the model is usable"),
        ("loop.refine_kinds", 1, {"parts": 2, "refine": 2, "max_iter": 2}, "2 epochs; the model is usable"),
    ],
)
def test_ctrl_c_leaves_a_usable_model_and_the_same_call_goes_on(place, call, parameters, after, tmp_path, monkeypatch):
    parameters = {"max_iter": 4} | parameters
    module, name = place.split(".")
    real, calls = getattr(__import__(f"pace.fitting.{module}", fromlist=[name]), name), []

    def interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(f"pace.fitting.{place}", interrupted)
        with pytest.warns(ConvergenceWarning, match=f"interrupted after {after}"):
            model = fit(checkpoint=tmp_path / "fit", **parameters)
    assert model.interrupted_
    assert model.n_iter_ == len(model.lower_bounds_) == int(after.split()[0])
    assert np.isfinite(model.transform(SMALL.observations)).all()
    same_bits(fit(checkpoint=tmp_path / "fit", **parameters), fit(**parameters))
    model.save(tmp_path / "interrupted.safetensors", statistics=True)
    loaded = PACE.load(tmp_path / "interrupted.safetensors")
    assert np.isfinite(loaded.partial_fit(SMALL.observations).means_).all()


def test_ctrl_c_before_there_is_anything_to_keep_is_raised(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pace.fitting.start.expect_all", interrupt)
    with pytest.raises(KeyboardInterrupt):
        PACE(3, n_init=2, device="cpu").partial_fit(SMALL.observations)
    monkeypatch.setattr("pace.fitting.start.cluster", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fit()


def test_a_fit_that_fails_leaves_the_model_as_it_was(monkeypatch):
    model = fit(max_iter=1)
    means = model.means_

    def broken(*_):
        raise RuntimeError("out of memory")

    for place in ("pace.explainer.update", "pace.fitting.loop.update"):
        monkeypatch.setattr(place, broken)
    for learn in (model.fit, model.partial_fit):
        with pytest.raises(RuntimeError, match="out of memory"):
            learn(SMALL.perturbed)
    assert np.array_equal(model.means_, means)


def test_torch_modes_around_a_fit_do_not_change_it():
    def learned():
        model = fit(parts=2, refine=2, max_iter=2)
        return model.means_, model.transform(SMALL.observations), model.score(SMALL.observations)

    expected = learned()
    for around in (torch.no_grad, torch.inference_mode, partial(torch.autocast, "cpu", torch.bfloat16)):
        with around():
            found = learned()
        for one, other in zip(found, expected, strict=True):
            assert np.array_equal(one, other)


def test_partial_fit_goes_on_after_minibatches_with_what_is_given_anew():
    model = fit(minibatch=8, max_iter=1)
    model.set_params(alpha=0.5, dtype="float32").partial_fit(SMALL.observations[:10], perturbed=SMALL.perturbed[:10])
    assert model.n_steps_ == 4
    assert model.alpha_.tolist() == [0.5] * 3
    assert model.means_.dtype == np.float32


def test_what_cannot_change_between_batches_is_refused():
    seen = SMALL.observations
    model = PACE(3, n_init=1, device="cpu").partial_fit(seen)
    for change in ({"n_concepts": 5}, {"covariance": "diag"}, {"updates": "paper"}):
        with pytest.raises(ValueError, match=f"{next(iter(change))}: this model was fitted with .*; clone it"):
            model.set_params(**change).partial_fit(seen)
        model.set_params(n_concepts=3, covariance="tied", updates="exact")
    without = Observations(seen.embeddings, seen.attention, prefix_tokens=1)
    model = PACE(3, n_init=1, device="cpu").partial_fit(without)
    with pytest.raises(ValueError, match="predictions: the model was fitted without any; clone it"):
        model.partial_fit(seen)


def test_batches_one_at_a_time_come_near_a_full_fit(data):
    online = PACE(6, device="cpu")
    for _ in range(4):
        for part in (slice(0, 40), slice(40, 80), slice(80, 120)):
            online.partial_fit(data.observations[part], perturbed=data.perturbed[part])
    best = fit(data=data, n_concepts=6, max_iter=30).score(data.observations, perturbed=data.perturbed)
    assert online.n_steps_ == 12
    assert online.score(data.observations, perturbed=data.perturbed) > best - 0.01 * abs(best)
