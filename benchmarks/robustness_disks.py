"""Disks that are full: every file, and every page of memory, that does not fit. Part of robustness.py.

The disks are small ones in memory, which takes the right to mount them. Every job is run on disks with room for one page, two
pages, and so on until it fits, and likewise for one file, two files, …: so each page that is written, by whatever code, is
once the first that finds no room. Every command ends in one line that names a file, leaves no half-written file under its
final name, and with more room goes on to the same bits.
"""

from __future__ import annotations

import random
import re
import subprocess
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from robustness_kills import PAGE, contents, different, forked, undisturbed
from robustness_work import JOBS, workshop

AMPLE = 1 << 20  # pages, and files


def _mounted(pages: int, files: int, *more: str) -> bool:
    options = ",".join([f"size={PAGE * pages}", f"nr_inodes={files}", *more])
    how = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(workshop() / "disk")]
    return subprocess.run(how, capture_output=True, check=False).returncode == 0


@contextmanager
def disk(pages: int, files: int) -> Iterator[Path]:
    """A folder on a disk of that size, which has an inode of its own and takes another."""
    if not _mounted(pages, files + 2):
        raise PermissionError("mounting a small disk takes the right to do so")
    try:
        folder = workshop() / "disk" / "out"
        folder.mkdir()
        yield folder
    finally:
        subprocess.run(["umount", str(workshop() / "disk")], check=True)


def fits(name: str, pages: int, files: int) -> bool:
    with disk(pages, files) as folder:
        return forked(JOBS[name], folder).code == 0


def wrongs(name: str, pages: int, files: int) -> Iterator[tuple[str, str]]:
    """What is wrong with how the job takes a disk that is too small for it."""
    with disk(pages, files) as folder:
        ended = forked(JOBS[name], folder)
        errors = [line for line in ended.said.splitlines() if line.startswith("error: ")]
        if ended.code and (
            ended.code != 1 or len(errors) != 1 or not re.search("No space left|disk is full", errors[0])
        ):
            yield "raw", ended.said[-2500:]
        elif ended.code and str(folder) not in errors[0]:
            yield "names no file", ended.said[-600:]
        if half := [str(file) for file in folder.rglob("*.tmp")]:
            yield "half-written files left", str(half)
        _mounted(AMPLE, AMPLE, "remount")
        again = forked(JOBS[name], folder)
        unlike = different(dict(contents(folder)), undisturbed(name).files)
        if again.code or unlike:
            yield "different", f"{unlike} {again.said[-1500:]}"


def disks(count: int, seed: int, until: float, names: Sequence[str]) -> dict[str, Any]:
    tally, wrong, small = Counter(disks=0), dict[str, str](), list[tuple[str, int, int]]()
    try:
        for name in names:
            known = undisturbed(name)  # twice as much, since two copies of what is replaced may be there at once
            pages = bisect_left(range(1, 2 * known.pages), True, key=lambda n: fits(name, n, AMPLE)) + 1
            files = bisect_left(range(2 * len(known.files)), True, key=lambda n: fits(name, AMPLE, n))
            small += [(name, n, AMPLE) for n in range(1, pages)] + [(name, AMPLE, n) for n in range(files)]
    except PermissionError as error:
        return {"wrong": {}, "left out": str(error)}
    random.Random(seed).shuffle(small)
    for name, pages, files in small[:count]:
        if time.monotonic() > until:
            break
        tally.update(["disks", f"of {name}"])
        for what, said in wrongs(name, pages, files):
            tally[what] += 1
            wrong.setdefault(f"{what}: {name}, {pages} pages, {files} files", said)
    return {"sizes there are": len(small), **tally, "wrong": wrong}
