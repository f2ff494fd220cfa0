import importlib

import pytest
import torch

from pace.model import inference
from pace.model.inference import Weights, infer, infer_alone, infer_gamma, uniform_start

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FIELDS = ("counts", "phi_bar", "gamma", "bound", "phi")


@pytest.fixture(scope="module")
def module():
    """pace.model.sweeping; without a GPU its kernel is run by Triton's interpreter."""
    pytest.importorskip("triton", reason="torch comes without Triton here")
    names = ("triton.language.standard", "triton.language", "pace.model.sweeping")
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        yield [importlib.reload(importlib.import_module(name)) for name in names][-1]
    for name in names:
        importlib.reload(importlib.import_module(name))


@pytest.fixture
def sweeping(module):
    with torch.device(DEVICE):
        yield module


@pytest.fixture
def in_use(sweeping, monkeypatch):
    monkeypatch.setattr(inference, "_kernel", lambda log_likelihood: sweeping)


def evidence(images=3, tokens=9, k=5, seed=0, scale=3.0, alpha=0.1, updates="exact"):
    """Arguments of `infer` and its relatives, on the CPU first so that a GPU sees the same."""
    generator = torch.Generator("cpu").manual_seed(seed)
    draw = {"generator": generator, "device": "cpu"}
    distances = scale * torch.randn(images, tokens, k, **draw).square() * 3
    attention = torch.rand(images, tokens, **draw) + 1e-3
    if images > 1 and tokens > 1:
        attention[0, 1:] = 0  # one token speaks for the image
        attention[1, ::2] = 0  # half of them are mute
        if tokens == 2:
            attention[1, 1] = 1
    prior = alpha * (0.5 + torch.rand(k, dtype=torch.float64, **draw))
    log_det = torch.randn(k, **draw)
    weights = Weights.of(attention.to(DEVICE), updates)
    log_likelihood = weights.log_likelihood(distances.to(DEVICE), log_det.to(DEVICE), dim=4)
    start = uniform_start(images, k, tokens, updates, log_likelihood.device)
    return (log_likelihood, weights, prior.to(DEVICE), start), {"log_det": log_det.to(DEVICE), "dim": 4}


def settle(sweeping, arguments, max_sweeps=100, tol=1e-4):
    log_likelihood, weights, alpha, (counts, _) = arguments
    return sweeping.settle(log_likelihood, weights.count, alpha, counts, max_sweeps=max_sweeps, tol=tol)


def as_in_torch(arguments, options, **how):
    """Sweeps in float64, image by image: each with as many as it needs, and no other image to wait for."""
    (log_likelihood, weights, alpha, start), found = arguments, []
    for m in range(len(log_likelihood)):
        one = slice(m, m + 1)
        wide = Weights(*(field if field is None else field[one].double() for field in vars(weights).values()))
        if weights.mean is weights.count:
            wide.mean = wide.count
        begin = tuple(part[one] for part in start)
        found.append(infer(log_likelihood[one].double(), wide, alpha, begin, **options, **how))
    return found


def test_its_digamma_is_that_of_torch(sweeping):
    import triton
    import triton.language as tl

    @triton.jit
    def apply(x, out, WORK: tl.constexpr, SIZE: tl.constexpr):
        place = tl.arange(0, SIZE)
        tl.store(out + place, WORK(tl.load(x + place)))

    x = torch.logspace(-12, 8, 512, dtype=torch.float64)
    found = torch.empty_like(x)
    apply[(1,)](x, found, WORK=sweeping._digamma, SIZE=512)
    torch.testing.assert_close(found, torch.digamma(x), rtol=1e-12, atol=2e-12)


@pytest.mark.parametrize(
    ("images", "tokens", "k"), [(3, 9, 5), (2, 197, 100), (4, 1, 3), (2, 2, 17), (3, 65, 8), (1, 3, 1), (2, 5, 600)]
)
def test_images_settle_where_torch_says(sweeping, images, tokens, k):
    arguments, options = evidence(images, tokens, k)
    found = settle(sweeping, arguments)
    for m, expected in enumerate(as_in_torch(arguments, options)):
        assert int(found.sweeps[m]) == expected.sweeps
        assert bool(found.moving[m]) == bool(expected.moving[0])
        gamma = arguments[2] + found.counts[m]
        torch.testing.assert_close(gamma, expected.gamma[0], rtol=1e-4, atol=1e-12)
        torch.testing.assert_close(gamma, expected.gamma[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("alpha", [1e-8, 1e-4, 1e-2, 5.0])
@pytest.mark.parametrize("scale", [0.01, 3.0, 1e4])
def test_priors_may_be_tiny_and_evidence_weak_or_overwhelming(sweeping, alpha, scale):
    arguments, options = evidence(3, 11, 6, seed=2, scale=scale, alpha=alpha)
    found = settle(sweeping, arguments)
    for m, expected in enumerate(as_in_torch(arguments, options)):
        assert int(found.sweeps[m]) == expected.sweeps
        gamma = arguments[2] + found.counts[m]
        torch.testing.assert_close(gamma, expected.gamma[0], rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("sweeps", [1, 2, 5])
def test_sweeps_run_out_for_images_that_still_move_and_for_no_others(sweeping, sweeps):
    arguments, options = evidence(6, 12, 5, seed=1, scale=0.3)
    found = settle(sweeping, arguments, max_sweeps=sweeps, tol=1e-3)
    expected = as_in_torch(arguments, options, max_sweeps=sweeps, tol=1e-3)
    assert found.sweeps.tolist() == [one.sweeps for one in expected]
    assert found.moving.tolist() == [bool(one.moving) for one in expected]
    assert found.moving.any()


def test_an_image_stops_at_the_first_sweep_that_moves_less_than_the_tolerance(sweeping):
    arguments, _ = evidence(4, 12, 5, seed=3)
    alpha, counts, moves = arguments[2], arguments[3][0], []
    for _ in range(12):
        step = settle(sweeping, (*arguments[:3], (counts, None)), max_sweeps=1, tol=0.0)
        moves.append((step.counts - counts).abs().sum(1) / (alpha + step.counts).sum(1))
        counts = step.counts
    moved = torch.stack(moves)  # (sweeps, images)
    for tol in (0.2, 0.1, 0.05):
        assert (moved <= tol).any(0).all()
        assert settle(sweeping, arguments, tol=tol).sweeps.tolist() == (1 + (moved <= tol).int().argmax(0)).tolist()


@pytest.mark.parametrize("updates", ["exact", "paper"])
@pytest.mark.parametrize("sweeps", [1, 4, 300])
def test_what_is_inferred_is_what_torch_infers(in_use, monkeypatch, updates, sweeps):
    arguments, options = evidence(5, 14, 7, seed=4, scale=0.5, updates=updates)
    how = {"max_sweeps": sweeps, "tol": 1e-4}
    found, gamma = infer_alone(*arguments, **options, **how), infer_gamma(*arguments, **how)
    torch.testing.assert_close(gamma, found.gamma, rtol=1e-5, atol=1e-9)
    monkeypatch.setattr(inference, "_kernel", lambda log_likelihood: None)
    expected, same = infer_alone(*arguments, **options, **how), infer_gamma(*arguments, **how)
    # Where an image settles before its sweeps run out, the kernel's is swept once more, for φ.
    settles = sweeps > 4
    assert found.sweeps == expected.sweeps + settles
    assert torch.equal(found.moving, expected.moving)
    for name in FIELDS:
        close = {"rtol": 1e-2, "atol": 1e-3} if settles else {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), **close)
    assert torch.equal(same, expected.gamma)


def test_phi_gamma_and_the_mean_belong_together(in_use):
    arguments, options = evidence(5, 14, 7, seed=5, scale=0.5)
    posterior, weights = infer_alone(*arguments, **options), arguments[1]
    torch.testing.assert_close(
        posterior.counts, (weights.count[:, :, None] * posterior.phi).sum(1).double(), rtol=1e-5, atol=1e-6
    )
    assert torch.equal(posterior.gamma, arguments[2] + posterior.counts)


def test_evidence_may_lie_in_memory_by_concepts_and_is_only_read(sweeping):
    (log_likelihood, *others), _ = evidence(3, 9, 5)
    by_concepts = log_likelihood.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    before = by_concepts.clone()
    found = settle(sweeping, (by_concepts, *others))
    assert torch.equal(by_concepts, before)
    assert torch.equal(found.counts, settle(sweeping, (log_likelihood, *others)).counts)


def test_it_does_not_matter_what_all_concepts_of_a_token_share(sweeping):
    (log_likelihood, *others), _ = evidence(3, 9, 5)
    found, expected = (
        settle(sweeping, (values, *others), max_sweeps=5, tol=0.0).counts
        for values in (log_likelihood + torch.arange(9.0)[:, None], log_likelihood)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_an_image_comes_out_the_same_to_the_last_digit_alone_among_others_and_again(sweeping):
    arguments, _ = evidence(4, 20, 6)
    log_likelihood, weights, alpha, (counts, _) = arguments
    together = settle(sweeping, arguments)
    assert torch.equal(settle(sweeping, arguments).counts, together.counts)
    for m in range(4):
        one = slice(m, m + 1)
        count = weights.count[one]
        alone = settle(sweeping, (log_likelihood[one], Weights(count, count, None), alpha, (counts[one], None)))
        assert torch.equal(alone.counts[0], together.counts[m])


@pytest.mark.filterwarnings("ignore:All-NaN")
def test_an_image_of_nothing_but_nan_stops_after_one_sweep_as_in_torch(sweeping):
    arguments, _ = evidence(2, 6, 4)
    arguments[0][0] = float("nan")
    found = settle(sweeping, arguments)
    assert found.sweeps[0] == 1
    assert found.counts[0].isnan().all()
    assert found.counts[1].isfinite().all()


def test_only_float32_on_a_gpu_and_so_many_concepts_go_to_the_kernel(sweeping, monkeypatch):
    asked = []
    monkeypatch.setattr(sweeping, "usable", lambda device: asked.append(device) or True)
    assert inference._kernel(torch.zeros(1, 1, 1, device="cpu")) is None

    class OnGpu:
        device, dtype, shape = torch.device("cuda", 0), torch.float32, (2, 3, sweeping.MOST_CONCEPTS)

    there = OnGpu()
    assert inference._kernel(there) is sweeping
    for name, value in (("dtype", torch.float64), ("shape", (2, 3, sweeping.MOST_CONCEPTS + 1))):
        other = OnGpu()
        setattr(other, name, value)
        assert inference._kernel(other) is None
    assert asked == [there.device]
    monkeypatch.setattr(sweeping, "usable", lambda device: False)
    assert inference._kernel(there) is None


def test_where_triton_cannot_compile_that_is_said_once_and_torch_does_the_work(sweeping, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no C compiler\nand more")

    monkeypatch.setattr(sweeping, "settle", fail)
    device = torch.zeros(1).device
    sweeping.usable.cache_clear()
    with pytest.warns(RuntimeWarning, match="slower on .* than it could be: no C compiler$") as warned:
        answers = [sweeping.usable(device) for _ in range(2)]
    sweeping.usable.cache_clear()
    assert answers == [False, False]
    assert len(warned) == 1


def test_a_kernel_that_comes_to_something_else_is_not_used(sweeping, monkeypatch):
    settle = sweeping.settle
    monkeypatch.setattr(sweeping, "settle", lambda *a, **o: settle(*a, **(o | {"max_sweeps": 1})))
    sweeping.usable.cache_clear()
    with pytest.warns(RuntimeWarning, match="Triton's result differs from torch's"):
        assert not sweeping.usable(torch.zeros(1).device)
    sweeping.usable.cache_clear()


def test_where_it_runs_it_is_usable(sweeping):
    sweeping.usable.cache_clear()
    assert sweeping.usable(torch.zeros(1).device)


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU here")
@pytest.mark.parametrize("k", [1, 3, 100, 1000])
def test_a_gpu_uses_it_and_finds_what_torch_finds(k, monkeypatch):
    arguments, options = evidence(300, 197, k, scale=0.1)
    assert inference._kernel(arguments[0]) is not None
    found = infer_alone(*arguments, **options)
    assert torch.equal(infer_alone(*arguments, **options).gamma, found.gamma)
    monkeypatch.setattr(inference, "_kernel", lambda log_likelihood: None)
    expected = infer_alone(*arguments, **options)
    stopped_alike = found.moving == expected.moving
    assert stopped_alike.double().mean() > 0.99
    # Where γ moves by little more or less than the tolerance, one may sweep once more than the other.
    off = (found.gamma - expected.gamma).abs().sum(1) / expected.gamma.sum(1)
    assert off.median() < 1e-5
    assert off.max() < 1e-3
