"""A small, seeded run of benchmarks/robustness.py, whose long run has thousands of each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "robustness.py"
PARTS = ("damaged", "kills", "launches", "disks", "inputs", "names")
needs_fork = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks processes")


def found(**counts: int) -> dict:
    given = [f"--{part}={counts.get(part, 0)}" for part in PARTS]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--seed", "1", *given],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.stdout, done.stderr
    (part,) = json.loads(done.stdout).values()
    assert part["wrong"] == {}
    assert done.returncode == 0
    return part


@needs_fork
def test_a_damaged_file_is_refused_in_one_line_or_read_and_never_silently_where_a_checksum_can_tell():
    tally = found(damaged=300)["tally"]
    assert tally["refused"] > 150
    assert sum(tally.values()) == 300
    assert set(tally) <= {"refused", "read, the same", "read, something else"}


@needs_fork
def test_commands_that_are_killed_at_any_call_end_with_the_same_bits():
    tally = found(kills=20)
    assert tally["kills"] >= 20
    assert tally["resumed to the end"] > 0
    assert (tally["different"], tally["failed"]) == (0, 0)


@needs_fork
def test_a_fit_of_two_processes_of_which_one_is_killed_ends_with_the_same_bits():
    tally = found(launches=2)
    assert tally["kills"] > 0
    assert tally["resumed to the end"] == 2


@needs_fork
def test_a_full_disk_is_one_line_and_with_more_room_the_same_command_goes_on():
    tally = found(disks=8)
    if "left out" in tally:
        pytest.skip(tally["left out"])
    assert tally["full"] > 0


@needs_fork
def test_hostile_names_add_nothing_to_any_output():
    assert found(names=14)["outputs"] >= 9
