import numpy as np
import pytest
import torch
from test_factorization import matched

from pace import Observations
from pace.baselines import SparseAutoencoder, explainer, sae
from pace.metrics import live_concepts, reconstruction


class Here:
    device = torch.device("cpu")


@pytest.fixture(scope="module")
def planted():
    """Patches that hold two of ten directions each, with any attention."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(10, 32))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    amounts = np.zeros((50, 20, 10))
    held = rng.random(amounts.shape).argsort(2)[:, :, :2]
    np.put_along_axis(amounts, held, 1 + rng.random(held.shape), 2)
    embeddings = 5 + amounts @ rows + 0.01 * rng.normal(size=(50, 20, 32))
    return Observations(embeddings.astype(np.float32), rng.random((50, 20)) + 0.1), rows


def test_planted_directions_are_found_and_rebuild_the_patches(planted):
    seen, rows = planted
    method = SparseAutoencoder(16, active=3, steps=800).fit(Here(), seen)
    found = method.explain(seen)
    assert matched(torch.from_numpy(method.concepts_), torch.from_numpy(rows.astype(np.float32))).min() > 0.9
    np.testing.assert_allclose(np.linalg.norm(method.concepts_, axis=1), 1, rtol=1e-5)
    assert (found.phi >= 0).all()
    assert (found.phi > 0).sum(2).max() <= 3
    assert reconstruction(found.phi, seen.embeddings, method.concepts_, method.offset_) > 0.9


def test_the_seed_decides_all_of_it(planted):
    seen, _ = planted
    first, again, other = (SparseAutoencoder(8, steps=30).fit(Here(), seen, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.concepts_, again.concepts_)
    assert (first.concepts_ @ other.concepts_.T).max() < 0.99


def test_dead_latents_come_back(planted, monkeypatch):
    seen, _ = planted
    live = []
    for weight in (0.0, 1.0):
        monkeypatch.setattr(sae, "_REVIVAL", weight)
        monkeypatch.setattr(sae, "_PATIENCE", 5)
        method = SparseAutoencoder(40, active=1, steps=400).fit(Here(), seen)
        live.append(live_concepts(method.explain(seen).phi))
    assert live[1] > live[0]


def test_nested_the_first_latents_hold_what_matters_most():
    rng = np.random.default_rng(0)
    amounts = rng.exponential(size=(50, 20, 12)) * np.where(np.arange(12) < 2, 3.0, 0.5)  # of orthogonal directions
    seen = Observations(np.pad(amounts, ((0, 0), (0, 0), (0, 12))).astype(np.float32), np.ones((50, 20)))
    shares = []
    for nested in (False, True):
        method = SparseAutoencoder(16, active=4, steps=300, nested=nested).fit(Here(), seen)
        phi = method.explain(seen).phi
        shares.append(reconstruction(phi[:, :, :4], seen.embeddings, method.concepts_[:4], method.offset_))
    assert shares[1] > shares[0] + 0.1


def test_eight_times_as_many_latents_and_no_more_than_a_quarter_of_them_active(planted):
    seen, _ = planted
    method = explainer("sae-8x", n_concepts=2, steps=10).fit(Here(), seen)
    assert method.explain(seen).theta.shape == (50, 16)
    assert method.active == 4
    assert explainer("sae", n_concepts=2).active == 1
    with pytest.raises(ValueError, match="expansion: expected a whole number"):
        SparseAutoencoder(expansion=0)
