"""A small, seeded run of benchmarks/robustness.py, whose long run has thousands of each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "robustness.py"
PARTS = ("damaged", "kills", "launches", "disks", "inputs", "names")
COUNTS = {"damaged": 300, "kills": 12, "launches": 1, "disks": 6, "inputs": 0, "names": 14}
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks processes")


@pytest.fixture(scope="module")
def found() -> dict:
    """What came of each part; one process for all, since they need the same libraries and the same fit."""
    given = [f"--{part}={count}" for part, count in COUNTS.items()]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--seed=1", "--jobs=a fit in Python,fit,evaluate", *given],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.stdout, done.stderr
    return {
        name: part
        for document in done.stdout.split("\n}\n")
        if document
        for name, part in json.loads(document + "}").items()
    }


@pytest.mark.parametrize("part", [part for part, count in COUNTS.items() if count])
def test_nothing_is_wrong(found, part):
    assert found[part]["wrong"] == {}


def test_a_damaged_file_is_refused_in_one_line_or_read(found):
    tally = found["damaged"]["tally"]
    assert tally["refused"] > 150
    assert sum(tally.values()) == COUNTS["damaged"]
    assert set(tally) <= {"refused", "read, the same", "read, something else"}


def test_killed_work_was_resumed_to_the_end(found):
    assert found["kills"]["at a call"] >= COUNTS["kills"] * 3 // 4
    assert found["kills"]["resumed to the end"] == COUNTS["kills"]
    assert found["launches"]["resumed to the end"] == COUNTS["launches"]


def test_disks_were_full_and_names_hostile(found):
    assert (
        "left out" in found["disks"] or found["disks"]["disks"] == COUNTS["disks"] < found["disks"]["sizes there are"]
    )
    assert found["names"]["outputs"] >= 9
