"""Damaged files: what comes of reading them. Part of robustness.py.

Every kind of file that the package reads (robustness_kinds.py) is changed, as bytes and by its structure: values of its JSON,
tensors under a right checksum, lines of a table, names in an archive (robustness_spoiling.py). A reader may refuse it in one
line that names it, or read it; an error of any other kind is raw, and changed bytes that a checksum covers may not be read at
all. Nothing may take 5 seconds or a gigabyte.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from robustness_kinds import Kind, Read, commands, library
from robustness_spoiling import spoiled_archive, spoiled_bytes, spoiled_lines, spoiled_tensors, spoiled_value

from pace.files import read_tensors, save_tensors

SLOW, LARGE, HANGING = 5.0, 1 << 30, 120  # seconds of the processor, bytes, seconds
AT_ONCE = 250  # files that a process damages before another goes on


def spoil(kind: Kind, content: bytes, draw: random.Random) -> bool:
    """Write a damaged version; gives whether a checksum can tell."""
    file = kind.file
    if draw.random() < 0.4 or file.suffix not in (".json", ".safetensors", ".txt", ".pt"):
        damaged = spoiled_bytes(content, draw)
        file.write_bytes(damaged)
        return kind.summed and damaged != content
    if file.suffix == ".json":
        text = json.dumps(spoiled_value(json.loads(content), draw))
        file.write_text("[" * 100_000 if draw.random() < 0.02 else text)
    elif file.suffix == ".txt":
        file.write_text(spoiled_lines(content.decode(), draw))
    elif file.suffix == ".pt":
        file.write_bytes(spoiled_archive(content, draw))
    elif file.name.startswith(("shard-", "weights")):
        from safetensors.torch import load, save

        damaged = save(spoiled_tensors(load(content), draw))
        file.write_bytes(damaged)
        if kind.summed:  # its checksum is in the index
            index = file.parent / "index.json"
            listed = json.loads(index.read_bytes())
            shard = next(one for one in listed["shards"] if f"{one['start']:09d}" in file.name)
            shard |= {"bytes": len(damaged), "crc32": zlib.crc32(damaged)}
            index.write_text(json.dumps(listed))
    else:
        file.write_bytes(content)
        tensors, header = read_tensors(file, dict, "")
        if draw.random() < 0.4 or not tensors:
            header = spoiled_value(header, draw)
        else:
            tensors = spoiled_tensors(tensors, draw)
        save_tensors(file, tensors, header if isinstance(header, dict) else {"x": header})
    return False


def memory() -> dict[str, int]:
    """Bytes of this process: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines() if Path("/proc/self/status").exists() else []
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith(("VmRSS", "VmHWM"))}


def judged(name: str, kind: Kind, read: Read, good: object, draw: random.Random) -> list[str]:
    """What came of one damaged file: outcomes, the first of which is followed by what was said if it is wrong."""
    parent = kind.file.parent
    before = {one: one.read_bytes() for one in parent.iterdir() if one.is_file()}
    covered, problem = spoil(kind, before[kind.file], draw), ""
    if (peak := Path("/proc/self/clear_refs")).exists():
        peak.write_text("5")  # VmHWM begins anew
    began, held = time.process_time(), memory().get("VmRSS", 0)
    try:
        same = np.array_equal(read(), good)  # type: ignore[arg-type]
        outcome = "read, the same" if same else "silent" if covered else "read, something else"
    except (ValueError, OSError) as error:
        line = str(error)
        told = "\n" not in line and len(line) < 2000
        told &= line.startswith("error: ") or any(name in line for name in (kind.file.name, parent.name))
        outcome, problem = "refused" if told else "raw", traceback.format_exc()
    except Exception:
        outcome, problem = "raw", traceback.format_exc()
    found = [f"{outcome}: {name}" if outcome in ("raw", "silent") else outcome]
    found += ["slow"] * (time.process_time() - began > SLOW)
    found += ["large"] * (memory().get("VmHWM", 0) - held > LARGE)
    for one in parent.iterdir():
        if one.is_file() and one not in before:
            one.unlink()
    for one, content in before.items():
        one.write_bytes(content)
    return [*found, problem[-1800:] if outcome == "raw" else ""]


def some(seed: int, numbers: range, found: dict[str, tuple[Kind, list[object]]]) -> Iterator[list[str]]:
    for number in numbers:
        draw = random.Random(f"{seed}-{number}")
        name = _drawn(found, number)
        kind, good = found[name]
        which = draw.randrange(len(kind.reads))
        yield [name, *judged(name, kind, kind.reads[which], good[which], draw)]


def damaged(count: int, seed: int, until: float, names: Sequence[str]) -> dict[str, Any]:
    """Tallies of what came of so many damaged files, and the first of each wrong outcome."""
    tally, wrong = Counter[str](), dict[str, str]()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve()
        (folder / "library").mkdir()
        kinds = library(folder / "library")
        groups = [kinds, kinds, kinds, commands()] if "fit" in names else [kinds]  # commands take longer
        ready = [{name: (kind, [read() for read in kind.reads]) for name, kind in group.items()} for group in groups]
        number = 0
        while number < count and time.monotonic() < until:
            group = ready[number // AT_ONCE % len(ready)]
            begin, end = number, min(count, (number // AT_ONCE + 1) * AT_ONCE)
            for name, *outcomes, problem in _forked(seed, range(begin, end), group):
                number += 1
                for outcome in outcomes:
                    tally[outcome.partition(":")[0]] += 1
                    if outcome.startswith(("raw", "silent", "slow", "large")):
                        wrong.setdefault(outcome if ":" in outcome else f"{outcome}: {name}", problem)
            if number < end and time.monotonic() < until:
                name = _drawn(group, number)
                tally["scipy crashed" if name.endswith(".mat") else "crashed"] += 1
                wrong.setdefault(f"crashed: {name}", f"number {number}")
                number += 1
    kinds_of = len({name for group in ready for name in group})
    return {"kinds": kinds_of, "damaged": number, "tally": dict(sorted(tally.items())), "wrong": wrong}


def _drawn(found: dict[str, Any], number: int) -> str:
    return sorted(found)[number % len(found)]


def _forked(seed: int, numbers: range, found: dict[str, tuple[Kind, list[object]]]) -> Iterator[list[str]]:
    """In a process of its own, which may crash."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.fsync = lambda _: None  # type: ignore[assignment]  # nobody pulls the plug here
        with os.fdopen(writing, "w") as pipe:
            for one in some(seed, numbers, found):
                signal.alarm(HANGING)
                print(json.dumps(one), file=pipe, flush=True)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        for line in pipe:
            yield json.loads(line)
    os.waitpid(child, 0)
