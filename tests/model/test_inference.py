import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical

from pace.model.inference import Weights, infer, infer_alone, uniform_start
from pace.model.objective import dirichlet_kl, expected_log_theta


def evidence(seed, images=4, tokens=9, k=5, scale=3.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    distances = scale * torch.rand(images, tokens, k, generator=generator, dtype=dtype) ** 2 * 10
    log_det = torch.randn(k, generator=generator, dtype=dtype)
    attention = torch.rand(images, tokens, generator=generator, dtype=dtype)
    attention[0, 1] = 0
    alpha = torch.rand(k, generator=generator, dtype=torch.float64) * 0.5 + 0.01
    return distances, log_det, attention, alpha


def run(seed, sweeps, updates="exact", tol=0.0, dtype=torch.float64, scale=3.0):
    distances, log_det, attention, alpha = evidence(seed, dtype=dtype, scale=scale)
    weights = Weights.of(attention, updates)
    log_likelihood = weights.log_likelihood(distances.clone(), log_det, dim=3)
    start = uniform_start(*[distances.shape[i] for i in (0, 2, 1)], updates, distances.device)
    posterior = infer(log_likelihood, weights, alpha, start, log_det=log_det, dim=3, max_sweeps=sweeps, tol=tol)
    return posterior, weights, log_likelihood, alpha


@given(seed=st.integers(0, 10_000), scale=st.sampled_from([0.1, 3.0, 300.0]))
@settings(max_examples=20, deadline=None)
def test_the_bound_rises_with_every_sweep(seed, scale):
    bounds = torch.stack([run(seed, sweeps, scale=scale)[0].bound for sweeps in range(1, 12)])
    assert (bounds.diff(dim=0) >= -1e-9 * bounds[1:].abs()).all()


@pytest.mark.parametrize("sweeps", [1, 2, 7])
def test_the_bound_is_the_one_written_out_over_patches(sweeps):
    posterior, weights, log_likelihood, alpha = run(3, sweeps)
    log_theta = expected_log_theta(posterior.gamma)[:, None]
    inner = (posterior.phi * (log_theta + log_likelihood)).sum(2) + Categorical(posterior.phi).entropy()
    expected = (weights.count * inner).sum(1) - dirichlet_kl(posterior.gamma, alpha)
    torch.testing.assert_close(posterior.bound, expected)


@pytest.mark.parametrize("updates", ["exact", "paper"])
@pytest.mark.parametrize("sweeps", [1, 2, 9])
def test_phi_gamma_and_the_mean_belong_together(updates, sweeps):
    posterior, weights, _, alpha = run(5, sweeps, updates)
    torch.testing.assert_close(posterior.phi.sum(2), torch.ones_like(posterior.phi[:, :, 0]))
    torch.testing.assert_close(posterior.gamma, alpha + (weights.count[:, :, None] * posterior.phi).sum(1))
    torch.testing.assert_close(posterior.phi_bar, (weights.mean[:, :, None] * posterior.phi).mean(1))


@given(seed=st.integers(0, 10_000), scale=st.sampled_from([0.1, 3.0, 300.0]))
@settings(max_examples=20, deadline=None)
def test_quick_sweeps_equal_sweeps_with_a_softmax_each(seed, scale):
    posterior, weights, log_likelihood, alpha = run(seed, 6, scale=scale)
    gamma = alpha + uniform_start(4, 5, 9, "exact", alpha.device)[0]
    for _ in range(6):
        phi = (log_likelihood + expected_log_theta(gamma)[:, None]).softmax(2)
        gamma = alpha + (weights.count[:, :, None] * phi).sum(1)
    torch.testing.assert_close(posterior.gamma, gamma, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(posterior.phi, phi, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("updates", ["exact", "paper"])
def test_it_does_not_matter_whether_evidence_lies_in_memory_by_patches_or_by_concepts(updates):
    posterior, weights, log_likelihood, alpha = run(6, 4, updates)
    by_concepts = log_likelihood.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    before, log_det = by_concepts.clone(), evidence(6)[1]
    start = uniform_start(4, 5, 9, updates, alpha.device)
    other = infer(by_concepts, weights, alpha, start, log_det=log_det, dim=3, max_sweeps=4, tol=0.0)
    assert torch.equal(by_concepts, before)  # evidence is read only
    for name in ("gamma", "phi_bar", "bound", "phi"):
        torch.testing.assert_close(getattr(other, name), getattr(posterior, name), rtol=1e-10, atol=1e-12)
    assert other.phi.view(4 * 9, 5).T.is_contiguous()  # and left as it lay, for the sums


@given(seed=st.integers(0, 10_000), sweeps=st.integers(1, 6))
@settings(max_examples=20, deadline=None)
def test_float32_phi_is_that_of_float64_though_some_of_it_lies_below_its_range(seed, sweeps):
    distances, log_det, attention, alpha = evidence(seed, scale=30.0)
    start = uniform_start(4, 5, 9, "exact", alpha.device)
    found = []
    for dtype in (torch.float64, torch.float32):
        weights = Weights.of(attention.to(dtype), "exact")
        log_likelihood = weights.log_likelihood(distances.to(dtype, copy=True), log_det.to(dtype), 3)
        found.append(infer(log_likelihood, weights, alpha, start, log_det=log_det, dim=3, max_sweeps=sweeps, tol=0.0))
    assert (found[0].phi < torch.finfo(torch.float32).tiny).any()
    torch.testing.assert_close(found[1].phi.double(), found[0].phi, rtol=0, atol=1e-3)
    torch.testing.assert_close(found[1].bound, found[0].bound, rtol=1e-5, atol=1e-4)


def test_an_image_comes_out_the_same_alone_and_among_others():
    posterior, weights, log_likelihood, alpha = run(8, 200, tol=1e-5)
    for m in range(4):
        count = weights.count[m : m + 1]
        own = Weights(count, count, None)
        alone = infer(
            log_likelihood[m : m + 1], own, alpha, uniform_start(1, 5, 9, "exact", alpha.device),
            log_det=torch.zeros(5), dim=3, max_sweeps=200, tol=1e-5,
        )  # fmt: skip
        torch.testing.assert_close(alone.gamma[0], posterior.gamma[m], rtol=1e-12, atol=1e-12)


def test_float32_survives_a_tiny_prior_and_distances_beyond_its_range():
    distances, log_det, attention, _ = evidence(0, scale=1e5, dtype=torch.float32)
    weights = Weights.of(attention, "exact")
    alpha = torch.full((5,), 1e-3, dtype=torch.float64)
    log_likelihood = weights.log_likelihood(distances, log_det, 3)
    start = uniform_start(4, 5, 9, "exact", alpha.device)
    posterior = infer(log_likelihood, weights, alpha, start, log_det=log_det, dim=3)
    assert torch.isfinite(posterior.gamma).all()
    assert torch.isfinite(posterior.bound).all()
    assert np.allclose(posterior.phi.sum(2), 1, atol=1e-5)
    assert torch.equal(posterior.phi.argmax(2), log_likelihood.argmax(2))


@pytest.mark.parametrize("updates", ["exact", "paper"])
@pytest.mark.parametrize("sweeps", [3, 20, 300])
def test_images_that_take_long_settle_where_they_would_have_with_the_others(updates, sweeps):
    distances, log_det, attention, alpha = evidence(1, images=12, scale=0.3)
    weights = Weights.of(attention, updates)
    log_likelihood = weights.log_likelihood(distances, log_det, dim=3)
    start = uniform_start(12, 5, 9, updates, distances.device)
    options = {"log_det": log_det, "dim": 3, "max_sweeps": sweeps, "tol": 1e-6}
    together = infer(log_likelihood, weights, alpha, start, **options)
    apart = infer_alone(log_likelihood, weights, alpha, start, **options)
    assert apart.sweeps == together.sweeps
    for name in ("counts", "phi_bar", "gamma", "bound", "phi"):
        torch.testing.assert_close(getattr(apart, name), getattr(together, name))
    assert (apart.moving == together.moving).all()
