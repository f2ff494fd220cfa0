"""The Triton kernel itself; that the E-step comes to the same with it as without is in test_inference.py."""

from types import SimpleNamespace

import pytest
import torch
from test_inference import evidence

from pace.model import inference
from pace.model.inference import infer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def kernel(triton_sweeps):
    inference._agrees.cache_clear()
    with torch.device(DEVICE):
        yield triton_sweeps
    inference._agrees.cache_clear()


def drawn(*shape, **options):
    """Log-likelihood, weights of the tokens, α and counts to start from."""
    with torch.device("cpu"):  # so that a GPU sees the same
        log_likelihood, weights, alpha, (counts, _) = evidence(*shape, dtype=torch.float32, **options)
    return [part.to(DEVICE) for part in (log_likelihood, weights.count, alpha, counts)]


def test_its_digamma_is_that_of_torch(kernel):
    import triton
    import triton.language as tl

    @triton.jit
    def apply(x, out, WORK: tl.constexpr, SIZE: tl.constexpr):
        place = tl.arange(0, SIZE)
        tl.store(out + place, WORK(tl.load(x + place)))

    x = torch.logspace(-12, 8, 512, dtype=torch.float64)
    found = torch.empty_like(x)
    apply[(1,)](x, found, WORK=kernel._digamma, SIZE=512)
    torch.testing.assert_close(found, torch.digamma(x), rtol=1e-12, atol=2e-12)


@pytest.mark.parametrize("shape", [(1, 2, 1), (2, 2, 17), (2, 37, 100), (1, 3, 600)])
def test_any_number_of_tokens_and_concepts_will_do(kernel, shape):
    log_likelihood, weights, alpha, start = evidence(*shape, dtype=torch.float32)
    expected = infer(log_likelihood, weights, alpha, start, max_sweeps=3, tol=0.0, patches=False)
    found = kernel.settle(*drawn(*shape), max_sweeps=3, tol=0.0)
    torch.testing.assert_close(found.counts.cpu(), expected.counts, rtol=1e-4, atol=1e-6)


def test_an_image_stops_at_the_first_sweep_that_moves_less_than_the_tolerance(kernel):
    *given, alpha, start = drawn(4, 12, 5, seed=3)
    trail = [start]
    for _ in range(6):
        trail.append(kernel.settle(*given, alpha, trail[-1], max_sweeps=1, tol=0.0).counts)
    trail = torch.stack(trail)  # (sweeps, images, K)
    moved = trail.diff(dim=0).abs().sum(2) / (alpha + trail[1:]).sum(2)
    found = kernel.settle(*given, alpha, start, max_sweeps=6, tol=0.1)
    settled, last = moved <= 0.1, torch.where((moved <= 0.1).any(0), 1 + (moved <= 0.1).int().argmax(0), 6)
    assert settled.any(0).any()
    assert not settled[:3].any(0).all()
    assert found.sweeps.tolist() == last.tolist()
    assert found.moving.tolist() == (~settled.any(0)).tolist()
    images = torch.arange(4)
    assert torch.equal(found.counts, trail[last, images])
    assert torch.equal(found.before, trail[last - 1, images])


def test_an_image_comes_out_the_same_to_the_last_digit_alone_and_however_its_evidence_lies_in_memory(kernel):
    log_likelihood, count, alpha, start = drawn(3, 9, 5)
    by_concepts = log_likelihood.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    together = kernel.settle(by_concepts, count, alpha, start, max_sweeps=5, tol=0.0)
    assert torch.equal(by_concepts, log_likelihood)  # it is only read
    for m in range(3):
        one = slice(m, m + 1)
        alone = kernel.settle(log_likelihood[one], count[one], alpha, start[one], max_sweeps=5, tol=0.0)
        assert torch.equal(alone.counts[0], together.counts[m])


def test_only_float32_on_a_gpu_and_so_many_concepts_go_to_the_kernel(kernel, monkeypatch):
    def chosen(device="cuda", dtype=torch.float32, concepts=kernel.MOST_CONCEPTS):
        looks = {"device": torch.device(device), "dtype": dtype, "shape": (2, 3, concepts)}
        return inference._kernel(SimpleNamespace(**looks))

    monkeypatch.setattr(inference, "_agrees", lambda module, device: True)
    assert chosen() is kernel
    for other in ({"device": "cpu"}, {"dtype": torch.float64}, {"concepts": 1025}):
        assert chosen(**other) is None
    monkeypatch.setattr(inference, "_agrees", lambda module, device: False)
    assert chosen() is None


def test_where_it_runs_it_is_found_to_agree_with_torch(kernel):
    assert inference._agrees(kernel, torch.device(DEVICE))


def test_where_triton_cannot_compile_or_differs_that_is_said_once_and_torch_does_the_work(kernel, monkeypatch):
    settle, device = kernel.settle, torch.device(DEVICE)

    def fail(*arguments, **options):
        raise RuntimeError("no C compiler\nand more")

    monkeypatch.setattr(kernel, "settle", fail)
    with pytest.warns(RuntimeWarning, match="slower on .* than it could be: no C compiler$") as warned:
        assert not any(inference._agrees(kernel, device) for _ in range(2))
    assert len(warned) == 1
    inference._agrees.cache_clear()
    monkeypatch.setattr(kernel, "settle", lambda *a, **o: settle(*a, **(o | {"max_sweeps": 1})))
    with pytest.warns(RuntimeWarning, match="Triton's result differs from torch's"):
        assert not inference._agrees(kernel, device)


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU here")
@pytest.mark.parametrize("k", [3, 100, 1000])
def test_a_gpu_uses_it_and_finds_what_torch_finds(k, monkeypatch):
    log_likelihood, weights, alpha, start = evidence(300, 197, k, scale=0.3, dtype=torch.float32)
    there = log_likelihood.to(DEVICE)
    assert inference._kernel(there) is not None
    weights.count = weights.mean = weights.count.to(DEVICE)
    arguments = (there, weights, alpha.to(DEVICE), tuple(part.to(DEVICE) for part in start))
    found = infer(*arguments)
    assert torch.equal(infer(*arguments).gamma, found.gamma)
    monkeypatch.setattr(inference, "_kernel", lambda log_likelihood: None)
    expected = infer(*arguments)
    off = ((found.gamma - expected.gamma).abs() / expected.gamma).amax(1)
    # Where γ moves by as much as the tolerance, rounding decides whether an image is swept once more: a few in a thousand.
    assert off.quantile(0.98) < 1e-4
    assert ((found.gamma - expected.gamma).abs().sum(1) / expected.gamma.sum(1)).max() < 2e-4
