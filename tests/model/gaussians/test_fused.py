import pytest
import torch

from pace.model.gaussians import FullGaussians, Prior, dense

N, D, K = 200, 150, 4


@pytest.fixture
def patches(kernels):
    """Correlated dimensions of very unequal spread, as a transformer's are, and Gaussians of as many shapes."""
    torch.manual_seed(0)
    owner = torch.randint(0, K, (N,))
    scale = torch.logspace(-2, 2, D)
    x = (torch.randn(K, D)[owner] + torch.randn(N, D) @ (torch.eye(D) + torch.randn(D, D) / 2 / D**0.5)) * scale
    prior = Prior(torch.cov(x.double().T) + torch.diag(scale.double().square()) / 10, 20.0)
    r = torch.nn.functional.one_hot(owner, K).float() * torch.rand(N, 1) * 3
    sums = (gaussians := FullGaussians.seed(torch.zeros(K, D), prior.covariance, rank=0)).empty_sums()
    gaussians.accumulate(x, r.clone(), sums)
    return gaussians.maximise(sums, prior), x, r, prior


def wide(gaussians):
    return FullGaussians(gaussians.means.double(), gaussians.precision_cholesky.double())


def test_distances_are_those_of_float64_to_a_thousandth_of_a_nat(kernels, patches):
    gaussians, x, _, _ = patches
    torch.testing.assert_close(
        gaussians.mahalanobis(x).double(), wide(gaussians).mahalanobis(x.double()), rtol=1e-6, atol=2e-3
    )


def test_distances_with_half_the_digits_are_off_by_less_than_a_nat(kernels, patches):
    gaussians, x, _, _ = patches
    common, factors = gaussians._halves
    rough = kernels.distances(kernels.Halves.of(x @ common), factors, gaussians._shift, precise=False)
    error = (rough - wide(gaussians).mahalanobis(x.double())).abs()
    assert 1e-3 < error.max() < 1


def test_distances_of_a_list_are_entries_of_the_whole(kernels, patches):
    gaussians, x, _, _ = patches
    common, factors = gaussians._halves
    white = kernels.Halves.of(x @ common)
    chosen = torch.rand(N, K) < 0.3
    chosen[:, 2] = False
    chosen[:, 3] = True  # more than one tile
    rows, concepts, counts = dense._by_concept(chosen)
    some = kernels.distances_at(white, factors, gaussians._shift, rows, counts)
    torch.testing.assert_close(some, kernels.distances(white, factors, gaussians._shift, precise=True)[rows, concepts])


@pytest.mark.parametrize(("at_once", "run"), [(1 << 10, 128), (60, 64)])
def test_the_scatter_is_that_of_float64(kernels, patches, monkeypatch, at_once, run):
    """To what rounding every number to eleven bits does: noise of a ten-thousandth of a standard deviation."""
    monkeypatch.setattr(kernels, "SCATTER", (at_once, run, *kernels.SCATTER[2:]))
    gaussians, x, r, _ = patches
    r[:, 2] = 0
    rows, concepts, counts = dense._by_concept(r > 0)
    found = torch.ones(K, D, D, dtype=torch.float64)  # it is added to what is there
    kernels.add_scatter(x, gaussians.means, rows, concepts, counts, r[rows, concepts], found)
    centred = x.double()[None] - gaussians.means.double()[:, None]
    exact = torch.einsum("nk,knd,kne->kde", r.double(), centred, centred)
    spread = exact.diagonal(dim1=1, dim2=2).sqrt()
    error = (found - 1 - exact) / (spread[:, :, None] * spread[:, None, :]).clamp_min(1e-30)
    assert error.abs().max() < 2**-11
    assert error.square().mean().sqrt() < 1e-4
    assert torch.equal(found[2], torch.ones(D, D, dtype=torch.float64))
    skew = (found - found.mT) / (spread[:, :, None] * spread[:, None, :]).clamp_min(1e-30)
    assert skew.abs().max() < 1e-6  # a tile on the diagonal is as symmetric as the machine's product


def test_a_step_with_the_kernels_is_the_step_without(kernels, patches, monkeypatch):
    gaussians, x, r, prior = patches

    def step():
        sums = gaussians.empty_sums()
        gaussians.accumulate(x, r.clone(), sums)
        return gaussians.maximise(sums, prior)

    with_kernels = step()
    monkeypatch.setattr(dense, "_kernels", lambda x: None)
    plain = step()
    torch.testing.assert_close(with_kernels.means, plain.means, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(with_kernels.log_det, plain.log_det, rtol=0, atol=0.01)
    torch.testing.assert_close(with_kernels.mahalanobis(x), plain.mahalanobis(x), rtol=1e-4, atol=0.01)
    assert abs(with_kernels.log_prior(prior) - plain.log_prior(prior)) < 1e-4 * abs(plain.log_prior(prior))


def test_an_outlier_beyond_float16_is_far_away_and_spoils_no_other_patch(kernels, patches):
    gaussians, x, _, _ = patches
    before = gaussians.mahalanobis(x)
    x[0] *= 1e7
    found = gaussians.mahalanobis(x)
    assert torch.isfinite(found).all()
    assert (found[0] > 1e8).all()
    assert torch.equal(found[1:], before[1:])


def test_only_float32_on_a_gpu_goes_to_the_kernels():
    assert dense._kernels(torch.zeros(10, 768, device="cpu")) is None
    assert dense._kernels(torch.zeros(10, 768, dtype=torch.float64)) is None


def test_where_triton_cannot_compile_that_is_said_once_and_torch_does_the_work(kernels, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no C compiler\nand more")

    monkeypatch.setattr(kernels, "distances", fail)
    device = torch.zeros(1).device
    kernels.usable.cache_clear()
    with pytest.warns(RuntimeWarning, match="slower on .* than they could be: no C compiler$") as warned:
        answers = [kernels.usable(device) for _ in range(2)]
    kernels.usable.cache_clear()
    assert answers == [False, False]
    assert len(warned) == 1
