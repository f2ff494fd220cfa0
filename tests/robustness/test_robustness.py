"""A small, seeded run of benchmarks/robustness.py: damaged files are refused in a line, killed work is the same in the end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "robustness.py"


def found(*arguments: str) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--seed", "1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_damaged_file_is_refused_in_one_line_or_read_and_never_silently_where_a_checksum_can_tell():
    damaged = found("--damaged", "260", "--kills", "0", "--command-kills", "0")["damaged"]
    assert damaged["wrong"] == {}
    assert damaged["tally"]["refused"] > 130
    assert set(damaged["tally"]) <= {"refused", "read, the same", "read, something else"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes")
def test_work_that_is_killed_again_and_again_ends_with_the_same_bits():
    kills = found("--kills", "20", "--command-kills", "0", "--damaged", "0")["kills"]
    assert kills["kills"] >= 20
    assert kills["finished"] > 0
    assert (kills["different"], kills["failed"]) == (0, 0)
