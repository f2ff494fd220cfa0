import importlib

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def fused():
    """pace.model.gaussians.fused; without a GPU its kernels are run by Triton's interpreter."""
    pytest.importorskip("triton", reason="torch comes without Triton here")
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        yield _again("triton.language.standard", "triton.language", "pace.model.gaussians.fused")
    _again("triton.language.standard", "triton.language", "pace.model.gaussians.fused")


def _again(*modules):
    """Triton decides whether to compile or to interpret when a module with kernels is imported."""
    return [importlib.reload(importlib.import_module(name)) for name in modules][-1]


@pytest.fixture
def kernels(fused, monkeypatch):
    """The same, in use for all float32 input; and tensors are made on the GPU if there is one."""
    monkeypatch.setattr("pace.model.gaussians.dense._has_kernels", lambda x: x.dtype == torch.float32)
    with torch.device(DEVICE):
        yield fused
