"""Several processes learn what one learns; killed at any moment, they go on to the same bits."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from fits import KINDS, LEARNED, fit, same_bits
from torch.distributed import HashStore

from pace import PACE
from pace.fitting.distributed import Team, fresh_part, processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the processes leave what they learned."""
    if not hasattr(os, "fork"):
        pytest.skip("forks processes")
    where = tmp_path_factory.mktemp("processes")
    command = [sys.executable, str(Path(forked.__file__)), str(where)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return where


@pytest.mark.parametrize("kind", KINDS)
def test_two_and_three_processes_learn_what_one_learns(kind, folder):
    alone = PACE.load(folder / f"1-0-{kind}")
    for size in (2, 3):
        found, *others = (PACE.load(folder / f"{size}-{rank}-{kind}") for rank in range(size))
        for name in LEARNED:
            ours, theirs = getattr(found, name), getattr(alone, name)
            np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-9, err_msg=name)
        np.testing.assert_allclose(np.array(found.lower_bounds_), np.array(alone.lower_bounds_), rtol=1e-9)
        for other in others:
            same_bits(other, found)
        if kind == "number found":
            assert all(torch.equal(model.selection_.bounds, alone.selection_.bounds) for model in (found, *others))


@pytest.mark.parametrize(
    ("how", "kind"), [*(("stopped", kind) for kind in forked.STOPPED), ("killed", "parts and kinds")]
)
def test_stopped_after_every_checkpoint_or_killed_at_random_they_resume_together_to_the_same_bits(how, kind, folder):
    for rank in (0, 1):
        same_bits(PACE.load(folder / f"{how}-{rank}-{kind}"), PACE.load(folder / f"2-0-{kind}"))


def test_different_data_or_a_checkpoint_of_fewer_processes_are_refused_by_all(folder):
    for rank in (0, 1):
        assert "were given different images or parameters" in (folder / f"unlike-{rank}").read_text()
        assert "of 1 processes; resume it with as many, not 2" in (folder / f"fewer-{rank}").read_text()


def test_what_an_earlier_attempt_left_in_the_store_is_not_read():
    store, size = HashStore(), 3
    for attempt in range(3):
        with ThreadPoolExecutor(size) as pool:
            parts = list(pool.map(lambda rank: fresh_part(store, rank, size), range(size)))
        for rank, part in enumerate(parts):
            assert not any(part.check([f"address of {other}"]) for other in range(rank, size)), attempt
            part.set(f"address of {rank}", str(attempt))
        assert {part.get("address of 2") for part in parts} == {str(attempt).encode()}  # and all have the same part


def test_there_have_to_be_processes_to_share_with():
    with pytest.raises(ValueError, match=r"distributed=True needs the processes of torch.distributed"):
        fit("one view", distributed=True)
    with pytest.raises(ValueError, match="start this program with torchrun --nproc-per-node"), processes("cpu"):
        pass
    team = Team()  # of one
    assert (team.gathered(7), team.from_first({})) == ([7], {})
