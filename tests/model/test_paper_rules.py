"""`updates="paper"` against the printed equations, transcribed in printed_equations.py."""

import numpy as np
import pytest
import torch
from printed_equations import bound_e, bound_f, bound_s, m_step, sweep

from pace import Observations
from pace.model.concepts import Concepts, update
from pace.model.gaussians import FullGaussians, Prior
from pace.model.learning import Memory, expect_all
from pace.model.settings import Settings

M, J, K, N, D = 7, 5, 3, 4, 2
GROUPS = [[0, 2, 4, 6], [1, 3, 5]]  # two, of at most four images
ALPHA = np.array([0.2, 0.1, 0.4])


def printed(e, a, y, e_p, a_p, parameters, sweeps):
    """All groups, from φ uniform: bounds, means and covariances that an epoch of the printed rules leaves, and γ, φ̄."""
    means, covariances, head, beta = parameters
    bounds, kept, gammas, phi_bars = np.zeros(3), [], np.empty((M, K)), np.empty((M, K))
    for group in GROUPS:
        given = [None if x is None else x[group] for x in (e, a, y, e_p, a_p)]
        gamma, phi_bar = np.tile(ALPHA + 1 / K, (len(group), 1)), np.full((len(group), K), 1 / K)
        state = [gamma, gamma, phi_bar, phi_bar]
        for _ in range(sweeps):
            phi, phi_p, *state = sweep(*given, ALPHA, means, covariances, head, beta, *state)
        gamma, gamma_p, phi_bar, phi_bar_p = state
        gammas[group], phi_bars[group] = gamma, phi_bar
        for views in [(phi, gamma, a, e), (phi_p, gamma_p, a_p, e_p)][: 1 if e_p is None else 2]:
            own = (views[0], views[2][group], views[3][group])
            bounds[0] += bound_e(own[0], views[1], *own[1:], ALPHA, means, covariances).sum()
            kept.append(own)
        bounds[1] += bound_f(phi_bar, given[2], head).sum()
        bounds[2] += bound_s(phi_bar, phi_bar_p, beta).sum()
    return bounds, *m_step(kept), gammas, phi_bars


@pytest.mark.parametrize("sweeps", [1, 5])
@pytest.mark.parametrize(("paired", "labelled"), [(True, True), (True, False), (False, True), (False, False)])
def test_an_epoch_agrees_with_the_printed_equations_to_1e_8(sweeps, paired, labelled):
    rng = np.random.default_rng(sweeps)
    e, e_p = rng.normal(size=(2, M, J, D)) if paired else (rng.normal(size=(M, J, D)), None)
    a, a_p = rng.dirichlet(np.ones(J), (2, M)) if paired else (rng.dirichlet(np.ones(J), M), None)
    y = rng.dirichlet(np.ones(N), M) if labelled else None
    root = rng.normal(size=(K, D, D))
    means, covariances = rng.normal(size=(K, D)), root @ root.transpose(0, 2, 1) + np.eye(D)
    head, beta = rng.uniform(-1, 1, (K, N if labelled else 0)), rng.uniform(0, 1, K)
    expected = printed(e, a, y, e_p, a_p, (means, covariances, head, beta), sweeps)
    bounds, new_means, new_covariances, gamma, phi_bar = expected

    settings = Settings(
        torch.device("cpu"), torch.float64, "paper", max_sweeps=sweeps, sweep_tol=0.0, negatives=4, learn_alpha=False
    )
    offset = torch.tensor([0.3, -2.0], dtype=torch.float64)
    inverse = np.linalg.inv(covariances)
    factors = np.linalg.cholesky(inverse[:, ::-1, ::-1])[:, ::-1, ::-1].copy()  # upper triangular P with P Pᵀ = Σ⁻¹
    gaussians = FullGaussians(torch.from_numpy(means) - offset, torch.from_numpy(factors))
    concepts = Concepts(gaussians, offset, *map(torch.from_numpy, (ALPHA, head, beta)))
    memory = Memory(2 if paired else 1, M, J, concepts, settings)
    perturbed = Observations(e_p, a_p) if paired else None
    statistics = expect_all(Observations(e, a, y), perturbed, concepts, settings, memory)
    np.testing.assert_allclose(statistics.bound, bounds, rtol=1e-8, atol=1e-8)
    counts, means_of_phi = memory.recall(slice(0, M))
    np.testing.assert_allclose(counts[:M].numpy() + ALPHA, gamma, rtol=1e-8)
    np.testing.assert_allclose(means_of_phi[:M], phi_bar, rtol=1e-8)

    learned = update(concepts, statistics, Prior(torch.eye(D, dtype=torch.float64), 0.0), settings).gaussians
    np.testing.assert_allclose(learned.means + offset, new_means, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(learned.covariances(), new_covariances, rtol=1e-8, atol=1e-8)
