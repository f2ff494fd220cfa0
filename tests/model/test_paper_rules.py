"""`updates="paper"` against the printed equations, transcribed with loops in printed_equations.py."""

import numpy as np
import pytest
import torch
from printed_equations import bound_e, bound_f, bound_s, m_step, sweep

from pace import Observations
from pace.model.concepts import Concepts, update
from pace.model.gaussians import FullGaussians, Prior
from pace.model.learning import Memory, expect_all
from pace.model.settings import Settings

M, J, K, N, D, GROUP = 7, 5, 3, 4, 2, 4
ALPHA = np.array([0.2, 0.1, 0.4])


def view(rng):
    attention = rng.dirichlet(np.ones(J), M)
    return rng.normal(size=(M, J, D)), attention, rng.dirichlet(np.ones(N), M)


def printed(views, predictions, parameters, groups, sweeps):
    """All groups, from φ uniform: the statistics an epoch of the printed rules leaves."""
    means, covariances, head, beta = parameters
    (e, a), (e_p, a_p) = views if len(views) == 2 else (views[0], (None, None))
    bounds, kept, locals_ = np.zeros(3), [], []
    for group in groups:
        gamma = np.tile(ALPHA + 1 / K, (len(group), 1))
        phi_bar = np.full((len(group), K), 1 / K)
        state = (gamma, None if e_p is None else gamma, phi_bar, None if e_p is None else phi_bar)
        for _ in range(sweeps):
            phi, phi_p, *state = sweep(
                e[group],
                a[group],
                *(None if x is None else x[group] for x in (predictions, e_p, a_p)),
                ALPHA,
                means,
                covariances,
                head,
                beta,
                *state,
            )
        gamma, gamma_p, phi_bar, phi_bar_p = state
        bounds[0] += bound_e(phi, gamma, a[group], e[group], ALPHA, means, covariances).sum()
        kept.append((phi, a[group], e[group]))
        if e_p is not None:
            bounds[0] += bound_e(phi_p, gamma_p, a_p[group], e_p[group], ALPHA, means, covariances).sum()
            bounds[2] += bound_s(phi_bar, phi_bar_p, beta).sum()
            kept.append((phi_p, a_p[group], e_p[group]))
        if predictions is not None:
            bounds[1] += bound_f(phi_bar, predictions[group], head).sum()
        locals_.append((gamma, phi_bar))
    order = np.argsort(np.concatenate(groups))
    gamma, phi_bar = (np.concatenate(values)[order] for values in zip(*locals_, strict=True))
    return bounds, m_step(kept), gamma, phi_bar


@pytest.mark.parametrize("sweeps", [1, 5])
@pytest.mark.parametrize(("paired", "labelled"), [(True, True), (True, False), (False, True), (False, False)])
def test_an_epoch_agrees_with_the_printed_equations_to_1e_8(sweeps, paired, labelled):
    rng = np.random.default_rng(sweeps)
    (e, a, y), (e_p, a_p, _) = view(rng), view(rng)
    root = rng.normal(size=(K, D, D))
    parameters = (
        rng.normal(size=(K, D)), root @ root.transpose(0, 2, 1) + np.eye(D), rng.uniform(-1, 1, (K, N)), rng.uniform(0, 1, K)
    )  # fmt: skip
    y = y if labelled else None
    groups = [[0, 2, 4, 6], [1, 3, 5]]  # two groups of at most four
    views = [(e, a), (e_p, a_p)] if paired else [(e, a)]
    bounds, (means, covariances), gamma, phi_bar = printed(views, y, parameters, groups, sweeps)

    observations = Observations(e, a, y)
    perturbed = Observations(e_p, a_p) if paired else None
    settings = Settings(
        torch.device("cpu"), torch.float64, "paper", max_sweeps=sweeps, sweep_tol=0.0, negatives=GROUP, learn_alpha=False
    )
    offset = torch.tensor([0.3, -2.0], dtype=torch.float64)
    inverse = np.linalg.inv(parameters[1])
    factors = np.linalg.cholesky(inverse[:, ::-1, ::-1])[:, ::-1, ::-1].copy()  # upper triangular P with P Pᵀ = Σ⁻¹
    concepts = Concepts(
        FullGaussians(torch.from_numpy(parameters[0]) - offset, torch.from_numpy(factors)),
        offset,
        torch.from_numpy(ALPHA),
        torch.from_numpy(parameters[2]) if labelled else torch.zeros(K, 0, dtype=torch.float64),
        torch.from_numpy(parameters[3]),
    )
    memory = Memory(2 if paired else 1, M, K, J, settings)
    statistics = expect_all(observations, perturbed, concepts, settings, memory)
    np.testing.assert_allclose(statistics.bound.numpy(), bounds, rtol=1e-8, atol=1e-8)
    counts, means_of_phi = memory.recall(slice(0, M))
    np.testing.assert_allclose(counts[:M].numpy() + ALPHA, gamma, rtol=1e-8)
    np.testing.assert_allclose(means_of_phi[:M], phi_bar, rtol=1e-8)

    learned = update(concepts, statistics, Prior(torch.eye(D, dtype=torch.float64), 0.0), settings).gaussians
    np.testing.assert_allclose(learned.means + offset, means, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(learned.covariances(), covariances, rtol=1e-8, atol=1e-8)
