"""What only a GPU can show: embeddings stay there, and real shortage of memory is survived."""

import warnings

import numpy as np
import pytest
import torch
from planted import planted
from sklearn.exceptions import ConvergenceWarning

from pace import PACE, Observations
from pace.model.feeding import Feed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def fit(observations, perturbed=None, **parameters):
    chosen = {"n_concepts": 8, "max_iter": 3, "max_sweeps": 10, "sweep_tol": 0.0, "n_init": 1, "device": "cuda"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return PACE(**(chosen | parameters)).fit(observations, perturbed=perturbed)


def test_embeddings_that_fit_are_copied_once_and_others_batch_by_batch(monkeypatch):
    data = planted(0, images=300, d=64)
    kept, real = [], Feed.kept

    def counted(self, *arguments):
        kept.append(1)
        return real(self, *arguments)

    monkeypatch.setattr(Feed, "kept", counted)
    once = fit(data.observations, data.perturbed)
    assert len(kept) == 1
    batch_by_batch = fit(data.observations, data.perturbed, memory="8MB")
    assert len(kept) == 1
    np.testing.assert_allclose(np.array(batch_by_batch.lower_bounds_), np.array(once.lower_bounds_), rtol=1e-4)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_gpu_that_is_too_small_for_a_batch_gets_there_in_halves(dtype):
    rng = np.random.default_rng(0)
    embeddings = (rng.integers(0, 8, (600, 197, 1)) + 0.1 * rng.normal(size=(600, 197, 256))).astype(dtype)
    observations = Observations(embeddings, np.ones((600, 197), np.float32))
    roomy = fit(observations, covariance="diag")
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 150e6) / total)
    try:
        cramped = fit(observations, covariance="diag")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    np.testing.assert_allclose(np.array(cramped.lower_bounds_), np.array(roomy.lower_bounds_), rtol=1e-4)
