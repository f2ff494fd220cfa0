"""Effective patches: Kish's number, and neighbours that repeat each other; coverage is in tests/benchmarks."""

import numpy as np
import pytest

from pace.explanation import Explanation
from pace.model.effective import effective_weights, learn_intervals

GRID = (14, 14)
TOKENS = 14 * 14


def regions(theta, side, rng):
    """A concept for every patch: squares of side x side patches draw theirs from θ."""
    cells = -(-14 // side)
    drawn = np.stack([rng.choice(len(row), cells * cells, p=row) for row in theta]).reshape(-1, cells, cells)
    return drawn.repeat(side, 1).repeat(side, 2)[:, :14, :14].reshape(len(theta), TOKENS)


def learned(concepts, k, grid=GRID, prefix=0):
    """ρ and prior of images whose concepts are known for sure."""
    phi = np.eye(k)[concepts]
    return learn_intervals(phi, 0.1 + phi.sum(1), np.ones(concepts.shape), grid, prefix)


@pytest.mark.parametrize("side", [1, 2, 7])
def test_regions_count_once_however_many_patches_they_have_and_the_prior_is_found(side):
    rng = np.random.default_rng(0)
    prior = np.array([2.0, 1.0, 0.5, 0.2])
    neighbours, found = learned(regions(rng.dirichlet(prior, 400), side, rng), 4)
    weights = effective_weights(np.ones((1, TOKENS)), neighbours, GRID, 0)
    assert weights.sum() == pytest.approx((14 / side) ** 2, rel=0.15)
    np.testing.assert_allclose(found, prior, rtol=0.25)


def test_without_neighbours_the_number_is_kishs():
    attention = np.random.default_rng(1).exponential(size=(3, TOKENS)) ** 2
    kish = attention.sum(1) ** 2 / (attention**2).sum(1)
    for likeness in (None, np.eye(14)[:1] * np.eye(14)[:, :1]):
        weights = effective_weights(attention, likeness, GRID, 0)
        np.testing.assert_allclose(weights.sum(1), kish)
        np.testing.assert_allclose(weights / weights.sum(1)[:, None], attention / attention.sum(1)[:, None])


def test_a_prefix_token_is_nobodys_neighbour_and_a_larger_grid_is_taken():
    likeness = np.ones((2, 2))
    weights = effective_weights(np.ones((1, 1 + 16)), likeness, (4, 4), 1)
    pairs = (4 + 2 * 3) ** 2  # of neighbours or a patch with itself, in rows and in columns
    assert weights.sum() == pytest.approx(17**2 / (pairs + 1))


def test_one_concept_everywhere_leaves_one_patch():
    neighbours, prior = learned(np.repeat([0, 1, 2], 16).reshape(3, 16), 3, (4, 4))
    assert effective_weights(np.ones((1, 16)), neighbours, (4, 4), 0).sum() == 1
    assert prior.sum() < 0.1  # images have nothing in common


def test_without_a_grid_the_prior_is_still_found():
    rng = np.random.default_rng(4)
    neighbours, prior = learned(regions(rng.dirichlet(np.ones(4), 400), 1, rng), 4, None)
    assert neighbours is None
    np.testing.assert_allclose(prior, 1, rtol=0.25)


def test_where_every_patch_has_one_concept_for_sure_shares_are_dirichlet():
    rng = np.random.default_rng(3)
    concepts, prior = regions(rng.dirichlet(np.ones(4), 6), 1, rng), np.array([0.5, 1.0, 0.2, 0.3])
    phi, weights = np.eye(4)[concepts], np.full((6, TOKENS), 30 / TOKENS)
    gamma = 0.1 + phi.sum(1)
    found = Explanation(gamma / gamma.sum(1, keepdims=True), gamma, phi, GRID, 0, weights, prior)
    for_it, against = found._marginals()
    expected = prior + 30 * phi.mean(1)
    np.testing.assert_allclose(for_it, expected, rtol=1e-6)
    np.testing.assert_allclose(against, expected.sum(1, keepdims=True) - expected, rtol=1e-6)
