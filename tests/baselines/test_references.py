import numpy as np
import pytest
import torch
from planted import planted
from scipy.optimize import linear_sum_assignment
from toys import GRID, read_by_all

from pace import Observations
from pace.baselines import (
    AttentionRank,
    ByLot,
    GaussianMixture,
    KMeans,
    Majority,
    MeanEmbedding,
    PaceExplainer,
    Position,
    RandomCentres,
    SemiNMF,
    TrueColors,
)
from pace.images import Color


class Here:
    """A backbone of which only the place is asked."""

    device = torch.device("cpu")


@pytest.fixture(scope="module")
def data():
    return planted(0, k=5, d=24, images=60, spread=0.3)


@pytest.mark.parametrize("kind", [KMeans, GaussianMixture])
def test_planted_clusters_are_found_and_counted(kind, data):
    method = kind(5).fit(Here(), data.observations)
    distances = np.linalg.norm(method.concepts_[:, None] - data.means, axis=2)
    ours, theirs = linear_sum_assignment(distances)
    assert distances[ours, theirs].max() < 0.5
    found = method.explain(data.observations)
    assert (theirs[found.phi.argmax(2)] == data.concepts).mean() > 0.99
    attention = data.observations.attention
    counts = np.stack([np.bincount(c, a, minlength=5) for c, a in zip(data.concepts, attention, strict=True)])
    np.testing.assert_allclose(found.theta[:, np.argsort(theirs)], counts, atol=0.06)
    np.testing.assert_allclose(found.theta.sum(1), 1, rtol=1e-5)
    constant = np.concatenate([data.observations.embeddings, np.ones((60, 37, 2))], 2)
    still = Observations(constant, data.observations.attention)
    assert np.isfinite(kind(5).fit(Here(), still).explain(still).theta).all()


def test_the_mixture_is_scikit_learns_from_the_same_start(data):
    from sklearn.mixture import GaussianMixture as Theirs

    even = Observations(data.observations.embeddings, np.ones((60, 37)))  # scikit-learn's knows no weights
    method = GaussianMixture(5).fit(Here(), even)
    patches = np.asarray(data.observations.embeddings).reshape(-1, 24)
    theirs = Theirs(5, covariance_type="diag", means_init=method.concepts_, random_state=0).fit(patches)
    np.testing.assert_allclose(method.concepts_, theirs.means_, atol=0.02)
    np.testing.assert_allclose(
        method.explain(data.observations).phi.reshape(-1, 5), theirs.predict_proba(patches), atol=0.02
    )


@pytest.mark.parametrize("kind", [KMeans, GaussianMixture])
def test_a_patch_of_twice_the_attention_counts_as_two(kind, data):
    embeddings = np.asarray(data.observations.embeddings)[:, :20]
    twice = np.where(np.arange(20) < 10, 2.0, 1.0) * np.ones((60, 1))
    repeated = np.concatenate([embeddings, embeddings[:, :10]], 1)
    plain = kind(5).fit(Here(), Observations(repeated, np.ones((60, 30))))
    weighted = kind(5).fit(Here(), Observations(embeddings, twice))
    distances = np.linalg.norm(plain.concepts_[:, None] - weighted.concepts_, axis=2)
    assert distances[linear_sum_assignment(distances)].max() < 1e-3
    theta = weighted.explain(Observations(embeddings, twice)).theta
    np.testing.assert_allclose(theta, weighted.explain(Observations(repeated, np.ones((60, 30)))).theta, atol=1e-4)


def test_random_centres_are_training_patches(data):
    method = RandomCentres(5).fit(Here(), data.observations, seed=1)
    patches = np.asarray(data.observations.embeddings, np.float32).reshape(-1, 24)
    assert np.linalg.norm(patches[:, None] - method.concepts_, axis=2).min(0).max() < 1e-5
    other = RandomCentres(5).fit(Here(), data.observations, seed=2)
    assert not np.isclose(other.concepts_[:, None], method.concepts_).all(2).any()
    nearest = np.linalg.norm(patches[:, None] - method.concepts_, axis=2).argmin(1)
    np.testing.assert_array_equal(method.explain(data.observations).phi.argmax(2).ravel(), nearest)


def test_by_lot_has_the_theta_of_k_means_and_moves_its_patches_from_view_to_view(data):
    ours, theirs = (kind(5).fit(Here(), data.observations) for kind in (ByLot, KMeans))
    found, plain = (method.explain(data.observations, seed=1) for method in (ours, theirs))
    np.testing.assert_array_equal(found.theta, plain.theta)
    np.testing.assert_array_equal(found.phi.sum(1), plain.phi.sum(1))
    np.testing.assert_array_equal(found.phi[:, 0], plain.phi[:, 0])  # CLS is no patch
    np.testing.assert_array_equal(found.phi, ours.explain(data.observations, seed=1).phi)
    view = ours.explain(data.perturbed, seed=1)
    same, chance = (found.phi == view.phi).all(2).mean(), (plain.phi.mean(1) ** 2).sum(1).mean()
    assert abs(same - chance) < 0.05
    np.testing.assert_allclose(view.phi.sum(1), plain.phi.sum(1), atol=1)  # while k-means itself hardly moves


def test_position_is_a_cell_of_the_picture():
    seen = Observations(np.ones((2, 25, 3)), np.ones((2, 25)), grid=(4, 6), prefix_tokens=1)
    found = Position(6).fit(Here(), seen).explain(seen)
    assert found.theta.shape == (2, 6)
    expected = [[0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2], [3, 3, 4, 4, 5, 5], [3, 3, 4, 4, 5, 5]]
    np.testing.assert_array_equal(found.phi[1, 1:].argmax(1).reshape(4, 6), expected)
    np.testing.assert_allclose(found.phi[:, 0], 1 / 6, rtol=1e-6)
    assert Position(100).fit(Here(), seen).explain(seen).theta.shape == (
        2,
        24,
    )  # one for every patch is all there can be
    assert Position(7).fit(Here(), seen).explain(seen).theta.shape == (2, 6)
    with pytest.raises(ValueError, match="needs observations with a grid"):
        Position().fit(Here(), seen).explain(Observations(np.ones((2, 25, 3)), np.ones((2, 25))))


def test_attention_rank_is_a_band_of_the_order_within_the_image():
    attention = np.array([[9.0, 1, 2, 3, 4, 5, 6], [9.0, 6, 5, 4, 3, 2, 1]])
    seen = Observations(np.ones((2, 7, 3)), attention, prefix_tokens=1)
    found = AttentionRank(3).fit(Here(), seen).explain(seen)
    np.testing.assert_array_equal(found.phi[:, 1:].argmax(2), [[2, 2, 1, 1, 0, 0], [0, 0, 1, 1, 2, 2]])
    np.testing.assert_allclose(found.phi[:, 0], 1 / 3, rtol=1e-6)
    assert AttentionRank(100).fit(Here(), seen).explain(seen).theta.shape == (2, 6)


@pytest.mark.filterwarnings("ignore:the bound still rises")
@pytest.mark.parametrize("options", [{}, {"n_init": 1}, {"n_concepts": "auto"}], ids=str)
def test_another_seed_is_another_start_for_pace(options, data):
    from pace import PACE
    from pace.fitting.arguments import settings_of
    from pace.fitting.start import find_start

    def start(seed):
        model = PACE(**{"n_concepts": 20, **options}, seed=seed, covariance="diag", device="cpu")
        course = find_start(model, data.observations, None, settings_of(model, data.observations))
        return (course.concepts.gaussians.means + course.concepts.offset).numpy()

    first, again, other = start(0), start(0), start(1)
    np.testing.assert_array_equal(first, again)
    assert first.shape != other.shape or not np.isclose(first[:, None], other).all(2).all(0).any()


def test_semi_nmf_rebuilds_the_tokens(data):
    method = SemiNMF(8).fit(Here(), data.observations)
    phi = method.explain(data.observations).phi
    tokens = np.asarray(data.observations.embeddings)
    left = tokens - method.offset_ - phi @ method.concepts_
    assert (phi >= 0).all()
    assert np.square(left).mean() < 0.25 * tokens.var()


def test_the_mean_embedding_and_the_majority_are_just_that(data):
    found = MeanEmbedding().fit(Here(), data.observations).explain(data.observations)
    mean = np.einsum("mj,mjd->md", data.observations.attention, data.observations.embeddings)
    np.testing.assert_allclose(found.theta, mean, rtol=1e-4, atol=1e-5)
    found = Majority().fit(Here(), data.observations).explain(data.observations)
    assert np.ptp(found.theta, axis=0).max() == 0
    predicted = np.bincount(np.asarray(data.observations.predictions).argmax(1), minlength=3)
    np.testing.assert_allclose(found.theta[0], predicted / 60, rtol=1e-6)
    with pytest.raises(ValueError, match="needs observations with predictions"):
        Majority().fit(Here(), Observations(data.observations.embeddings, data.observations.attention))


def test_true_colours_are_counted():
    images = Color("test", n_per_class=10, size=32)
    colors = np.stack([images.patch_colors(index, (4, 4)) for index in range(len(images))])
    observations = Observations(np.ones((len(images), 17, 3)), np.ones((len(images), 17)), grid=(4, 4), prefix_tokens=1)
    method = TrueColors([(observations, colors)]).fit(Here(), observations)
    found = method.explain(observations)
    assert found.theta.shape == (len(images), 100)
    for image in range(len(images)):
        np.testing.assert_array_equal(found.phi[image, 1:].argmax(1), colors[image].ravel())
        counts = np.bincount(colors[image].ravel(), minlength=100) + 0.1
        np.testing.assert_allclose(found.theta[image], counts / counts.sum(), rtol=1e-5)
    np.testing.assert_allclose(found.phi.sum(2), 1, rtol=1e-5)


def test_true_colours_of_unknown_observations_or_of_another_grid_are_refused():
    toy = read_by_all(3, 2)
    known, other = toy.observe(2, 0), toy.observe(2, 1)
    colors = np.zeros((2, *GRID), int)
    with pytest.raises(ValueError, match="not among the observations"):
        TrueColors([(known, colors)]).fit(Here(), known).explain(other)
    with pytest.raises(ValueError, match="expected colours of shape"):
        TrueColors([(known, colors[:, :1])])
    with pytest.raises(ValueError, match="n_concepts: expected more than 3, the last colour; found 3"):
        TrueColors([(known, colors + 3 * np.eye(2, dtype=int)[:, :1, None])], n_concepts=3)


@pytest.mark.filterwarnings("ignore:the bound still rises")
def test_pace_is_pace(data):
    from pace import PACE

    options = {"covariance": "diag", "max_iter": 3, "n_init": 1}
    ours = PaceExplainer(5, **options).fit(Here(), data.observations, perturbed=data.perturbed, seed=2)
    plain = PACE(5, seed=2, **options).fit(data.observations, perturbed=data.perturbed)
    np.testing.assert_array_equal(ours.explain(data.observations).gamma, plain.explain(data.observations).gamma)
    np.testing.assert_array_equal(ours.concepts_, plain.means_)
    assert PaceExplainer(updates="paper").name == "pace-paper"
