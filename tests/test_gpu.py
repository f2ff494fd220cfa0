"""What runs on a GPU gives what a CPU gives. Skipped where there is none."""

import warnings

import numpy as np
import pytest
import torch
from planted import planted
from sklearn.exceptions import ConvergenceWarning

from pace import PACE, Observations
from pace.metrics import information_over_attention, reconstruction, within_image_information
from pace.model.feeding import Feed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

DATA = planted(0)


def fit(**parameters):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = PACE(**{"n_concepts": 8, "max_iter": 4, "n_init": 1, "device": "cuda"} | parameters)
        return model.fit(DATA.observations, perturbed=DATA.perturbed)


@pytest.mark.parametrize("updates", ["exact", "paper"])
@pytest.mark.parametrize("family", ["full", "diag", "tied", "low_rank"])
def test_a_gpu_learns_and_explains_as_a_cpu_does(family, updates, tmp_path):
    cpu, gpu = (fit(covariance=family, updates=updates, dtype="float64", device=device) for device in ("cpu", "cuda"))
    np.testing.assert_allclose(gpu.means_, cpu.means_, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(gpu.explain(DATA.perturbed).phi, cpu.explain(DATA.perturbed).phi, rtol=1e-6, atol=1e-8)
    gpu.save(tmp_path / "m.safetensors")
    again = PACE.load(tmp_path / "m.safetensors", device="cpu")
    np.testing.assert_allclose(again.transform(DATA.observations), gpu.transform(DATA.observations), rtol=1e-8)


def test_tensors_on_a_gpu_stay_there():
    seen = DATA.observations
    moved = Observations(*(torch.as_tensor(a, device="cuda") for a in (seen.embeddings, seen.attention)))
    model = PACE(8, covariance="diag").fit(moved).partial_fit(moved)
    assert model._concepts.gaussians.means.is_cuda
    assert model.nearest_patches(moved, 0, 3).images.shape == (3,)


def test_embeddings_that_fit_are_copied_once_and_others_batch_by_batch(monkeypatch):
    kept, real = [], Feed.kept

    def counted(self, *arguments):
        kept.append(1)
        return real(self, *arguments)

    monkeypatch.setattr(Feed, "kept", counted)
    once = fit()
    assert len(kept) == 1
    batch_by_batch = fit(memory="2MB")  # the images take 2.5 MB
    assert len(kept) == 1
    np.testing.assert_allclose(np.array(batch_by_batch.lower_bounds_), np.array(once.lower_bounds_), rtol=1e-4)


def test_scores_of_patches_on_a_gpu_are_those_on_a_cpu():
    rng = np.random.default_rng(0)
    phi, concepts = rng.random((40, 17, 6), dtype=np.float32), rng.normal(size=(6, 8))
    embeddings, attention = rng.normal(size=(40, 17, 8)).astype(np.float32), rng.random((40, 17))
    expected, scores = (
        [
            information_over_attention(phi, found, attention, (4, 4), 1),
            within_image_information(phi, found, (4, 4), 1),
            reconstruction(phi, found, concepts, 0.0, 1),
        ]
        for found in (embeddings, torch.as_tensor(embeddings, device="cuda"))
    )
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-6)


def test_a_gpu_keeps_decoded_images_for_all_epochs_of_fine_tuning():
    from pace.backbones.training import room_for_pixels

    assert room_for_pixels(torch.device("cuda")) > 64 * 3 * 32 * 32
    assert room_for_pixels(torch.device("cpu")) == 0
