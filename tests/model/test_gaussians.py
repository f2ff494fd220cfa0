import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pace.model.gaussians import FAMILIES, Prior

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
    gaussians.accumulate(features, r.clone(), sums)
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
    gaussians.accumulate(features, r.clone(), whole)
    for rows in (slice(0, 7), slice(7, None)):
        gaussians.accumulate(features[rows], r[rows].clone(), parts)
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
    for wide in (1, 10**9):  # all products sparse, then none
        monkeypatch.setattr("pace.model.gaussians.family._WIDE", wide)
        sums.append(gaussians.empty_sums())
        gaussians.accumulate(features, r.clone(), sums[-1])
    for name in sums[0]:
        torch.testing.assert_close(sums[0][name], sums[1][name])


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
