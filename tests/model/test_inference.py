"""The E-step: every path comes to the same γ, φ and bound as sweeps written out in float64, and the bound only rises."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch.special import entr

from pace.model import inference
from pace.model.inference import Posterior, Weights, infer, uniform_start
from pace.model.objective import dirichlet_kl, expected_log_theta

FIELDS = ("counts", "gamma", "phi_bar", "phi", "bound")


def evidence(
    images=4, tokens=9, k=5, seed=0, scale=3.0, shift=0.0, alpha=0.1, updates="exact", dtype=torch.float64
):  # fmt: skip
    """Arguments of `infer`. Attention of the first image is all on one token."""
    draw = {"generator": torch.Generator("cpu").manual_seed(seed), "dtype": torch.float64, "device": "cpu"}
    distances = shift + scale * torch.randn(images, tokens, k, **draw).square()
    attention = torch.rand(images, tokens, **draw)
    attention[0, 1:] = 0
    attention[1:2, ::2] = 0  # half of the next one's tokens are mute
    attention[1:2, -1] = 1
    prior, log_det = alpha * (0.5 + torch.rand(k, **draw)), torch.randn(k, **draw).to(dtype)
    weights = Weights.of(attention.to(dtype), updates)
    log_likelihood = weights.log_likelihood(distances.to(dtype), log_det, dim=3)
    start = uniform_start(images, k, tokens, updates, prior.device)
    return log_likelihood, weights, prior, start


def written_out(log_likelihood, weights, alpha, start, max_sweeps=100, tol=1e-4, margin=0.0):
    """Float64, image by image, with a softmax for every sweep; φ is that of the last one."""
    found, sweeps, moving = [], 0, []
    for evidence, count, mean, counts in zip(log_likelihood, weights.count, weights.mean, start[0], strict=True):
        gamma, moved, sweep = alpha + counts, torch.inf, 0
        while sweep < max_sweeps and moved > tol:
            before, sweep = gamma, sweep + 1
            phi = (evidence.double() + expected_log_theta(before)).softmax(1)
            gamma = alpha + count.double() @ phi
            moved = float((gamma - before).abs().sum() / gamma.sum())
            assert abs(moved - tol) >= margin * tol, (
                "rounding could decide whether to sweep once more: take another seed"
            )
        phi_bar = mean.double() @ phi / len(phi)
        inner = (phi * (expected_log_theta(gamma) + evidence)).sum(1) + entr(phi).sum(1)
        found.append((gamma - alpha, gamma, phi_bar, phi, mean.double() @ inner - dirichlet_kl(gamma, alpha)))
        sweeps, moving = max(sweeps, sweep), [*moving, moved > tol]
    parts = dict(zip(FIELDS, map(torch.stack, zip(*found, strict=True)), strict=True))
    return Posterior(sweeps=sweeps, moving=torch.tensor(moving), **parts)


@pytest.fixture(params=["torch", "torch on a GPU", "Triton"])
def path(request, monkeypatch):
    """`infer`, by one of its ways; what it finds is on the CPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if request.param == "torch on a GPU" and device == "cpu":
        pytest.skip("no GPU here")
    kernel = request.getfixturevalue("triton_sweeps") if request.param == "Triton" else None
    monkeypatch.setattr(inference, "_kernel", lambda log_likelihood: kernel)
    if request.param == "torch":
        device = "cpu"

    def run(log_likelihood, weights, alpha, start, **how):
        there = Weights(*(None if part is None else part.to(device) for part in vars(weights).values()))
        there.mean = there.count if weights.mean is weights.count else there.mean
        begin = tuple(part.to(device) for part in start)
        found = infer(log_likelihood.to(device), there, alpha.to(device), begin, **how)
        return Posterior(**{name: getattr(part, "cpu", lambda part=part: part)() for name, part in vars(found).items()})

    return run


@pytest.mark.parametrize("how", [{}, {"max_sweeps": 6, "tol": 0.0}], ids=["default", "fixed"])
@pytest.mark.parametrize(
    "case",
    [
        {"seed": 1},
        {"tokens": 1, "k": 3},
        {"images": 2, "tokens": 20, "k": 17, "alpha": 1e-3, "shift": 2000.0, "seed": 5},  # as in hundreds of dimensions
        {"alpha": 1e-8, "scale": 30.0},
        {"alpha": 1e-3, "scale": 1e5},
        {"alpha": 5.0, "scale": 0.1},
        {"updates": "paper", "scale": 0.5},
    ],
    ids=str,
)
def test_every_path_comes_to_the_same_posterior(path, case, how):
    """Within 5e-5 of what is written out, so that no two paths differ by more than 1e-4."""
    arguments = evidence(**case, dtype=torch.float32)
    expected = written_out(*arguments, **how, margin=0.01)
    found = path(*arguments, **how)
    if not how:  # else float32 may come to a stop where float64 still moves in its last digits
        assert found.sweeps == expected.sweeps
        assert torch.equal(found.moving, expected.moving)
    torch.testing.assert_close(found.gamma, expected.gamma, rtol=5e-5, atol=0)
    torch.testing.assert_close(found.counts + arguments[2], found.gamma, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.phi.double(), expected.phi, rtol=0, atol=5e-5)
    torch.testing.assert_close(found.phi_bar, expected.phi_bar, rtol=0, atol=5e-5)
    torch.testing.assert_close(found.bound, expected.bound, rtol=1e-6, atol=1e-5)
    gamma_alone = path(*arguments, **how, patches=False)
    torch.testing.assert_close(gamma_alone.gamma, expected.gamma, rtol=5e-5, atol=0)
    assert gamma_alone.phi.numel() == 0


def test_phi_follows_from_the_gamma_before_the_last_sweep(path):
    arguments = evidence(images=1, seed=3, dtype=torch.float32)
    found = path(*arguments)
    before = path(*arguments, max_sweeps=found.sweeps - 1, tol=0.0, patches=False).gamma
    phi = (arguments[0].double() + expected_log_theta(before)[:, None]).softmax(2)
    torch.testing.assert_close(found.phi.double(), phi, rtol=0, atol=1e-5)


@given(
    seed=st.integers(0, 10_000), scale=st.sampled_from([0.1, 3.0, 300.0]), updates=st.sampled_from(["exact", "paper"])
)
@examples(max_examples=12)
def test_in_float64_images_together_are_each_swept_as_written_out(seed, scale, updates):
    """Some settle at once and some take long, and none of them feels the others."""
    arguments = evidence(6, seed=seed, scale=scale, updates=updates)
    for how in ({"max_sweeps": 200, "tol": 1e-6}, {"tol": 0.02}, {"max_sweeps": 11, "tol": 0.0}):
        expected, found = written_out(*arguments, **how), infer(*arguments, **how)
        assert torch.equal(found.moving, expected.moving)
        for name in FIELDS:
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-9)


@given(seed=st.integers(0, 10_000), scale=st.sampled_from([0.1, 3.0, 300.0]))
@examples(max_examples=12)
def test_the_bound_rises_with_every_sweep(seed, scale):
    *arguments, start = evidence(seed=seed, scale=scale)
    bounds = []
    for _ in range(10):
        found = infer(*arguments, start, max_sweeps=1, tol=0.0)
        start, bounds = (found.counts, found.phi_bar), [*bounds, found.bound]
    assert (torch.stack(bounds).diff(dim=0) >= -1e-9 * bounds[-1].abs()).all()


@pytest.mark.parametrize("updates", ["exact", "paper"])
def test_evidence_may_lie_in_memory_by_concepts_and_is_only_read(updates):
    log_likelihood, *rest = evidence(updates=updates)
    by_concepts = log_likelihood.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    found, expected = (infer(values, *rest) for values in (by_concepts, log_likelihood))
    assert torch.equal(by_concepts, log_likelihood)
    for name in FIELDS:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-10, atol=1e-12)
    assert found.phi.view(4 * 9, 5).T.is_contiguous()  # φ is left as the evidence lay, for the sums
