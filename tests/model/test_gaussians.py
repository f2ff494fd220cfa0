from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pace.model.gaussians import FAMILIES, DiagGaussians, FullGaussians, Prior
from pace.model.gaussians import dense as dense_module
from pace.model.inference import Weights, infer, uniform_start

FAMILY_NAMES = sorted(FAMILIES)
OFFSET = 3.0


def setting(family, seed=0, k=3, d=6, n=60, dtype=torch.float64):
    torch.manual_seed(seed)
    x = torch.randn(n, d, dtype=dtype) @ torch.randn(d, d, dtype=dtype)
    r = torch.distributions.Dirichlet(torch.full((k,), 0.3, dtype=dtype)).sample((n,)) * torch.rand(n, 1, dtype=dtype)
    prior = Prior(torch.cov(x.double().T) + torch.eye(d, dtype=torch.float64) / 10, 2.0)
    gaussians = FAMILIES[family].seed(torch.randn(k, d, dtype=dtype), prior.covariance, rank=2)
    return gaussians, gaussians.features(x + OFFSET, torch.full((d,), OFFSET, dtype=dtype)), x, r, prior


def step(gaussians, features, r, prior):
    sums = gaussians.empty_sums()
    gaussians.accumulate(features.clone(), r.clone(), sums)
    return gaussians.maximise(sums, prior)


def dense(gaussians):
    covariances = gaussians.covariances()
    if gaussians.name == "diag":
        return torch.diag_embed(covariances)
    return covariances if covariances.dim() == 3 else covariances.expand(len(gaussians.means), -1, -1)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_distances_and_determinants_are_those_of_the_covariances(family):
    gaussians, features, x, r, prior = setting(family)
    gaussians = step(step(gaussians, features, r, prior), features, r, prior)
    for k, covariance in enumerate(dense(gaussians)):
        normal = torch.distributions.MultivariateNormal(gaussians.means[k], covariance)
        log_density = (
            -(gaussians.mahalanobis(features)[:, k] + gaussians.log_det[k] + x.shape[1] * np.log(2 * np.pi)) / 2
        )
        torch.testing.assert_close(log_density, normal.log_prob(x), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_contrasts_are_distances_but_for_what_all_those_of_a_patch_share(family):
    gaussians, features, _, r, prior = setting(family)
    gaussians = step(gaussians, features, r, prior)
    shared = gaussians.mahalanobis(features) - gaussians.contrasts(features, within=1e9)
    torch.testing.assert_close(shared, shared[:, :1].expand_as(shared))


def test_tied_contrasts_keep_the_digits_of_distances_in_float32():
    gaussians, features, _, r, prior = setting("tied", k=20, d=64, n=500)
    gaussians = step(gaussians, features, r, prior)
    narrow = type(gaussians)(gaussians.means.float(), gaussians.precision_cholesky.float())

    def off(found):
        error = found.double() - gaussians.mahalanobis(features)
        return float((error - error.mean(1, keepdim=True)).abs().max())

    assert off(narrow.contrasts(features.float(), within=1e9)) < 2 * off(narrow.mahalanobis(features.float()))


@pytest.mark.parametrize("family", FAMILY_NAMES)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_the_m_step_raises_the_weighted_likelihood_with_its_prior(family, seed):
    gaussians, features, _, r, prior = setting(family, seed)

    def value(g):
        log_density = -(g.mahalanobis(features) + g.log_det) / 2
        return float((r * log_density).sum()) + g.log_prior(prior)

    for _ in range(4):
        better = step(gaussians, features, r, prior)
        assert value(better) >= value(gaussians) - 1e-9 * abs(value(gaussians))
        gaussians = better


@pytest.mark.parametrize("family", ["full", "diag", "tied"])
def test_the_m_step_is_the_maximum(family):
    gaussians, features, x, r, prior = setting(family)
    best = step(gaussians, features, r, prior)
    weight, k = r.sum(0), len(r.T)
    means = (r.T @ x) / weight[:, None]
    torch.testing.assert_close(best.means, means)
    scatter = torch.stack([((x - means[i]) * r[:, i, None]).T @ (x - means[i]) for i in range(k)])
    if family == "tied":
        expected = (scatter.sum(0) + k * prior.strength * prior.covariance) / (weight.sum() + k * prior.strength)
    else:
        expected = (scatter + prior.strength * prior.covariance) / (weight + prior.strength)[:, None, None]
    if family == "diag":
        expected = expected.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(best.covariances(), expected)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_sums_of_parts_add_up_to_the_sums_of_the_whole(family):
    gaussians, features, _, r, _ = setting(family)
    whole, parts = gaussians.empty_sums(), gaussians.empty_sums()
    gaussians.accumulate(features.clone(), r.clone(), whole)
    for rows in (slice(0, 7), slice(7, None)):
        gaussians.accumulate(features[rows].clone(), r[rows].clone(), parts)
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name])


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_concept_without_patches_keeps_its_mean_and_takes_the_priors_covariance(family):
    gaussians, features, _, r, prior = setting(family)
    r[:, 1] = 0
    best = step(gaussians, features, r, prior)
    torch.testing.assert_close(best.means[1], gaussians.means[1])
    if family in ("full", "diag"):
        torch.testing.assert_close(dense(best)[1].diagonal(), prior.covariance.diagonal())
    assert torch.isfinite(best.mahalanobis(features)).all()


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_weights_below_the_precision_count_nowhere(family):
    """Otherwise a concept with such weights alone would have some weight and no patches, and a mean of nowhere."""
    gaussians, features, _, r, prior = setting(family, k=16, d=256, n=300, dtype=torch.float32)
    r[:] = 0
    r[torch.arange(300), torch.arange(300) % 12] = 1  # sparse enough for the sparse sums
    r[:, 13] = 1e-9
    best = step(gaussians, features, r, prior)
    torch.testing.assert_close(best.means[13], gaussians.means[13])
    torch.testing.assert_close(best.means[14], gaussians.means[14])
    assert torch.isfinite(best.mahalanobis(features)).all()


@pytest.mark.parametrize("family", ["diag", "tied", "low_rank"])
def test_sparse_sums_are_the_dense_ones(family, monkeypatch):
    gaussians, features, _, r, _ = setting(family, k=40, d=512, n=400)
    r[torch.rand(r.shape) < 0.95] = 0
    sums = []
    by_columns = r.T.contiguous().T
    for wide, weights in ((10**9, r.clone()), (1, r.clone()), (1, by_columns)):  # all products dense, then none
        monkeypatch.setattr("pace.model.gaussians.family._WIDE", wide)
        sums.append(gaussians.empty_sums())
        gaussians.accumulate(features.clone(), weights, sums[-1])
    for name in sums[0]:
        torch.testing.assert_close(sums[1][name], sums[0][name])
        torch.testing.assert_close(sums[2][name], sums[0][name])


def overlapping(spread, n=1200, k=10, d=48):
    """Full covariances that differ somewhat, means so far apart, and patches of them, in float32 and in float64."""
    torch.manual_seed(0)
    shapes = torch.eye(d, dtype=torch.float64) + torch.randn(k, d, d, dtype=torch.float64) / 50
    means, owner = spread * torch.randn(k, d, dtype=torch.float64), torch.randint(k, (n,))
    x = means[owner] + (shapes[owner] @ torch.randn(n, d, 1, dtype=torch.float64)).squeeze(2)
    factors = torch.linalg.inv(torch.linalg.cholesky(shapes @ shapes.mT)).mT.contiguous()
    return FullGaussians(means.float(), factors.float()), FullGaussians(means, factors), x


@pytest.fixture
def by_factors(monkeypatch):
    """How many patches were measured with the concepts' factors, call by call."""
    sizes, measured = [], dense_module._triangular_distances

    def watched(x, factors, shifts):
        sizes.append(len(x))
        return measured(x, factors, shifts)

    monkeypatch.setattr(dense_module, "_triangular_distances", watched)
    return sizes


def test_distances_through_pairs_of_dimensions_are_those_of_the_factors(by_factors):
    gaussians, precise, x = overlapping(spread=0.5)
    found = gaussians.mahalanobis(x.float())
    assert by_factors == []
    expected = precise.mahalanobis(x)
    assert by_factors == [len(x)]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-3)


def test_patches_too_far_for_pairs_are_left_to_the_factors(by_factors):
    gaussians, _, x = overlapping(spread=0.5)
    x[::100] *= 1000
    found = gaussians.mahalanobis(x.float())
    assert by_factors == [12]
    alone = gaussians.mahalanobis(x[::100].float())
    torch.testing.assert_close(found[::100], alone, rtol=0, atol=0)


def test_where_most_patches_are_too_far_for_pairs_all_are_left_to_the_factors(by_factors):
    gaussians, precise, x = overlapping(spread=100.0)
    found = gaussians.mahalanobis(x.float())
    assert by_factors == [len(x)]
    nearest = precise.mahalanobis(x).min(1)
    torch.testing.assert_close(found.double()[range(len(x)), nearest.indices], nearest.values, rtol=1e-3, atol=0.1)


@pytest.mark.parametrize("family", ["diag", "low_rank"])
def test_the_blocks_in_which_squares_are_made_change_nothing(family, monkeypatch):
    gaussians, features, *_ = setting(family)
    whole = gaussians.mahalanobis(features)
    monkeypatch.setattr("pace.model.gaussians.diagonal._CACHED", 7 * (2 * features.shape[1] + 3))
    torch.testing.assert_close(gaussians.mahalanobis(features), whole)


def test_an_emptied_low_rank_concept_can_find_its_directions_again():
    gaussians, features, _, r, prior = setting("low_rank")
    empty = r.clone()
    empty[:, 1] = 0
    back = step(gaussians, features, empty, prior)
    for _ in range(3):
        back = step(back, features, r, prior)
    assert back.factors[1].abs().max() > 0.1


@pytest.mark.parametrize(("family", "distance", "error"), [("full", 100, 0.01), ("diag", 10, 0.5), ("tied", 10, 0.5)])
def test_float32_distances_in_768_dimensions_are_right_to_a_fraction_of_a_nat(family, distance, error):
    """Means this many standard deviations from the data's mean, in every dimension; the true distance is about 768."""
    torch.manual_seed(0)
    means = torch.tensor([[float(distance)], [-float(distance)]]).expand(2, 768).contiguous()
    x = means[0] + torch.randn(200, 768)
    gaussians = FAMILIES[family].seed(means, torch.eye(768, dtype=torch.float64), rank=2)
    found = gaussians.mahalanobis(gaussians.features(x, torch.zeros(768)))[:, 0]
    assert (found.double() - (x.double() - distance).square().sum(1)).abs().max() < error


@pytest.mark.parametrize("d", [64, 384])
def test_a_float32_pass_with_diagonal_covariances_is_the_float64_one(d):
    """Log-likelihoods to 0.001 nats, φ to 1e-4, new means and variances to 1e-4 standard deviations."""
    torch.manual_seed(0)
    k, images, tokens = 20, 4, 60
    scale = torch.where(torch.arange(d) < d // 12, 10.0, 1.0)  # a few wide channels, as transformers have
    means = torch.randn(k, d) * scale * (6 / d) ** 0.5  # overlapping concepts
    x = means[torch.randint(0, k, (images * tokens,))] + torch.randn(images * tokens, d) * scale
    variances = scale.square() * (0.5 + torch.rand(k, d))
    prior = Prior(scale.double().square().diag(), 20.0)

    def one_pass(dtype):
        gaussians = DiagGaussians(means.to(dtype), variances.to(dtype))
        features = gaussians.features(x.to(dtype), torch.zeros(d, dtype=dtype))
        distances = gaussians.mahalanobis(features)
        found = posterior(gaussians, distances, images)
        return distances, found, step(gaussians, features, found.phi.view(len(x), k), prior)

    (near, found, after), (exact_near, exact, exact_after) = one_pass(torch.float32), one_pass(torch.float64)
    assert ((exact.phi > 0.01) & (exact.phi < 0.99)).sum() > 20  # some patches are in doubt
    torch.testing.assert_close(near.double(), exact_near, rtol=0, atol=2e-3)
    torch.testing.assert_close(found.phi.double(), exact.phi, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.gamma, exact.gamma, rtol=0, atol=1e-3)
    torch.testing.assert_close(found.bound, exact.bound, rtol=1e-6, atol=0)
    torch.testing.assert_close(after.means.double() / scale, exact_after.means / scale, rtol=0, atol=1e-4)
    torch.testing.assert_close(after.covariances(), exact_after.covariances(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("family", ["diag", "full", "low_rank"])
def test_a_covariance_that_vanishes_is_refused_in_one_line(family):
    gaussians, features, _, r, prior = setting(family, n=3)
    r[:] = torch.eye(3, dtype=r.dtype)
    with pytest.raises(ValueError, match="not positive definite; use a larger covariance_prior"):
        step(gaussians, features, r, Prior(prior.covariance, 0.0))


@pytest.mark.parametrize(("family", "distance"), [("full", 300), ("diag", 30), ("tied", 30), ("low_rank", 30)])
def test_float32_keeps_covariances_of_patches_far_from_the_origin(family, distance):
    """In standard deviations. Full covariances are summed around each concept's mean; the others around the data's."""
    torch.manual_seed(0)
    centres = torch.tensor([[-distance] * 8, [distance] * 8], dtype=torch.float32)
    x = torch.cat([centres[0] + torch.randn(4000, 8), centres[1] + torch.randn(4000, 8)])
    r = torch.zeros(8000, 2)
    r[:4000, 0] = r[4000:, 1] = 1
    prior = Prior(torch.eye(8, dtype=torch.float64), 1.0)
    gaussians = FAMILIES[family].seed(centres, prior.covariance, rank=2)
    variances = dense(step(gaussians, gaussians.features(x, torch.zeros(8)), r, prior)).diagonal(dim1=-2, dim2=-1)
    assert (variances - 1).abs().max() < 0.1


def test_full_covariances_stay_positive_definite_from_few_patches_in_768_dimensions():
    gaussians, features, _, r, prior = setting("full", k=2, d=768, n=300, dtype=torch.float32)
    prior = Prior(prior.covariance, 768.0)
    for _ in range(3):
        gaussians = step(gaussians, features, r, prior)
    spectrum = torch.linalg.eigvalsh(prior.covariance)
    for covariance in gaussians.covariances():
        # The patches span 300 of 768 dimensions; the prior fills the others in, and keeps the whole well conditioned.
        assert torch.linalg.cond(covariance) < 20 * spectrum[-1] / spectrum[0]
    fresh = gaussians.means[0] + torch.randn(50, 768) @ torch.linalg.cholesky(prior.covariance).float().T
    distance = gaussians.mahalanobis(fresh)[:, 0]
    assert ((distance > 400) & (distance < 1600)).all()  # 768 where the covariance is right


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_family_is_rebuilt_from_its_tensors(family):
    gaussians, features, _, r, prior = setting(family)
    gaussians = step(gaussians, features, r, prior)
    again = type(gaussians).from_tensors(gaussians.tensors())
    assert torch.equal(again.mahalanobis(features), gaussians.mahalanobis(features))
    assert torch.equal(again.log_det, gaussians.log_det)


@pytest.fixture(params=["plain", "fused"])
def screen(request, monkeypatch):
    """Screening for any number of patches and dimensions, on any machine, with and without kernels; lists how it went."""
    if request.param == "fused":
        request.getfixturevalue("kernels")
    monkeypatch.setattr("pace.model.gaussians.dense._quick_in_bfloat16", lambda device: True)
    monkeypatch.setattr("pace.model.gaussians.dense._SCREEN_ROWS", {"cpu": (200, 100), "cuda": (200, 100)})
    monkeypatch.setattr("pace.model.gaussians.dense._SCREEN_DIM", 1)
    answers, screened = [], FullGaussians._screen

    def watched(self, x, within, out):
        answers.append(screened(self, x, within, out))
        return answers[-1]

    monkeypatch.setattr(FullGaussians, "_screen", watched)
    return answers


def embeddings(seed=0, k=12, d=48, images=16, tokens=30):
    """Like a transformer's: correlated, a few channels with 100 times the variance; and Gaussians that fit them."""
    torch.manual_seed(seed)
    owner = torch.randint(0, k, (images * tokens,))
    turn = torch.eye(d) + torch.randn(d, d) / d**0.5
    scale = torch.ones(d)
    scale[: d // 12] = 10
    x = ((2 * torch.randn(k, d)[owner] + torch.randn(images * tokens, d)) @ turn) * scale
    prior = Prior(torch.cov(x.double().T) / 5, 20.0)
    gaussians = FullGaussians.seed(torch.zeros(k, d), prior.covariance, rank=0)
    return step(gaussians, x, torch.nn.functional.one_hot(owner, k).float(), prior), x, prior


def posterior(gaussians, distances, images, alpha=0.1):
    n, k = distances.shape
    weights = Weights.of(torch.ones(images, n // images, dtype=distances.dtype), "exact")
    dim = gaussians.means.shape[1]
    likelihood = weights.log_likelihood(distances.view(images, -1, k).clone(), gaussians.log_det, dim)
    start = uniform_start(images, k, n // images, "exact", distances.device)
    return infer(likelihood, weights, torch.full((k,), alpha).double(), start, log_det=gaussians.log_det, dim=dim)


def test_screened_distances_are_exact_where_they_matter_and_large_elsewhere(screen):
    gaussians, x, _ = embeddings()
    exact, within = gaussians.mahalanobis(x), 20.0
    found = gaussians.near_distances(x, within)
    assert screen == [True] * 5
    log_density = -(exact + gaussians.log_det) / 2
    near = log_density >= log_density.amax(1, keepdim=True) - within
    torch.testing.assert_close(found[near], exact[near], rtol=1e-4, atol=1e-3)
    assert not torch.equal(found, exact)
    torch.testing.assert_close(found, exact, rtol=0.02, atol=0)


@pytest.mark.parametrize("seed", range(3))
def test_screening_changes_neither_theta_nor_phi_nor_the_bound(screen, seed):
    gaussians, x, _ = embeddings(seed)
    found = posterior(gaussians, gaussians.near_distances(x, 34.0), images=16)
    assert any(screen)
    wide = FullGaussians(gaussians.means.double(), gaussians.precision_cholesky.double())
    exact = posterior(wide, wide.mahalanobis(x.double()), images=16)
    torch.testing.assert_close(found.phi.double(), exact.phi, rtol=0, atol=1e-3)
    theta, exact_theta = (one.gamma / one.gamma.sum(1, keepdim=True) for one in (found, exact))
    torch.testing.assert_close(theta, exact_theta, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.bound, exact.bound, rtol=1e-6, atol=1e-2)


def test_the_bound_never_falls_with_the_screen(screen):
    gaussians, x, prior = embeddings()
    gaussians = FullGaussians.seed(gaussians.means + torch.randn(48) / 2, prior.covariance, rank=0)
    bounds = []
    for _ in range(5):
        images = posterior(gaussians, gaussians.near_distances(x, 34.0), images=16)
        bounds.append(float(images.bound.sum()) + gaussians.log_prior(prior))
        gaussians = step(gaussians, x, images.phi.view(len(x), -1), prior)
    assert any(screen)
    assert all(after >= before - 1e-6 * abs(before) for before, after in pairwise(bounds))


def test_where_most_concepts_come_into_question_nothing_is_screened(screen):
    gaussians, x, _ = embeddings()
    assert torch.equal(gaussians.near_distances(x, 1e4), gaussians.mahalanobis(x))
    assert not screen


def test_where_16_bits_have_too_few_digits_the_screen_is_given_up(screen):
    gaussians, x, _ = embeddings()
    gaussians, x = FullGaussians(gaussians.means + 1000, gaussians.precision_cholesky), x + 1000  # far from the origin
    assert torch.equal(gaussians.near_distances(x, 20.0), gaussians.mahalanobis(x))
    assert screen == [False]


def test_a_patch_far_from_all_concepts_costs_the_others_nothing(screen):
    gaussians, x, _ = embeddings()
    x[7] *= 100
    exact, found = gaussians.mahalanobis(x), gaussians.near_distances(x, 20.0)
    assert screen == [True] * 5
    torch.testing.assert_close(found[7], exact[7], rtol=1e-5, atol=0)
    assert not torch.equal(found, exact)


def test_float64_is_never_screened(screen):
    gaussians, x, _ = embeddings()
    wide = FullGaussians(gaussians.means.double(), gaussians.precision_cholesky.double())
    assert torch.equal(wide.near_distances(x.double(), 20.0), wide.mahalanobis(x.double()))
    assert not screen


def test_what_rounding_took_from_a_narrow_direction_is_given_back_and_no_more():
    seed = FullGaussians.seed(torch.zeros(2, 3), torch.eye(3, dtype=torch.float64), 0)
    sums = {"weight": torch.tensor([10.0, 10.0]).double(), "first": torch.zeros(2, 3).double()}
    narrow, plain = torch.diag(torch.tensor([1.0, 1.0, -1e-7]).double()), torch.eye(3).double()
    found = seed.maximise({**sums, "second": 10 * torch.stack([narrow, plain])}, Prior(plain, 0.0)).covariances()
    torch.testing.assert_close(found[1], plain)
    torch.testing.assert_close(found[0], narrow, rtol=0, atol=1e-5)
    assert found[0, 2, 2] > 0
    broken = torch.diag(torch.tensor([1.0, 1.0, -0.1]).double())
    with pytest.raises(ValueError, match="not positive definite"):
        seed.maximise({**sums, "second": 10 * torch.stack([broken, plain])}, Prior(plain, 0.0))
