"""Learning: the bound never falls, statistics add up, and nothing depends on order, labels, batches or coordinates."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from planted import planted
from sklearn.exceptions import ConvergenceWarning

from pace import PACE, Observations
from pace.fitting.parameters import settings_of
from pace.model.gaussians import FullGaussians
from pace.model.learning import Concepts, _ascend, fit_dirichlet, pass_over, update
from pace.model.objective import faithfulness, faithfulness_gradients

FAMILIES = ["full", "diag", "tied", "low_rank"]


def fit(observations, perturbed=None, **parameters):
    # A fixed number of sweeps: at the stopping threshold, rounding may decide whether an image gets one sweep more.
    fixed = {"dtype": "float64", "device": "cpu", "tol": 0.0, "sweep_tol": 0.0, "max_iter": 8, "max_sweeps": 10}
    chosen = fixed | {"rank": 2, "n_init": 1} | parameters
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return PACE(**chosen).fit(observations, perturbed=perturbed)


def small(seed, **options):
    return planted(seed, **({"k": 4, "d": 5, "images": 12, "grid": (3, 3), "spread": 1.5} | options))


def never_falls(bounds, tolerance=1e-9):
    return (np.diff(bounds) >= -tolerance * np.abs(bounds[1:])).all()


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=st.integers(0, 10_000), learn=st.booleans())
@examples(max_examples=8, deadline=None)
def test_l_e_never_falls_over_epochs(family, seed, learn):
    data = small(seed)
    unlabelled = Observations(data.observations.embeddings, data.observations.attention)
    model = fit(unlabelled, n_concepts=6, covariance=family, alpha="learn" if learn else 0.2, seed=seed, max_sweeps=5)
    assert never_falls([bound.embedding for bound in model.lower_bounds_])


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=st.integers(0, 10_000), sweeps=st.sampled_from([1, 3, 50]))
@examples(max_examples=8, deadline=None)
def test_the_whole_bound_never_falls_with_the_heads(family, seed, sweeps):
    """From six tokens an image up this is proved (docs/model.md), so there is no tolerance but rounding."""
    data = small(seed, grid=(1, 5))
    model = fit(
        data.observations, data.perturbed, n_concepts=5, covariance=family, seed=seed, max_sweeps=sweeps, negatives=5
    )
    assert never_falls([bound.total for bound in model.lower_bounds_])
    assert np.abs(model.label_head_).max() <= 1
    assert model.pair_weights_.min() >= 0
    assert model.pair_weights_.max() <= 1


def test_the_heads_learn_what_the_concepts_say_about_classes():
    data = planted(0)
    model = fit(data.observations, data.perturbed, n_concepts=8, max_iter=15)
    first, last = model.lower_bounds_[0], model.lower_bounds_[-1]
    assert last.faithfulness > first.faithfulness + 0.02
    scores = model.explain(data.observations).theta @ model.label_head_
    assert (scores.argmax(1) == data.observations.predictions.argmax(1)).mean() > 0.8


@given(seed=st.integers(0, 10_000))
@examples(max_examples=8, deadline=None)
def test_relabelling_the_concepts_changes_nothing_else(seed):
    data = small(seed)
    order = np.random.default_rng(seed).permutation(4)
    one = fit(data.observations, data.perturbed, n_concepts=4, init=data.means)
    two = fit(data.observations, data.perturbed, n_concepts=4, init=data.means[order])
    np.testing.assert_allclose(two.means_, one.means_[order], rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(
        two.explain(data.observations).phi, one.explain(data.observations).phi[..., order], rtol=1e-6, atol=1e-8
    )


@given(seed=st.integers(0, 10_000))
@examples(max_examples=8, deadline=None)
def test_reordering_the_images_changes_nothing_else(seed):
    data = small(seed)
    order = np.random.default_rng(seed).permutation(12)
    one = fit(data.observations, data.perturbed, n_concepts=4, init=data.means)
    two = fit(data.observations[order], data.perturbed[order], n_concepts=4, init=data.means)
    np.testing.assert_allclose(two.means_, one.means_, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(two.transform(data.observations), one.transform(data.observations), rtol=1e-6, atol=1e-8)


@given(seed=st.integers(0, 10_000))
@examples(max_examples=8, deadline=None)
def test_rotating_and_shifting_the_embeddings_leaves_theta_with_full_covariances(seed):
    data = small(seed)
    rng = np.random.default_rng(seed)
    rotation, _ = np.linalg.qr(rng.normal(size=(5, 5)))
    shift = 10 * rng.normal(size=5)

    def moved(observations):
        embeddings = observations.embeddings @ rotation + shift
        return Observations(embeddings, observations.attention, observations.predictions)

    one = fit(data.observations, data.perturbed, n_concepts=4, init=data.means)
    two = fit(moved(data.observations), moved(data.perturbed), n_concepts=4, init=data.means @ rotation + shift)
    np.testing.assert_allclose(
        two.transform(moved(data.observations)), one.transform(data.observations), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("updates", ["exact", "paper"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_batch_size_changes_nothing_but_rounding(family, updates):
    data = small(1, images=30)
    fits = [
        fit(
            data.observations,
            data.perturbed,
            n_concepts=4,
            covariance=family,
            updates=updates,
            negatives=7,
            batch_size=size,
        )
        for size in (1, 9, 1000)
    ]
    for other in fits[1:]:
        np.testing.assert_allclose(other.means_, fits[0].means_, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(np.array(other.lower_bounds_), np.array(fits[0].lower_bounds_), rtol=1e-8)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_same_seed_and_input_give_the_same_bits(family, dtype):
    data = planted(0, images=40)
    one, two = (
        fit(data.observations, data.perturbed, n_concepts=10, covariance=family, dtype=dtype, n_init=3)
        for _ in range(2)
    )
    assert one.lower_bounds_ == two.lower_bounds_
    assert np.array_equal(one.means_, two.means_)
    assert np.array_equal(one.covariances_, two.covariances_)
    assert np.array_equal(one.explain(data.perturbed).phi, two.explain(data.perturbed).phi)
    assert not np.array_equal(
        one.means_, fit(data.observations, data.perturbed, n_concepts=10, covariance=family, dtype=dtype, seed=5).means_
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_of_parts_add_up_to_those_of_the_whole(family):
    data = small(2, images=24)
    model = PACE(4, covariance=family, rank=2, negatives=6, dtype="float64", device="cpu")
    settings = settings_of(model, data.observations)
    start = model._start(data.observations, data.perturbed, settings)
    concepts, prior = start.concepts, start.prior
    concepts = update(concepts, pass_over(data.observations, data.perturbed, concepts, settings), prior, settings)
    whole = pass_over(data.observations, data.perturbed, concepts, settings)
    # Images 0, 4, 8, … are one group of negatives. Two parts of two groups each, laid out so that they stay groups.
    halves = [np.stack([np.arange(g, 24, 4) for g in pair], axis=1).ravel() for pair in ((2, 3), (0, 1))]
    parts = [pass_over(data.observations[half], data.perturbed[half], concepts, settings) for half in halves]
    merged = parts[0] + parts[1]
    for name, tensor in whole.tensors().items():
        torch.testing.assert_close(merged.tensors()[name], tensor, msg=lambda text, name=name: f"{name}: {text}")
    assert type(whole).from_tensors(whole.tensors()).tensors().keys() == whole.tensors().keys()


def test_adam_on_the_minorant_never_lowers_l_f_and_reaches_the_best_point_of_the_box():
    torch.manual_seed(0)
    phi_bar = torch.distributions.Dirichlet(torch.full((6,), 0.2, dtype=torch.float64)).sample((300,))
    labels = torch.nn.functional.one_hot(phi_bar.argmax(1) % 3, 3).double()
    head, values = torch.zeros(6, 3, dtype=torch.float64), []
    for _ in range(60):
        values.append(float(faithfulness(phi_bar, labels, head).sum()))
        curvature = 0.5 * phi_bar.T @ phi_bar
        slope = faithfulness_gradients(phi_bar, labels, head)[1] + curvature @ head
        head = _ascend(head, slope, curvature, (-1.0, 1.0), 100, 0.05)
    assert never_falls(values, 1e-12)
    expected = torch.full((6, 3), -1.0, dtype=torch.float64)
    expected[torch.arange(6), torch.arange(6) % 3] = 1.0
    assert (head - expected).abs().max() < 1e-3


def test_predictions_that_do_not_quite_sum_to_one_do_not_let_the_bound_fall():
    data = small(3, grid=(1, 5))
    off = Observations(data.observations.embeddings, data.observations.attention, 1.019 * data.observations.predictions)
    assert never_falls([bound.total for bound in fit(off, data.perturbed, n_concepts=5).lower_bounds_])


def test_a_learned_dirichlet_is_the_one_the_draws_came_from():
    truth = torch.tensor([0.05, 0.3, 1.0, 4.0], dtype=torch.float64)
    draws = torch.distributions.Dirichlet(truth).sample((20_000,)).clamp_min(1e-300)
    alpha = torch.full((4,), 0.1, dtype=torch.float64)
    for _ in range(30):
        alpha = fit_dirichlet(alpha, draws.log().mean(0), 1e-3)
    torch.testing.assert_close(alpha, truth, rtol=0.05, atol=0)


def test_concepts_that_need_not_move_stay_the_same_object():
    """With what their Gaussians have worked out, which takes longer than explaining a few images."""
    torch.manual_seed(0)
    gaussians = FullGaussians.seed(torch.randn(3, 4), torch.eye(4, dtype=torch.float64), rank=0)
    concepts = Concepts(
        gaussians, torch.zeros(4), torch.ones(3).double(), torch.zeros(3, 0).double(), torch.zeros(3).double()
    )
    assert concepts.to(torch.device("cpu"), torch.float32) is concepts
    assert concepts.to(torch.device("cpu"), torch.float64).gaussians.means.dtype == torch.float64
