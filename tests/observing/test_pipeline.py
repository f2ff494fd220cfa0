"""Beside the model: nothing that leaves it is overwritten before it is kept, and nothing that fails there is lost."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pace.observing.pipeline import Behind, Link, Ring, Team, fresh

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]


@pytest.fixture(autouse=True)
def _no_thread_survives() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pace-")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_arrive_as_they_were_through_buffers_used_again(device: str, dtype: torch.dtype) -> None:
    ring = Ring(torch.device(device))
    seen = set()
    for number in range(12):
        part = torch.randn(3 if number < 11 else 2, 4, 5, device=device).to(dtype)  # the last batch is smaller
        here, missing, other = ring.take(part, None, part[:, 0])()
        assert here is not None
        assert other is not None
        assert missing is None
        assert (here.dtype, here.device.type, here.is_pinned()) == (dtype, "cpu", device == "cuda")
        assert torch.equal(here, part.cpu())
        assert torch.equal(other, part[:, 0].cpu())
        seen.add(here.data_ptr())
    assert len(seen) == 3


def test_a_ring_makes_room_for_larger_parts_and_other_types() -> None:
    ring = Ring(CPU)
    for shape, dtype in [((2, 3), torch.float32), ((5, 3), torch.float32), ((5, 4), torch.float32)] * 4:
        part = torch.rand(shape).to(dtype)
        assert torch.equal(ring.take(part)()[0], part)  # type: ignore[arg-type]
        assert torch.equal(ring.take(part.half())()[0], part.half())  # type: ignore[arg-type]


def test_buffers_are_no_part_of_a_gradient() -> None:
    (here,) = Ring(CPU).take(torch.ones(2, requires_grad=True) * 2)()
    assert here is not None
    assert not here.requires_grad


@pytest.mark.parametrize("device", DEVICES)
def test_slow_keeping_holds_the_model_back_and_sees_every_result(device: str) -> None:
    """The last allowed result is taken while the first is still being kept; nothing may be overwritten meanwhile."""
    kept: list[Tensor] = []
    go_on = threading.Semaphore(0)

    def keep(parts: list[Tensor]) -> None:
        go_on.acquire()
        kept.append(parts[0].clone())

    with Behind(torch.device(device)) as behind:
        for number in range(3):
            behind.keep(keep, torch.full((2,), number, device=device))
        for number in range(3, 9):
            go_on.release()  # without it, the next line would wait for ever
            behind.keep(keep, torch.full((2,), number, device=device))
            assert len(kept) >= number - 2
        for _ in range(3):
            go_on.release()
        behind.wait()
    assert [int(part[0]) for part in kept] == list(range(9))


def test_what_fails_while_keeping_reaches_the_caller_and_nothing_is_kept_after_it() -> None:
    kept: list[int] = []

    def keep(parts: list[Tensor]) -> None:
        if parts[0] == 1:
            raise RuntimeError("no room on the shelf")
        kept.append(int(parts[0]))

    def run() -> None:
        with Behind(CPU) as behind:
            for number in range(20):
                behind.keep(keep, torch.tensor([number]))

    with pytest.raises(RuntimeError, match="no room on the shelf"):
        run()
    assert kept == [0]


def test_what_was_taken_before_an_interruption_is_still_kept() -> None:
    kept: list[int] = []

    def run() -> None:
        with Behind(CPU) as behind:
            for number in range(2):
                behind.keep(lambda parts: kept.append(int(parts[0])), torch.tensor([number]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert kept == [0, 1]


@pytest.mark.parametrize("for_gpu", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 8, 1001])
def test_a_team_copies_everything(for_gpu: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pace.observing.pipeline._processors", lambda: 8)
    part = torch.randn(rows, (6 << 20) // rows // 4)
    with Team(for_gpu) as team:
        room = fresh(part.shape, torch.float16)
        team.copy(room, part)
        assert torch.equal(room, part.half())
        with pytest.raises(RuntimeError, match="size of tensor"):
            team.copy(room[:, :-1], part)


def test_fresh_memory_has_the_shape_and_type_asked_for() -> None:
    room = fresh((2, 1, 3), torch.bfloat16)
    assert (tuple(room.shape), room.dtype) == ((2, 1, 3), torch.bfloat16)
    assert fresh((4, 3), torch.float32).fill_(1).sum() == 12


@pytest.mark.parametrize("device", DEVICES)
def test_uploaded_bytes_become_fractions_whatever_the_default_type(device: str) -> None:
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with Team(for_gpu=device == "cuda") as team:
            there = Link(torch.device(device), team).upload(pixels)()
    finally:
        torch.set_default_dtype(before)
    assert (there.dtype, there.device.type) == (torch.float32, device)
    assert torch.allclose(there.cpu(), pixels.float() / 255, rtol=1e-6)
