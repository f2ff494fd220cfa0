"""Processes that are killed: what the next run makes of what they leave. Part of robustness.py.

Every command is killed at each of its file-system calls and at random times, some twice in one folder, and then comes to its
end: its files have to be those of an undisturbed run, bit for bit (times of the clock aside). Under torchrun's own agent
one of two processes is killed.
Processes are forked from one that has imported everything, which needs Linux.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from robustness_work import FIT, JOBS, command, workshop

CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")  # and os.fsync, which is no event
HANGING = 120  # seconds
PAGE = os.sysconf("SC_PAGE_SIZE")
TORCHRUN = "torchrun"
CLOCK = {"seconds", "images_per_second", "started", "spent"}  # differ from run to run
OF_THE_CLOCK = ("run.json", "lock", "results.md", "results.csv")  # the latter two are made of results.json


class Ended(NamedTuple):
    """How a process ended: by itself with a code, or killed (None); what it printed, its calls and seconds."""

    code: int | None
    said: str
    calls: int
    seconds: float


def forked(job: Callable[[Path], int], folder: Path, at: int | None = None, after: float | None = None) -> Ended:
    """The job in a process of its own, killed at that file-system call in the folder, or after so many seconds."""
    reading, writing = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _in_the_child(job, folder, at, writing)
    os.close(writing)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)  # a process that has ended waits for us, so its number is still its own
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, 1, 2, 3, -signal.SIGKILL):
        raise RuntimeError(f"a process ended with {code} in {folder}")
    calls, said = json.loads(told) if told else (0, "")
    return Ended(None if code < 0 else code, said, calls, time.monotonic() - began)


def _in_the_child(job: Callable[[Path], int], folder: Path, at: int | None, writing: int) -> None:
    signal.alarm(HANGING)
    os.chdir(workshop())
    calls, code, said = 0, 3, io.StringIO()  # 3: an error that nobody made a line of

    def count() -> None:
        nonlocal calls
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CALLS and arguments and str(folder) in str(arguments[0]):
            count()

    sys.addaudithook(hook)
    os.fsync = lambda _: count()  # type: ignore[assignment]  # only a power failure would tell the difference
    try:
        with redirect_stdout(said), redirect_stderr(said):
            code = job(folder)
    except OSError as error:
        code = 1
        said.write(f"error: {error}\n")
    except BaseException:
        said.write(traceback.format_exc())
    with os.fdopen(writing, "w") as pipe:
        json.dump([calls, said.getvalue()], pipe)
    os._exit(code)


def contents(folder: Path) -> Iterator[tuple[str, object]]:
    """What has to be the same in the end."""
    for file in sorted(folder.rglob("*")):
        if not file.is_file() or file.name == "lock":
            continue
        name = str(file.relative_to(folder))
        if file.suffix == ".json":
            found = json.loads(file.read_bytes())
            yield name, _untimed(found["results"] if file.name == "run.json" else found)
        else:
            yield name, b"" if file.name in OF_THE_CLOCK else file.read_bytes()


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _untimed(one) for key, one in value.items() if key not in CLOCK}
    return [_untimed(one) for one in value] if isinstance(value, list) else value


class Known(NamedTuple):
    """The files of a whole run, and what it took."""

    files: dict[str, object]
    calls: int
    seconds: float
    pages: int  # of memory on a disk in memory


@cache
def undisturbed(name: str) -> Known:
    """An error if another run makes other files."""
    folder, found, ended = workshop() / "disk" / "out", list[dict[str, object]](), Ended(0, "", 0, 0.0)
    folder.mkdir(parents=True, exist_ok=True)
    job, warm = (launch, "fit") if name == TORCHRUN else (JOBS[name], name)
    os.chdir(workshop())
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        JOBS[warm](workshop() / f"warm-{name.replace(' ', '-')}")  # here, so that everything is imported
    pages = 0
    for _ in range(2):
        ended = forked(job, folder)
        if ended.code:
            raise RuntimeError(ended.said)
        found.append(dict(contents(folder)))
        pages = sum(1 + -(-file.stat().st_size // PAGE) for file in folder.rglob("*"))
        shutil.rmtree(folder)
    if found[0] != found[1]:
        raise RuntimeError(f"not even undisturbed runs are alike: {different(*found)}")
    return Known(found[0], ended.calls, ended.seconds, pages)


def different(one: dict[str, object], other: dict[str, object]) -> list[str]:
    return [name for name in one | other if one.get(name) != other.get(name)]


def kills(count: int, seed: int, until: float, names: Sequence[str]) -> dict[str, Any]:
    """At every file-system call of every job, and at random times of every job in turn, in an order by lot."""
    draw, wrong = random.Random(seed), dict[str, str]()
    tally = Counter(
        {"kills": 0, "at a call": 0, "at a random time": 0, "resumed to the end": 0, "different": 0, "failed": 0}
    )
    folder = workshop() / "disk" / "out"
    known = {name: undisturbed(name) for name in names}
    calls = [(name, at) for name in names for at in range(known[name].calls)]
    draw.shuffle(calls)
    by_lot = max(count // 4, count - len(calls))
    chosen: list[tuple[str, int | None]] = [
        *calls[: count - by_lot],
        *((names[n % len(names)], None) for n in range(by_lot)),
    ]
    draw.shuffle(chosen)
    for name, first in chosen:
        if time.monotonic() > until:
            break
        ended = []
        for at in [first] + [None] * (draw.random() < 0.25):  # a quarter are killed again when they go on
            after = draw.uniform(0, 1.5 * known[name].seconds) if at is None else None
            ended.append(forked(JOBS[name], folder, at, after))
            if ended[-1].code is None:
                tally.update(["kills", "at a call" if after is None else "at a random time", f"of {name}"])
        ended.append(forked(JOBS[name], folder))
        failed = [one for one in ended if one.code]
        unlike = different(dict(contents(folder)), known[name].files)
        outcome = "failed" if failed else "different" if unlike else "resumed to the end"
        if outcome != "resumed to the end":
            wrong.setdefault(f"{outcome}: {name}", failed[0].said[-1500:] if failed else str(unlike))
        tally[outcome] += 1
        shutil.rmtree(folder)
    return {"calls there are": len(calls), **tally, "wrong": wrong}


# -- torchrun ---------------------------------------------------------------------------------------------------------


def _worker(folder: str) -> None:
    torch.set_num_threads(1)
    if code := command(FIT, Path(folder)):
        raise SystemExit(code)


def launch(folder: Path) -> int:
    """`torchrun --nproc-per-node 2 --max-restarts 3`, whose processes are forked."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    meeting: Any = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": str(os.getpid())}
    how = LaunchConfig(1, 1, 2, start_method="fork", max_restarts=3, monitor_interval=0.05, **meeting)
    elastic_launch(how, _worker)(str(folder))
    return 0


def launches(count: int, seed: int, until: float, names: Sequence[str]) -> dict[str, Any]:
    draw, tally, wrong = random.Random(seed), Counter(kills=0, launches=0, different=0, failed=0), dict[str, str]()
    folder, known = workshop() / "disk" / "out", undisturbed(TORCHRUN)
    while tally["launches"] < count and time.monotonic() < until:
        tally["launches"] += 1
        killer = os.fork()  # beside the agent
        if killer == 0:
            os._exit(_kill_one(os.getppid(), draw.uniform(0, known.seconds)))
        draw.random()
        found = forked(launch, folder)
        tally["kills"] += os.waitstatus_to_exitcode(os.waitpid(killer, 0)[1])
        unlike = [] if found.code else different(dict(contents(folder)), known.files)
        outcome = "failed" if found.code else "different" if unlike else "resumed to the end"
        tally[outcome] += 1
        if outcome != "resumed to the end":
            wrong.setdefault(outcome, found.said[-3000:] or str(unlike))
        shutil.rmtree(folder)
    return {**tally, "wrong": wrong}


def _kill_one(harness: int, after: float) -> int:
    """Kill one of the agent's processes; how many were killed."""
    time.sleep(after)

    def children(of: int) -> list[int]:
        tasks = Path(f"/proc/{of}/task").glob("*/children")
        return [int(one) for task in tasks for one in task.read_text().split()]

    for _ in range(400):
        try:
            workers = [one for agent in children(harness) if agent != os.getpid() for one in children(agent)]
            if len(workers) == 2:
                os.kill(workers[int(after * 1e6) % 2], signal.SIGKILL)
                return 1
        except OSError:  # it has just ended
            pass
        time.sleep(0.01)
    return 0
