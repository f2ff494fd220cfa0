"""What every covariance family promises, and what float32 keeps of it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal

from pace.model.gaussians import FAMILIES, FullGaussians, Prior

FAMILY_NAMES = sorted(FAMILIES)
OFFSET = 3.0


def setting(family, seed=0, k=3, d=6, n=60, dtype=torch.float64):
    torch.manual_seed(seed)
    x = torch.randn(n, d, dtype=dtype) @ torch.randn(d, d, dtype=dtype)
    r = torch.as_tensor(np.random.default_rng(seed).dirichlet(np.full(k, 0.3), n), dtype=dtype) * torch.rand(n, 1)
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
    distances, d = gaussians.mahalanobis(features), x.shape[1]
    for k, covariance in enumerate(dense(gaussians)):
        expected = torch.as_tensor(multivariate_normal(gaussians.means[k], covariance).logpdf(x))
        log_density = -(distances[:, k] + gaussians.log_det[k] + d * np.log(2 * np.pi)) / 2
        torch.testing.assert_close(log_density, expected, rtol=1e-8, atol=1e-8)
    again = type(gaussians).from_tensors(gaussians.tensors())
    assert torch.equal(again.mahalanobis(features), distances)
    assert torch.equal(again.log_det, gaussians.log_det)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_relative_distances_are_distances_up_to_a_constant_for_each_patch(family):
    gaussians, features, _, r, prior = setting(family)
    gaussians = step(gaussians, features, r, prior)
    shared = gaussians.mahalanobis(features) - gaussians.mahalanobis(features, relative=True)
    torch.testing.assert_close(shared, shared[:, :1].expand_as(shared))


def test_tied_relative_distances_keep_the_digits_of_distances_in_float32():
    gaussians, features, _, r, prior = setting("tied", k=20, d=64, n=500)
    gaussians = step(gaussians, features, r, prior)
    narrow = type(gaussians)(gaussians.means.float(), gaussians.precision_cholesky.float())

    def off(found):
        error = found.double() - gaussians.mahalanobis(features)
        return float((error - error.mean(1, keepdim=True)).abs().max())

    assert off(narrow.mahalanobis(features.float(), relative=True)) < 2 * off(narrow.mahalanobis(features.float()))


@pytest.mark.parametrize("family", FAMILY_NAMES)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=8)
def test_the_m_step_raises_the_weighted_likelihood_with_its_prior(family, seed):
    gaussians, features, _, r, prior = setting(family, seed)

    def value(g):
        log_density = -(g.mahalanobis(features) + g.log_det) / 2
        return float((r * log_density).sum()) + g.log_prior(prior)

    for _ in range(3):
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
def test_weights_below_the_precision_are_left_out_of_all_sums(family):
    """Otherwise a concept with no other weights would have some weight but no patches, and an arbitrary mean."""
    gaussians, features, _, r, prior = setting(family, k=16, d=96, n=300, dtype=torch.float32)
    r[:] = 0
    r[torch.arange(300), torch.arange(300) % 12] = 1  # sparse enough for the sparse sums
    r[:, 13] = 1e-9
    best = step(gaussians, features, r, prior)
    torch.testing.assert_close(best.means[13:15], gaussians.means[13:15])
    if family in ("full", "diag"):  # an empty concept has the prior's covariance
        torch.testing.assert_close(dense(best)[14].diagonal(), prior.covariance.diagonal(), rtol=1e-4, atol=0)
    assert torch.isfinite(best.mahalanobis(features)).all()


@pytest.mark.parametrize("family", ["diag", "tied", "low_rank"])
def test_sparse_sums_are_the_dense_ones(family):
    gaussians, features, _, r, _ = setting(family, k=40, d=70, n=200)
    r[torch.rand(r.shape) < 0.95] = 0
    padded = torch.cat([r, torch.full_like(r, 0.5)])  # too many weights for the sparse sums
    found, padding, both = (gaussians.empty_sums() for _ in range(3))
    gaussians.accumulate(features.clone(), r.T.contiguous().T, found)
    gaussians.accumulate(features.clone(), torch.full_like(r, 0.5), padding)
    gaussians.accumulate(torch.cat([features, features]), padded, both)
    for name in found:
        torch.testing.assert_close(found[name], both[name] - padding[name])


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
    with pytest.raises(ValueError, match="a concept's covariance is not positive definite; rescale the embeddings"):
        step(gaussians, features, r, Prior(prior.covariance, 0.0))


@pytest.mark.parametrize(("family", "distance"), [("full", 300), ("diag", 30), ("tied", 30), ("low_rank", 30)])
def test_float32_keeps_covariances_of_patches_far_from_the_origin(family, distance):
    """In standard deviations. Full covariances are summed around each concept's mean; the others around the data's."""
    torch.manual_seed(0)
    centres = torch.tensor([[-distance] * 8, [distance] * 8], dtype=torch.float32)
    x = centres.repeat_interleave(4000, 0) + torch.randn(8000, 8)
    r = torch.eye(2).repeat_interleave(4000, 0)
    prior = Prior(torch.eye(8, dtype=torch.float64), 1.0)
    gaussians = FAMILIES[family].seed(centres, prior.covariance, rank=2)
    variances = dense(step(gaussians, gaussians.features(x, torch.zeros(8)), r, prior)).diagonal(dim1=-2, dim2=-1)
    assert (variances - 1).abs().max() < 0.1


def test_full_covariances_stay_positive_definite_from_fewer_patches_than_dimensions():
    gaussians, features, _, r, prior = setting("full", k=2, d=256, n=100, dtype=torch.float32)
    prior = Prior(prior.covariance, 256.0)
    for _ in range(3):
        gaussians = step(gaussians, features, r, prior)
    spectrum = torch.linalg.eigvalsh(prior.covariance)
    for (
        covariance
    ) in gaussians.covariances():  # the prior fills in the missing directions and keeps it well conditioned
        assert torch.linalg.cond(covariance) < 20 * spectrum[-1] / spectrum[0]


def test_a_variance_that_rounding_made_negative_gets_the_smallest_ridge():
    seed = FullGaussians.seed(torch.zeros(3, 3), torch.eye(3, dtype=torch.float64), 0)
    sums = {"weight": torch.full((3,), 10.0).double(), "first": torch.zeros(3, 3).double()}
    plain = torch.eye(3).double()

    def learned(*smallest):
        covariances = torch.stack([torch.diag(torch.tensor([1.0, 1.0, least]).double()) for least in smallest])
        return seed.maximise({**sums, "second": 10 * covariances}, Prior(plain, 0.0)).covariances()

    found = learned(-1e-7, -5e-6, 1.0)
    torch.testing.assert_close(found[2], plain)
    assert 0 < found[0, 2, 2] < 1e-6
    assert 0 < found[1, 2, 2] < 1e-5
    with pytest.raises(ValueError, match="not positive definite"):
        learned(-0.1, 1.0, 1.0)
