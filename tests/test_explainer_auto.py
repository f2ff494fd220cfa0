"""PACE(n_concepts="auto") and prune: the estimator finds the number of its concepts, and keeps how."""

import warnings

import numpy as np
import pytest
import torch
from planted import planted
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning

from pace import PACE, Observations
from pace.fitting.arguments import prunes
from pace.fitting.checkpoints import Checkpoint

DATA = planted(0, k=4, d=8, images=60, grid=(4, 4))
QUICK = {"max_iter": 3, "device": "cpu"}


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
    assert all(tensor.equal(two.tensors()[name]) for name, tensor in one.tensors().items())


def assert_planted(means):
    distances = np.linalg.norm(means[:, None] - DATA.means, axis=2)
    assert sorted(distances.argmin(1)) == [0, 1, 2, 3]
    assert distances.min(1).max() < 0.5


def test_the_planted_number_is_found_and_learned(found):
    assert found.selection_.n_concepts == 4
    assert found.label_head_.shape == (4, 3)
    assert found.transform(DATA.observations).shape == (60, 4)
    assert_planted(found.means_)


def test_concepts_are_numbered_by_their_evidence(found):
    evidence = found.selection_.evidence
    assert bool((evidence[:-1] >= evidence[1:]).all())
    nearest = np.linalg.norm(found.means_[:, None] - found.selection_.means.numpy(), axis=2).argmin(1)
    assert nearest.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("covariance", ["full", "diag", "low_rank"])
def test_every_family_learns_the_same_number_of_concepts(covariance, found):
    model = fit(covariance=covariance)
    same_selection(model.selection_, found.selection_)
    assert_planted(model.means_)


def test_concepts_that_the_patches_do_not_ask_for_stay_empty_and_it_warns():
    with pytest.warns(UserWarning, match="4 of 20 concepts are in use: .*prune=False uses all"):
        pruned = PACE(20, prune=True, **QUICK).fit(DATA.observations, perturbed=DATA.perturbed)
    assert pruned.selection_.n_concepts == 4
    assert pruned.empty_concepts_.tolist() == list(range(4, 20))
    explanation = pruned.explain(DATA.observations)
    assert explanation.theta.shape == (60, 20)
    assert explanation.phi[:, :, 4:].max() < 1e-30
    assert np.isfinite(explanation.interval(0.9)).all()
    assert_planted(pruned.means_[:4])


@pytest.mark.parametrize("follows", [True, False])
def test_by_default_it_prunes_only_if_the_few_concepts_predict_the_label(follows, monkeypatch):
    """Patches need not lie in clouds; then they ask for few concepts, and these say little."""
    monkeypatch.setattr("pace.fitting.arguments._MANY_IMAGES", 10)
    rng = np.random.default_rng(0)
    shown, said = np.arange(60) % 2, np.arange(60) // 2 % 2
    concept = 2 * shown[:, None] + rng.integers(2, size=(60, 16))  # two concepts for each class
    patches = 4 * rng.normal(size=(4, 8))[concept] + 0.3 * rng.normal(size=(60, 16, 8))
    images = Observations(patches.astype(np.float32), np.ones((60, 16)), np.eye(2)[shown if follows else said])
    model = PACE(20, n_init=1, **QUICK)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(images)
    assert (model.selection_ is not None) == follows
    if follows:
        assert model.empty_concepts_.tolist() == list(range(4, 20))
        assert PACE(20, **QUICK).partial_fit(images).selection_ is None  # a first batch does not decide for all images


def test_nothing_is_left_empty_where_the_patches_ask_for_half_of_the_concepts():
    model = fit(7, prune=True, n_init=1)
    assert model.selection_ is None
    np.testing.assert_array_equal(model.means_, fit(7, n_init=1).means_)


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
def test_by_default_it_asks_where_there_are_enough_images(images, options, asked):
    view = Observations(np.ones((images, 2, 3), np.float32), np.ones((images, 2)), np.full((images, 2), 0.5))
    assert prunes(PACE(4, **options), view) == asked


def test_a_saved_model_keeps_how_its_number_was_found_and_a_clone_looks_again(found, tmp_path):
    found.save(tmp_path / "model.safetensors")
    loaded = PACE.load(tmp_path / "model.safetensors", device="cpu")
    same_selection(loaded.selection_, found.selection_)
    assert np.array_equal(loaded.transform(DATA.observations), found.transform(DATA.observations))
    assert loaded.n_concepts == found.n_concepts == "auto"  # fitting does not change what was asked for
    again = clone(found)
    assert not hasattr(again, "selection_")
    again.fit(DATA.observations, perturbed=DATA.perturbed)
    same_selection(again.selection_, found.selection_)
    assert np.array_equal(again.means_, found.means_)


def test_no_more_are_looked_for_than_allowed_and_it_warns():
    with pytest.warns(ConvergenceWarning, match="stopped at its upper limit of 3 concepts; raise max_concepts"):
        model = PACE("auto", max_concepts=3, **QUICK).fit(DATA.observations)
    assert model.means_.shape == (3, 8)
    assert max(model.selection_.numbers) == 3


def test_a_single_concept_is_warned_of_and_can_be_saved(tmp_path):
    """Without a neighbour its evidence is infinite."""
    cloud = torch.randn(60, 9, 3, generator=torch.Generator().manual_seed(0))
    with pytest.warns(ConvergenceWarning, match="ask for one concept only.*set n_concepts by hand"):
        model = PACE("auto", **QUICK).fit(Observations(cloud, torch.ones(60, 9)))
    model.save(tmp_path / "model.safetensors")
    assert PACE.load(tmp_path / "model.safetensors").selection_.evidence.tolist() == [np.inf]


def test_batches_after_the_first_learn_the_number_that_was_found():
    model = PACE("auto", **QUICK).partial_fit(DATA.observations[:40])
    first = model.selection_
    model.partial_fit(DATA.observations[40:])
    assert model.means_.shape == (4, 8)
    assert model.selection_ is first
    assert first.images == 40


class Crash(BaseException):
    """The power fails."""


@pytest.mark.parametrize("how", [{}, {"minibatch": 25}], ids=["all images", "minibatches"])
def test_a_fit_that_is_resumed_does_not_look_again_and_keeps_how(how, tmp_path, monkeypatch):
    whole, write = fit(**how), Checkpoint.write
    assert len(whole.means_) == whole.selection_.n_concepts == 4

    def crash(self, *state):
        write(self, *state)
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
    monkeypatch.setattr("rich.progress.Progress.update", lambda bar, task, completed, note: notes.append(note))
    selection = fit(progress=True).selection_
    assert notes[0] == "how many concepts?"
    shown = [note for note in notes if note.startswith("how many concepts: ")]
    assert shown[-1] == f"how many concepts: 4, bound {float(selection.bounds.max()):,.0f}"
    assert "epoch 1" in notes


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"updates": "paper"}, "n_concepts: 'auto' needs updates='exact'"),
        ({"n_concepts": "many"}, "n_concepts: expected .*'auto'.* found 'many'"),
        ({"max_concepts": 0}, "max_concepts: expected .* found 0"),
        ({"alpha": np.ones(7)}, "alpha: expected one positive number or 4 of them"),
    ],
)
def test_what_does_not_go_with_it_is_one_line(parameters, message):
    with pytest.raises(ValueError, match=message):
        fit(**parameters)
