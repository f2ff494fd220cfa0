import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch.nn.functional import normalize

from pace.baselines import factorization
from pace.baselines.factorization import coefficients, k_means, nearest, nmf, semi_nmf


def planted(k: int, d: int, n: int, signed: bool = False, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches made of a sparse non-negative mixture of k unit rows, and these rows."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(k, d)) if signed else rng.random((k, d)) * (rng.random((k, d)) < 0.4) + 0.01
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    amounts = rng.exponential(size=(n, k)) * (rng.random((n, k)) < 0.3)
    return torch.from_numpy((amounts @ rows).astype(np.float32)), torch.from_numpy(rows.astype(np.float32))


def matched(found: torch.Tensor, true: torch.Tensor) -> np.ndarray:
    """Cosines of the best one-to-one match."""
    cosines = (normalize(found) @ normalize(true).T).numpy()
    return cosines[linear_sum_assignment(-cosines)]


def error(patches: torch.Tensor, dictionary: torch.Tensor) -> float:
    return float((patches - coefficients(patches, dictionary, steps=500) @ dictionary).norm() / patches.norm())


def test_coefficients_are_scipys_non_negative_least_squares():
    from scipy.optimize import nnls

    rng = np.random.default_rng(0)
    dictionary, patches = rng.normal(size=(6, 10)), rng.normal(size=(30, 10))
    found = coefficients(torch.from_numpy(patches), torch.from_numpy(dictionary))
    expected = np.stack([nnls(dictionary.T, patch)[0] for patch in patches])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert (found == 0).any()


def test_nmf_finds_planted_factors():
    patches, rows = planted(5, 20, 400)
    amounts, found = nmf(patches, 5, seed=0)
    assert (amounts >= 0).all()
    assert float((patches - amounts @ found).norm() / patches.norm()) < 0.05
    assert (found >= 0).all()
    assert matched(found, rows).min() > 0.97
    torch.testing.assert_close(found.norm(dim=1), torch.ones(5))
    for few in (torch.zeros(10, 4), torch.rand(2, 4)):  # nothing to find, and fewer patches than factors
        assert torch.isfinite(nmf(few, 3, seed=0)[1]).all()


def test_nmf_is_as_close_as_scikit_learns():
    from sklearn.decomposition import NMF

    patches = torch.rand(300, 24, generator=torch.Generator().manual_seed(0)).square()
    reference = NMF(8, init="nndsvda", max_iter=2000, random_state=0).fit(patches.numpy())
    theirs = error(patches, normalize(torch.from_numpy(reference.components_.astype(np.float32))))
    assert error(patches, nmf(patches, 8, seed=0)[1]) < 1.02 * theirs


def test_semi_nmf_finds_planted_factors_of_either_sign():
    patches, rows = planted(5, 30, 600, signed=True)
    found = semi_nmf(patches, 5, seed=0)
    assert (found < 0).any()
    assert matched(found, rows).min() > 0.95


def test_how_many_patches_are_taken_at_a_time_changes_nothing(monkeypatch):
    patches, dictionary = planted(4, 10, 60)
    sets = patches.unflatten(0, (3, 20))
    dictionaries = torch.stack([planted(4, 10, 1, seed=seed)[1] for seed in (1, 2, 3)])

    def everything():
        fitted = [
            k_means(patches, patches[:, 0] + 0.1, 5, 0),
            *nmf(patches, 4, 0),
            *nmf(sets, 2, 0),
            semi_nmf(patches, 4, 0),
        ]
        return [*fitted, coefficients(sets, dictionary), coefficients(sets, dictionaries), nearest(patches, dictionary)]

    whole = everything()
    monkeypatch.setattr(factorization, "_ROWS_PER_THREAD", 17)
    for cut, expected in zip(everything(), whole, strict=True):
        torch.testing.assert_close(cut, expected, rtol=1e-3, atol=1e-3)


def test_the_nearest_centre_is_found_however_far_the_origin_is():
    patches, centres = (torch.randn(size, 8, generator=torch.Generator().manual_seed(size)) for size in (50, 6))
    expected = torch.cdist(patches.double(), centres.double()).argmin(1)
    assert nearest(patches + 1e3, centres + 1e3).tolist() == expected.tolist()


def test_k_means_finds_planted_centres():
    rng = np.random.default_rng(0)
    centres = torch.from_numpy(10 * rng.normal(size=(6, 12)).astype(np.float32))
    owner = rng.integers(6, size=500)
    patches = centres[owner] + torch.from_numpy(rng.normal(size=(500, 12)).astype(np.float32))
    found = k_means(patches, torch.ones(500), 6, seed=0)
    assert matched(found, centres).min() > 0.99
    distances = torch.cdist(found, centres).numpy()
    assert distances[linear_sum_assignment(distances)].max() < 1.0
    # What has no weight has no centre, and a patch of weight 3 is three patches.
    five = k_means(patches, torch.from_numpy(owner > 0).float(), 5, seed=0)
    assert torch.cdist(five, centres).min(1).indices.sort().values.tolist() == [1, 2, 3, 4, 5]
    weights = torch.tensor([1.0, 3.0, 1.0])
    torch.testing.assert_close(
        k_means(torch.tensor([[0.0], [4.0], [40.0]]), weights, 2, 0).sort(0).values, torch.tensor([[3.0], [40.0]])
    )
