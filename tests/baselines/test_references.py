import numpy as np
import pytest
import torch
from planted import planted
from scipy.optimize import linear_sum_assignment
from toys import GRID, read_by_all

from pace import Observations
from pace.baselines import GaussianMixture, KMeans, Majority, MeanEmbedding, PaceExplainer, SemiNMF, TrueColors
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
    counts = np.stack([np.bincount(row, minlength=5) for row in data.concepts]) / data.concepts.shape[1]
    np.testing.assert_allclose(found.theta[:, np.argsort(theirs)], counts, atol=0.06)
    np.testing.assert_allclose(found.theta.sum(1), 1, rtol=1e-5)
    constant = np.concatenate([data.observations.embeddings, np.ones((60, 37, 2))], 2)
    still = Observations(constant, data.observations.attention)
    assert np.isfinite(kind(5).fit(Here(), still).explain(still).theta).all()


def test_the_mixture_is_scikit_learns_from_the_same_start(data):
    from sklearn.mixture import GaussianMixture as Theirs

    method = GaussianMixture(5).fit(Here(), data.observations)
    patches = np.asarray(data.observations.embeddings).reshape(-1, 24)
    theirs = Theirs(5, covariance_type="diag", means_init=method.concepts_, random_state=0).fit(patches)
    np.testing.assert_allclose(method.concepts_, theirs.means_, atol=0.02)
    np.testing.assert_allclose(
        method.explain(data.observations).phi.reshape(-1, 5), theirs.predict_proba(patches), atol=0.02
    )


def test_semi_nmf_rebuilds_the_tokens(data):
    method = SemiNMF(8).fit(Here(), data.observations)
    phi = method.explain(data.observations).phi
    tokens = np.asarray(data.observations.embeddings)
    left = tokens - method.offset_.numpy() - phi @ method.concepts_
    assert (phi >= 0).all()
    assert np.square(left).mean() < 0.25 * tokens.var()


def test_the_mean_embedding_and_the_majority_are_just_that(data):
    found = MeanEmbedding().fit(Here(), data.observations).explain(data.observations)
    np.testing.assert_allclose(found.theta, np.asarray(data.observations.embeddings).mean(1), rtol=1e-4, atol=1e-5)
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
