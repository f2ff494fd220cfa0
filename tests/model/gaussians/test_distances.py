"""Distances and scatter of full covariances: torch and Triton compute the same, and the screen loses nothing that matters.

Without a GPU Triton's interpreter runs the kernels, which is slow: sizes are small.
"""

import pytest
import torch

from pace.model.gaussians import FullGaussians, Prior, dense
from pace.model.gaussians.family import by_concept

N, D, K = 200, 150, 4


@pytest.fixture(scope="module")
def patches():
    """Correlated dimensions of very unequal spread, as a transformer's are, and Gaussians of as many shapes."""
    torch.manual_seed(0)
    owner = torch.randint(0, K, (N,))
    scale = torch.logspace(-2, 2, D)
    x = (3 * torch.randn(K, D)[owner] + torch.randn(N, D) @ (torch.eye(D) + torch.randn(D, D) / 2 / D**0.5)) * scale
    prior = Prior(torch.cov(x.double().T) + torch.diag(scale.double().square()) / 10, 20.0)
    r = torch.nn.functional.one_hot(owner, K).float() * torch.rand(N, 1) * 3
    gaussians = FullGaussians.seed(torch.zeros(K, D), prior.covariance, rank=0)
    sums = gaussians.empty_sums()
    gaussians.accumulate(x, r.clone(), sums)
    learned = gaussians.maximise(sums, prior)
    exact = FullGaussians(learned.means.double(), learned.precision_cholesky.double()).mahalanobis(x.double())
    return learned, x, r, exact


@pytest.fixture(params=["torch", "triton"])
def case(request, patches):
    """Means and factors, patches, weights and float64 distances, on the device on which the module under test works."""
    if request.param == "torch":
        module, device = dense, torch.device("cpu")
    else:
        module = request.getfixturevalue("kernels")
        device = torch.zeros(1).device
    learned, x, r, exact = patches
    gaussians = FullGaussians(learned.means.to(device), learned.precision_cholesky.to(device))
    gaussians._distances = module.Distances(gaussians.means, gaussians.precision_cholesky)
    return gaussians, x.to(device), r.to(device), exact.to(device)


def test_precise_distances_are_those_of_float64_and_rough_ones_within_a_few_nats(case):
    gaussians, x, _, exact = case
    distances = gaussians._distances
    white = distances.read(x)
    precise, rough = distances.precise(white), distances.rough(white)
    torch.testing.assert_close(precise.double(), exact, rtol=1e-6, atol=2e-3)
    assert 1e-4 < ((rough - exact).abs() / exact).max() < 0.03
    chosen = exact < exact.median()
    chosen[:, 2] = False
    chosen[:, 3] = True  # more than one tile
    rows, concepts, counts = by_concept(chosen)
    torch.testing.assert_close(distances.precise_at(white, rows, counts), precise[rows, concepts], rtol=1e-5, atol=1e-3)


def test_the_scatter_is_that_of_float64(case):
    """Up to rounding every number to eleven bits: noise of a ten-thousandth of a standard deviation."""
    gaussians, x, r, _ = case
    r = r.clone()
    r[:, 2] = 0
    found = torch.ones(K, D, D, dtype=torch.float64, device=x.device)  # it adds to what is there
    first = gaussians._distances.scatter(x, r, found)
    centred = x.double()[None] - gaussians.means.double()[:, None]
    exact = torch.einsum("nk,knd,kne->kde", r.double(), centred, centred)
    spread = exact.diagonal(dim1=1, dim2=2).sqrt()
    error = (found - 1 - exact) / (spread[:, :, None] * spread[:, None, :]).clamp_min(1e-30)
    assert error.abs().max() < 2**-11
    assert error.square().mean().sqrt() < 1e-4
    assert torch.equal(found[2], torch.ones_like(found[2]))
    assert ((first - torch.einsum("nk,knd->kd", r.double(), centred)).abs() <= 1e-4 * spread).all()


def test_the_screen_is_exact_for_concepts_within_reach_and_rough_elsewhere(case, monkeypatch):
    gaussians, x, _, exact = case
    monkeypatch.setattr(gaussians._distances, "screened_from", 1)
    monkeypatch.setattr(dense, "_SCREEN_DIM", 1)
    monkeypatch.setattr(dense, "_SCREEN_SHARE", 0.5)
    found = gaussians.mahalanobis(x, 20.0)
    log_density = -(exact + gaussians.log_det) / 2
    near = log_density >= log_density.amax(1, keepdim=True) - 20.0
    torch.testing.assert_close(found.double()[near], exact[near], rtol=1e-5, atol=1e-2)
    assert not torch.allclose(found.double()[~near], exact[~near], rtol=1e-6)
    torch.testing.assert_close(found.double(), exact, rtol=0.03, atol=0)
    monkeypatch.setattr(dense, "_SCREEN_SHARE", 0.1)  # one entry in four is near: nothing is screened
    assert torch.equal(gaussians.mahalanobis(x, 20.0), gaussians.mahalanobis(x))


def test_patches_for_which_16_bits_are_too_few_get_precise_distances():
    torch.manual_seed(0)
    means, factors = 3 * torch.randn(12, 32), torch.eye(32).expand(12, -1, -1).contiguous()
    x = means[torch.randint(0, 12, (400,))] + torch.randn(400, 32)
    x[7] += 1000
    gaussians = FullGaussians(means, factors)
    found = gaussians._screened(x, 20.0)
    torch.testing.assert_close(found[7], gaussians.mahalanobis(x)[7], rtol=1e-5, atol=0)
    assert not torch.equal(found, gaussians.mahalanobis(x))


def test_an_outlier_beyond_float16_is_far_away_and_spoils_no_other_patch(kernels, patches):
    learned, x, _, exact = patches
    distances = kernels.Distances(*(part.to(torch.zeros(1).device) for part in learned.tensors().values()))
    x = x.to(torch.zeros(1).device)
    x[0] *= 1e7
    found = distances.precise(distances.read(x))
    assert torch.isfinite(found).all()
    assert (found[0] > 1e8).all()
    torch.testing.assert_close(found[1:].double(), exact.to(found.device)[1:], rtol=1e-6, atol=2e-3)


@pytest.mark.parametrize(("spread", "quick"), [(0.5, True), (100.0, False)])
def test_products_of_pairs_give_distances_unless_patches_lie_too_far_from_the_centre(spread, quick):
    torch.manual_seed(0)
    n, k, d = 1200, 10, 48
    shapes = torch.eye(d, dtype=torch.float64) + torch.randn(k, d, d, dtype=torch.float64) / 50
    means, owner = spread * torch.randn(k, d, dtype=torch.float64), torch.randint(k, (n,))
    x = means[owner] + (shapes[owner] @ torch.randn(n, d, 1, dtype=torch.float64)).squeeze(2)
    factors = torch.linalg.inv(torch.linalg.cholesky(shapes @ shapes.mT)).mT.contiguous()
    found, exact = dense.Distances(means.float(), factors.float()), dense.Distances(means, factors).precise(x)
    assert (found._from_pairs(x.float()) is not None) == quick
    nearest = exact.min(1)
    near = found.precise(x.float()).double()[range(n), nearest.indices]
    torch.testing.assert_close(near, nearest.values, rtol=1e-3, atol=2e-3 if quick else 0.1)


def test_only_float32_on_a_gpu_goes_to_the_kernels():
    assert dense._kernels(torch.zeros(10, 768, device="cpu")) is None


def test_where_triton_cannot_compile_it_warns_once_and_torch_does_the_work(kernels, monkeypatch):
    def fail(*arguments, **options):
        raise RuntimeError("no C compiler\nand more")

    monkeypatch.setattr(kernels.Distances, "precise", fail)
    device = torch.zeros(1).device
    kernels.usable.cache_clear()
    with pytest.warns(RuntimeWarning, match="slower on .* than they could be: no C compiler$") as warned:
        answers = [kernels.usable(device) for _ in range(2)]
    kernels.usable.cache_clear()
    assert answers == [False, False]
    assert len(warned) == 1
