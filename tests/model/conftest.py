import importlib

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def kernels_of(module):
    """A module of Triton kernels; without a GPU they are run by Triton's interpreter."""
    pytest.importorskip("triton", reason="torch comes without Triton here")
    names = ("triton.language.standard", "triton.language", module)

    def again():  # Triton decides whether to compile or to interpret when a module with kernels is imported
        return [importlib.reload(importlib.import_module(name)) for name in names][-1]

    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
        yield again()
    again()


@pytest.fixture(scope="module")
def fused():
    yield from kernels_of("pace.model.gaussians.fused")


@pytest.fixture(scope="module")
def triton_sweeps():
    yield from kernels_of("pace.model.triton_sweeps")


@pytest.fixture
def kernels(fused, monkeypatch):
    """The fused kernels, in use for all float32 input; and tensors are made on the GPU if there is one."""
    monkeypatch.setattr("pace.model.gaussians.dense._kernels", lambda x: fused if x.dtype == torch.float32 else None)
    with torch.device(DEVICE):
        yield fused
