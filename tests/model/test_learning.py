"""Learning: the bound never falls, statistics add up, and nothing depends on order, labels, batches or coordinates."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from planted import planted
from sklearn.exceptions import ConvergenceWarning

from pace import PACE, Observations
from pace.model.concepts import Concepts, _ascend, bound_of, fit_dirichlet, update
from pace.model.feeding import Feed, Visits
from pace.model.gaussians import FullGaussians, Prior, TiedGaussians
from pace.model.learning import Memory, expect, expect_all, explain_batch
from pace.model.objective import faithfulness, faithfulness_gradients
from pace.model.seeding import draw_sample, place, within_covariance
from pace.model.settings import Settings

FAMILIES = ["full", "diag", "tied", "low_rank"]
# A fixed number of sweeps: at the tolerance, rounding may decide whether an image is swept once more.
EXACT = Settings(torch.device("cpu"), torch.float64, max_sweeps=3, sweep_tol=0.0, head_steps=10, negatives=7)


def small(seed, **options):
    return planted(seed, **({"k": 4, "d": 5, "images": 12, "grid": (1, 5), "spread": 1.5} | options))


def learned(views, means, family="full", settings=EXACT, epochs=5):
    """Concepts that began at these means, and the bound of every epoch."""
    sample = draw_sample(views[0], len(means), settings, np.random.default_rng(0))
    begin = torch.as_tensor(means).to(settings.dtype) - sample.offset
    prior = Prior(within_covariance(sample, begin), 5.0)
    alpha = torch.full((len(means),), 0.1, dtype=torch.float64)
    concepts = place(begin, sample, prior, alpha, views[0].n_classes, family, rank=2)
    memory, bounds = Memory(len(views), len(views[0]), views[0].n_tokens, concepts, settings), []
    for _ in range(epochs):
        statistics = expect_all(views[0], views[1] if len(views) > 1 else None, concepts, settings, memory)
        bounds.append(bound_of(statistics, concepts, prior, len(views[0])))
        concepts = update(concepts, statistics, prior, settings)
    return concepts, np.array(bounds)


def explained(concepts, view, settings=EXACT, **options):
    batch = view.batch(slice(None), settings.device, settings.dtype)
    return explain_batch(batch, concepts, settings, **options)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


def never_falls(bounds, tolerance=1e-9):
    return (np.diff(bounds) >= -tolerance * np.abs(bounds[1:])).all()


@pytest.mark.parametrize("family", FAMILIES)
@given(seed=st.integers(0, 10_000), sweeps=st.sampled_from([1, 4]), labelled=st.booleans(), learn=st.booleans())
@examples(max_examples=6)
def test_the_bound_never_falls_over_epochs(family, seed, sweeps, labelled, learn):
    """From six tokens an image up this is proved (docs/model.md), so there is no tolerance but rounding."""
    data = small(seed)
    views, rng = data[:2], np.random.default_rng(seed)
    if not labelled:
        views = [Observations(data.observations.embeddings, data.observations.attention)]
    settings = replace(EXACT, max_sweeps=sweeps, learn_alpha=learn, head_steps=50)
    concepts, bounds = learned(views, rng.normal(size=(6, 5)), family, settings, epochs=8)
    assert never_falls(bounds.sum(1))
    assert concepts.label_head.numel() == 0 or concepts.label_head.abs().max() <= 1
    assert concepts.pair_weights.min() >= 0
    assert concepts.pair_weights.max() <= 1


@pytest.mark.parametrize("updates", ["exact", "paper"])
def test_the_bound_of_relative_distances_is_that_of_distances(updates, monkeypatch):
    data, settings = small(3), replace(EXACT, updates=updates)
    _, found = learned(data[:2], data.means, "tied", settings)
    distances = TiedGaussians.mahalanobis
    monkeypatch.setattr(TiedGaussians, "mahalanobis", lambda self, x, *_, **__: distances(self, x))
    monkeypatch.setattr(TiedGaussians, "left_out", lambda *_: 0.0)
    monkeypatch.setattr(TiedGaussians, "fixed", ())  # and every epoch adds up the squares anew
    _, expected = learned(data[:2], data.means, "tied", settings)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_predictions_that_do_not_quite_sum_to_one_do_not_let_the_bound_fall():
    data = small(3)
    off = Observations(data.observations.embeddings, data.observations.attention, 1.019 * data.observations.predictions)
    assert never_falls(learned([off, data.perturbed], data.means, epochs=8)[1].sum(1))


def test_the_heads_learn_what_the_concepts_say_about_classes():
    data = planted(0, images=60, grid=(4, 4))
    settings = replace(EXACT, dtype=torch.float32, head_steps=100)
    concepts, bounds = learned(data[:2], data.means, "tied", settings, epochs=10)
    assert bounds[-1, 1] > bounds[0, 1] + 0.02
    scores = explained(concepts, data.observations, settings).phi_bar @ concepts.label_head
    assert (scores.numpy().argmax(1) == data.observations.predictions.argmax(1)).mean() > 0.8


@pytest.mark.parametrize("seed", [0, 1])
def test_relabelling_the_concepts_changes_nothing_else(seed):
    data, order = small(seed), np.random.default_rng(seed).permutation(4)
    (one, bounds), (two, same) = (learned(data[:2], means) for means in (data.means, data.means[order]))
    close(two.gaussians.means, one.gaussians.means[order])
    np.testing.assert_allclose(same, bounds)
    close(explained(two, data.observations).phi, explained(one, data.observations).phi[..., order])


@pytest.mark.parametrize("seed", [0, 1])
def test_reordering_the_images_changes_nothing_else(seed):
    data, order = small(seed), np.random.default_rng(seed).permutation(12)
    settings = replace(EXACT, negatives=12)  # one group, whatever the order
    one, _ = learned(data[:2], data.means, settings=settings)
    two, _ = learned([view[order] for view in data[:2]], data.means, settings=settings)
    close(two.gaussians.means, one.gaussians.means)
    close(explained(two, data.observations).gamma, explained(one, data.observations).gamma)


@pytest.mark.parametrize("seed", [0, 1])
def test_rotating_and_shifting_the_embeddings_leaves_theta_with_full_covariances(seed):
    data, rng = small(seed), np.random.default_rng(seed)
    rotation, shift = np.linalg.qr(rng.normal(size=(5, 5)))[0], 10 * rng.normal(size=5)
    moved = [Observations(v.embeddings @ rotation + shift, v.attention, v.predictions) for v in data[:2]]
    one, _ = learned(data[:2], data.means)
    two, _ = learned(moved, data.means @ rotation + shift)
    close(explained(two, moved[0]).gamma, explained(one, data.observations).gamma)


@pytest.mark.parametrize(
    ("family", "updates"), [("full", "paper"), ("diag", "exact"), ("tied", "exact"), ("low_rank", "exact")]
)
def test_the_batch_size_changes_nothing_but_rounding(family, updates):
    data = small(1, images=30)
    one, *others = (
        learned(data[:2], data.means, family, replace(EXACT, updates=updates, batch_size=size)) for size in (1, 9, 1000)
    )
    for concepts, bounds in others:
        close(concepts.gaussians.means, one[0].gaussians.means)
        np.testing.assert_allclose(bounds, one[1], rtol=1e-8)


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_of_several_processes_add_up_to_those_of_one(family):
    data = small(2, images=24)
    concepts, _ = learned(data[:2], data.means, family, epochs=1)
    whole = expect_all(*data[:2], concepts, EXACT)
    with Feed(data[:2], EXACT.device, EXACT.dtype) as feed:
        parts = [expect(feed, Visits(24, 7, rank, 3), concepts, EXACT) for rank in range(3)]
    merged = (parts[2] + parts[0] + parts[1]).tensors()
    for name, tensor in type(whole).from_tensors(whole.tensors()).tensors().items():
        torch.testing.assert_close(merged[name], tensor, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("family", FAMILIES)
def test_gamma_is_the_same_with_patches_and_without(family):
    data = planted(0, k=6, d=24, images=40, grid=(4, 4))
    settings = replace(EXACT, dtype=torch.float32, max_sweeps=10)
    concepts, _ = learned([data.observations], data.means, family, settings, epochs=2)
    whole, gamma_alone = (explained(concepts, data.observations, settings, patches=p).gamma for p in (True, False))
    torch.testing.assert_close(gamma_alone, whole, rtol=1e-4, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_and_input_give_the_same_bits(family):
    data = small(0, images=40)

    def fit(seed):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return PACE(6, covariance=family, n_init=2, max_iter=3, seed=seed, device="cpu").fit(
                *data[:1], perturbed=data[1]
            )

    one, two, other = fit(0), fit(0), fit(5)
    assert one.lower_bounds_ == two.lower_bounds_
    assert np.array_equal(one.means_, two.means_)
    assert np.array_equal(one.covariances_, two.covariances_)
    assert np.array_equal(one.explain(data.perturbed).phi, two.explain(data.perturbed).phi)
    assert not np.array_equal(one.means_, other.means_)


def test_adam_on_the_minorant_never_lowers_l_f_and_reaches_the_best_point_of_the_box():
    torch.manual_seed(0)
    phi_bar = torch.distributions.Dirichlet(torch.full((6,), 0.2, dtype=torch.float64)).sample((300,))
    labels = torch.nn.functional.one_hot(phi_bar.argmax(1) % 3, 3).double()
    head, values = torch.zeros(6, 3, dtype=torch.float64), []
    for _ in range(60):
        values.append(float(faithfulness(phi_bar, labels, head).sum()))
        curvature = 0.5 * phi_bar.T @ phi_bar
        slope = faithfulness_gradients(phi_bar, labels, head)[1] + curvature @ head
        head = _ascend(head, slope, curvature, (-1.0, 1.0), replace(EXACT, head_steps=100))
    assert never_falls(values, 1e-12)
    expected = torch.full((6, 3), -1.0, dtype=torch.float64)
    expected[torch.arange(6), torch.arange(6) % 3] = 1.0
    assert (head - expected).abs().max() < 1e-3


def test_a_learned_dirichlet_is_the_one_the_draws_came_from():
    torch.manual_seed(0)
    truth = torch.tensor([0.05, 0.3, 1.0, 4.0], dtype=torch.float64)
    draws = torch.distributions.Dirichlet(truth).sample((20_000,)).clamp_min(1e-300)
    alpha = torch.full((4,), 0.1, dtype=torch.float64)
    for _ in range(30):
        alpha = fit_dirichlet(alpha, draws.log().mean(0), 1e-3)
    torch.testing.assert_close(alpha, truth, rtol=0.05, atol=0)


def test_concepts_that_need_not_move_stay_the_same_object():
    """With what their Gaussians have worked out, which takes longer than explaining a few images."""
    gaussians = FullGaussians.seed(torch.ones(3, 4), torch.eye(4, dtype=torch.float64), rank=0)
    zeros = torch.zeros(3, dtype=torch.float64)
    concepts = Concepts(gaussians, torch.zeros(4), zeros + 1, zeros[:, None], zeros)
    assert concepts.to(torch.device("cpu"), torch.float32) is concepts
    assert concepts.to(torch.device("cpu"), torch.float64).gaussians.means.dtype == torch.float64
