"""PACE(n_concepts="auto"): the estimator finds the number of its concepts, and keeps how."""

import copy
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from planted import planted
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning

from pace import PACE, Observations
from pace.fitting.checkpoints import Checkpoint
from pace.fitting.parameters import prunes

DATA = planted(0, k=4, d=8, images=60, grid=(4, 4))
QUICK = {"max_iter": 3, "max_sweeps": 10, "head_steps": 3, "device": "cpu"}


def fit(n_concepts="auto", checkpoint=None, **parameters):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.filterwarnings("ignore", ".* concepts are in use")
        return PACE(n_concepts, **QUICK | parameters).fit(
            DATA.observations, perturbed=DATA.perturbed, checkpoint=checkpoint, checkpoint_every=0.0
        )


@pytest.fixture(scope="module")
def found():
    return fit()


def same_selection(one, two):
    assert (one.moves, one.images) == (two.moves, two.images)
    assert all(tensor.equal(two.tensors()[name]) for name, tensor in one.tensors().items())


def test_the_planted_number_is_found_and_learned(found):
    assert found.selection_.n_concepts == 4
    assert found.means_.shape == (4, 8)
    assert found.label_head_.shape == (4, 3)
    assert found.transform(DATA.observations).shape == (60, 4)
    distances = np.linalg.norm(found.means_[:, None] - DATA.means, axis=2)
    assert sorted(distances.argmin(1)) == [0, 1, 2, 3]
    assert distances.min(1).max() < 0.5


def test_concepts_are_numbered_by_their_evidence(found):
    evidence = found.selection_.evidence
    assert bool((evidence[:-1] >= evidence[1:]).all())
    nearest = np.linalg.norm(found.means_[:, None] - found.selection_.means.numpy(), axis=2).argmin(1)
    assert nearest.tolist() == [0, 1, 2, 3]


def test_a_number_that_was_given_leaves_no_selection():
    assert fit(3, n_init=1).selection_ is None


@pytest.mark.parametrize("covariance", ["tied", "diag"])
def test_concepts_that_the_patches_do_not_ask_for_stay_empty(covariance):
    model = fit(20, prune=True, covariance=covariance, max_iter=10)
    assert model.selection_.n_concepts == 4
    assert model.empty_concepts_.tolist() == list(range(4, 20))
    explanation = model.explain(DATA.observations)
    assert explanation.theta.shape == (60, 20)
    assert explanation.phi[:, :, 4:].max() < 1e-30
    assert np.isfinite(explanation.interval(0.9)).all()
    distances = np.linalg.norm(model.means_[:4, None] - DATA.means, axis=2)
    assert sorted(distances.argmin(1)) == [0, 1, 2, 3]


def test_refining_leaves_empty_concepts_empty():
    model = fit(20, prune=True, refine=5)
    assert model.empty_concepts_.tolist() == list(range(4, 20))


@pytest.mark.parametrize("told", [True, False])
def test_by_default_the_prediction_must_follow_from_the_few_that_are_left(told, monkeypatch):
    """Patches need not lie in clouds; then they ask for few concepts, and these say little."""
    monkeypatch.setattr("pace.fitting.parameters._AUTO_IMAGES", 10)
    rng = np.random.default_rng(0)
    shown, said = np.arange(60) % 2, np.arange(60) // 2 % 2
    concept = 2 * shown[:, None] + rng.integers(2, size=(60, 16))  # two concepts for each class
    patches = 4 * rng.normal(size=(4, 8))[concept] + 0.3 * rng.normal(size=(60, 16, 8))
    images = Observations(patches.astype(np.float32), np.ones((60, 16)), np.eye(2)[shown if told else said])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PACE(20, **QUICK | {"refine": 0}).fit(images)
    if told:
        assert model.empty_concepts_.tolist() == list(range(4, 20))
    else:
        assert model.selection_ is None


def test_a_first_batch_of_images_does_not_decide_for_all(monkeypatch):
    monkeypatch.setattr("pace.fitting.parameters._AUTO_IMAGES", 10)
    monkeypatch.setattr("pace.fitting.start.prediction_follows", lambda *_: True)
    assert PACE(20, **QUICK).partial_fit(DATA.observations).selection_ is None


def test_a_pruned_model_says_so():
    with pytest.warns(UserWarning, match="4 of 20 concepts are in use: .*prune=False uses all"):
        PACE(20, prune=True, **QUICK).fit(DATA.observations)


def test_nothing_is_left_empty_where_the_patches_ask_for_half_of_the_concepts():
    model = fit(7, prune=True)
    assert model.selection_ is None
    assert not np.isin(np.arange(7), model.empty_concepts_).all()
    np.testing.assert_array_equal(model.means_, fit(7).means_)


@pytest.mark.parametrize(
    ("images", "options", "asked"),
    [
        (1000, {}, True),
        (999, {}, False),
        (1000, {"alpha": 0.1}, False),
        (1000, {"covariance": "full"}, False),
        (1000, {"prune": False}, False),
        (9, {"prune": True}, True),
    ],
)
def test_by_default_it_asks_where_there_are_images_enough(images, options, asked):
    view = Observations(np.ones((images, 2, 3), np.float32), np.ones((images, 2)), np.full((images, 2), 0.5))
    assert prunes(PACE(4, **options), view) == asked


def test_the_same_seed_finds_the_same(found):
    again = fit()
    same_selection(again.selection_, found.selection_)
    assert np.array_equal(again.means_, found.means_)


def test_a_saved_model_keeps_how_its_number_was_found(found, tmp_path):
    found.save(tmp_path / "model.safetensors")
    loaded = PACE.load(tmp_path / "model.safetensors", device="cpu")
    assert loaded.n_concepts == "auto"
    same_selection(loaded.selection_, found.selection_)
    assert np.array_equal(loaded.transform(DATA.observations), found.transform(DATA.observations))


def test_a_model_from_before_the_worth_of_an_image_was_known_can_be_saved_again(found, tmp_path):
    older = copy.copy(found)
    older.selection_ = replace(found.selection_, worth=np.nan)
    for _ in range(2):
        older.save(tmp_path / "model.safetensors")
        older = PACE.load(tmp_path / "model.safetensors", device="cpu")
    assert older.selection_.n_concepts == found.selection_.n_concepts


def test_no_more_are_looked_for_than_allowed_and_that_is_said():
    with pytest.warns(ConvergenceWarning, match="stopped at 3 concepts, the most it looks for; raise max_concepts"):
        model = PACE("auto", max_concepts=3, **QUICK).fit(DATA.observations)
    assert model.means_.shape == (3, 8)
    assert max(model.selection_.numbers) == 3


def test_one_concept_alone_can_be_saved(tmp_path):
    """Without a neighbour its evidence has no end."""
    cloud = torch.randn(60, 9, 3, generator=torch.Generator().manual_seed(0))
    model = PACE("auto", max_iter=50, device="cpu").fit(type(DATA.observations)(cloud, torch.ones(60, 9)))
    assert model.means_.shape == (1, 3)
    model.save(tmp_path / "model.safetensors")
    assert PACE.load(tmp_path / "model.safetensors").selection_.evidence.tolist() == [np.inf]


def test_a_clone_looks_for_the_number_anew(found):
    copied = clone(found)
    assert copied.get_params()["n_concepts"] == "auto"
    assert not hasattr(copied, "selection_")
    assert found.get_params()["n_concepts"] == "auto"  # fitting does not change what was asked for


def test_batches_after_the_first_learn_the_number_that_was_found():
    model = PACE("auto", **QUICK).partial_fit(DATA.observations[:40])
    first = model.selection_
    model.partial_fit(DATA.observations[40:])
    assert model.means_.shape == (4, 8)
    assert model.selection_ is first
    assert first.images == 40


def test_minibatches_learn_the_number_that_was_found():
    model = fit(minibatch=25)
    assert model.n_steps_ == 9
    assert len(model.means_) == model.selection_.n_concepts == 4


@pytest.mark.parametrize("covariance", ["full", "diag", "low_rank"])
def test_every_family_takes_it(covariance):
    model = fit(covariance=covariance, rank=2)
    assert len(model.means_) == model.selection_.n_concepts == 4


class Crash(BaseException):
    """The power fails."""


@pytest.mark.parametrize("how", [{}, {"minibatch": 25}], ids=["all images", "minibatches"])
def test_a_fit_that_is_resumed_does_not_look_again_and_keeps_how(how, tmp_path, monkeypatch):
    whole, write = fit(**how), Checkpoint.write

    def crash(self, saved):
        write(self, saved)
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "write", crash)
        with pytest.raises(Crash):
            fit(checkpoint=tmp_path / "fit", **how)
    monkeypatch.setattr("pace.fitting.start.select", None)
    resumed = fit(checkpoint=tmp_path / "fit", **how)
    same_selection(resumed.selection_, whole.selection_)
    assert np.array_equal(resumed.means_, whole.means_)


def test_moves_are_shown_as_they_are_made(monkeypatch):
    notes = []
    monkeypatch.setattr("pace.progress._PATIENCE", 0.0)
    monkeypatch.setattr("rich.progress.Progress.update", lambda bar, task, advance, note: notes.append(note))
    model = fit(progress=True)
    expected = [f"how many concepts: {move.number}, bound {move.bound:,.0f}" for move in model.selection_.moves]
    assert notes[: 1 + len(expected)] == ["how many concepts?", *expected]
    assert "epoch 1" in notes


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"updates": "paper"}, "n_concepts='auto' needs updates='exact' and init='k-means"),
        ({"init": np.zeros((4, 8))}, "n_concepts='auto' needs updates='exact' and init='k-means"),
        ({"n_concepts": "many"}, "n_concepts: expected a whole number of at least 1 or 'auto'; found 'many'"),
        ({"max_concepts": 0}, "max_concepts: expected a whole number of at least 1; found 0"),
        ({"alpha": np.ones(7)}, "alpha: expected one positive number or 4 of them"),
    ],
)
def test_what_does_not_go_with_it_is_one_line(parameters, message):
    with pytest.raises(ValueError, match=message):
        fit(**parameters)


def test_images_that_ask_for_one_concept_alone_are_said_to():
    rng = np.random.default_rng(0)
    noise = Observations(rng.normal(size=(40, 9, 6)), np.ones((40, 9)))
    with pytest.warns(ConvergenceWarning, match="ask for one concept alone.*set n_concepts by hand"):
        model = PACE("auto", **QUICK).fit(noise)
    assert model.selection_.n_concepts == 1
