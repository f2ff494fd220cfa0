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
    gaussians.accumulate(features, r, sums)
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
    gaussians.accumulate(features, r, whole)
    for rows in (slice(0, 7), slice(7, None)):
        gaussians.accumulate(features[rows], r[rows], parts)
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
    for covariance in gaussians.covariances():
        assert torch.linalg.eigvalsh(covariance)[0] > 0
    assert torch.isfinite(gaussians.mahalanobis(features)).all()


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_family_is_rebuilt_from_its_tensors(family):
    gaussians, features, _, r, prior = setting(family)
    gaussians = step(gaussians, features, r, prior)
    again = type(gaussians).from_tensors(gaussians.tensors())
    assert torch.equal(again.mahalanobis(features), gaussians.mahalanobis(features))
    assert torch.equal(again.log_det, gaussians.log_det)
