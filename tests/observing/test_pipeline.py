"""Beside the model: nothing is overwritten before it is kept, and no error is lost."""

import threading

import pytest
import torch

from pace.observations import Batch
from pace.observing.pipeline import Behind, uploaded

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]


def result(number, device="cpu"):
    part = torch.full((2,), number, device=device)
    return Batch(part, part + 1, None), part + 2


@pytest.mark.parametrize("device", DEVICES)
def test_slow_keeping_holds_the_model_back_and_sees_every_result(device):
    kept, go_on = [], threading.Semaphore(0)

    def keep(batch, bounds):
        go_on.acquire()
        assert batch.predictions is None
        kept.append((int(batch.embeddings[0]), int(batch.attention[0]), int(bounds[0]), bounds.device.type))

    with Behind(torch.device(device)) as behind:
        for number in range(3):
            behind.keep(keep, *result(number, device))
        for number in range(3, 9):
            go_on.release()  # without it, the next line would wait for ever
            behind.keep(keep, *result(number, device))
            assert len(kept) >= number - 2
        for _ in range(3):
            go_on.release()
        behind.wait()
    assert kept == [(number, number + 1, number + 2, "cpu") for number in range(9)]


def test_an_error_while_keeping_reaches_the_caller():
    def keep(batch, bounds):
        if batch.embeddings[0] == 1:
            raise RuntimeError("no room on the shelf")

    def run():
        with Behind(torch.device("cpu")) as behind:
            for number in range(20):
                behind.keep(keep, *result(number))

    with pytest.raises(RuntimeError, match="no room on the shelf"):
        run()


@pytest.mark.parametrize("device", DEVICES)
def test_uploaded_bytes_become_fractions_whatever_the_default_type(device):
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        ((rows, upload),) = uploaded((item for item in [([0], pixels)]), torch.device(device))
        there = upload()
    finally:
        torch.set_default_dtype(before)
    assert (rows, there.dtype, there.device.type) == ([0], torch.float32, device)
    assert torch.allclose(there.cpu(), pixels.float() / 255, rtol=1e-6)
