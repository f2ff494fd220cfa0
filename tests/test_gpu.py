"""What runs on a GPU gives what a CPU gives. Skipped where there is none."""

import numpy as np
import pytest
import torch
from planted import planted

from pace import PACE, Observations

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.mark.parametrize("updates", ["exact", "paper"])
@pytest.mark.parametrize("family", ["full", "diag", "tied", "low_rank"])
def test_a_gpu_learns_and_explains_as_a_cpu_does(family, updates, tmp_path):
    data = planted(0)
    fixed = {"tol": 0.0, "sweep_tol": 0.0, "max_sweeps": 10, "max_iter": 6, "dtype": "float64", "rank": 3, "n_init": 1}
    with pytest.warns(UserWarning, match="raise max_iter"):
        cpu, gpu = (
            PACE(8, covariance=family, updates=updates, device=device, **fixed).fit(
                data.observations, perturbed=data.perturbed
            )
            for device in ("cpu", "cuda")
        )
    np.testing.assert_allclose(gpu.means_, cpu.means_, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(gpu.explain(data.perturbed).phi, cpu.explain(data.perturbed).phi, rtol=1e-6, atol=1e-8)
    gpu.save(tmp_path / "m.safetensors")
    again = PACE.load(tmp_path / "m.safetensors").set_params(device="cpu")
    np.testing.assert_allclose(again.transform(data.observations), gpu.transform(data.observations), rtol=1e-8)


def test_tensors_on_a_gpu_stay_there(tmp_path):
    data = planted(0)
    moved = Observations(
        *(torch.as_tensor(a, device="cuda") for a in (data.observations.embeddings, data.observations.attention))
    )
    model = PACE(8, covariance="diag").fit(moved).partial_fit(moved)
    assert model._concepts.gaussians.means.is_cuda
    assert model.nearest_patches(moved, 0, 3).images.shape == (3,)
