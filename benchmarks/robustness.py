"""The long run: damaged files, killed processes, full disks, bad inputs and hostile names, and what comes of them.

    uv run python benchmarks/robustness.py                            # all of it, for hours
    uv run python benchmarks/robustness.py --kills 0 --minutes 10     # without kills, and at most 10 minutes for each part

What is counted as wrong is printed with an example each. A part's own page says what it does: robustness_files.py,
robustness_kills.py, robustness_disks.py, robustness_inputs.py, robustness_names.py. The tests run a few of each.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
from robustness_disks import disks
from robustness_files import damaged
from robustness_inputs import inputs
from robustness_kills import kills, launches
from robustness_names import names
from robustness_work import JOBS

PARTS = {
    damaged: (10_000, "files"),
    kills: (1_200, "processes"),
    launches: (100, "of torchrun, each with one of its processes killed"),
    disks: (10_000, "of every size that is too small"),
    inputs: (1_000, "in Python"),
    names: (300, "of files and classes"),
}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for part, (count, what) in PARTS.items():
        parser.add_argument(f"--{part.__name__}", type=int, default=count, help=f"{what} ({count:,})")
    parser.add_argument(
        "--jobs", default=",".join(JOBS), help="that are killed, and that read damaged files if fit is one"
    )
    parser.add_argument("--minutes", type=float, default=600.0, help="for each part; what was done until then counts")
    parser.add_argument("--seed", type=int, default=0)
    given = vars(parser.parse_args(arguments))
    torch.set_num_threads(1)  # a forked process cannot have the threads of the one it came from
    found: dict[str, Any] = {}
    for part in PARTS:
        if count := given[part.__name__]:
            began = time.monotonic()
            found[part.__name__] = part(count, given["seed"], began + 60 * given["minutes"], given["jobs"].split(","))
            took = {"minutes": round((time.monotonic() - began) / 60, 1)}
            print(json.dumps({part.__name__: found[part.__name__] | took}, indent=1), flush=True)
    return found


if __name__ == "__main__":
    sys.exit(any(part.get("wrong") for part in main().values()))
