"""Run folders: a command's files, and ``run.json`` with its options, versions and results."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pace import __version__
from pace.atomic import write_atomically
from pace.cli.errors import Problem, line_of
from pace.cli.output import as_json

if TYPE_CHECKING:
    import torch
    import typer

FORMAT = "pace-run-1"
_FILE = "run.json"
_NOT_RECORDED = ("out", "config", "json", "debug")  # options that do not change the results
_PATHS = frozenset(  # options that may name a file or folder
    ["images", "data_root", "model", "moved", "backbone", "fit_run", "observations", "evaluation", "pictures", "add"]
)
_RUNS = Path("runs")

DATASETS = ("color", "flower", "cars", "cub")  # the names that pace.images.open_images knows


@dataclass
class Invocation:
    """A call of `pace`: its arguments, its command's options by parameter name, and the warnings so far."""

    arguments: list[str]
    options: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    # From the raw arguments, so that they also work when the rest cannot be parsed.
    @property
    def json(self) -> bool:
        return "--json" in self.arguments

    @property
    def debug(self) -> bool:
        return "--debug" in self.arguments


@dataclass
class Run:
    """A folder and its record."""

    folder: Path
    record: dict[str, Any]

    def file(self, name: str) -> Path:
        return self.folder / name

    def save(self) -> None:
        write_atomically(self.file(_FILE), as_json(self.record).encode())


@contextmanager
def running(ctx: typer.Context, what: str, *, device: torch.device | None = None, **about: Any) -> Iterator[Run]:
    """Make the run's folder, and write its record at the beginning and at the end, even after an error.

    The body puts the results into ``run.record["results"]``.
    """
    command, out = str(ctx.info_name), ctx.params["out"]
    folder = _own(Path(out).expanduser(), command) if out else _new(f"{command}-{_slug(what)}")
    began = time.monotonic()
    configuration = {name: _located(name, value) for name, value in ctx.params.items() if name not in _NOT_RECORDED}
    record = {
        "format": FORMAT,
        "command": command,
        "status": "running",
        "folder": str(folder.resolve()),
        "started": datetime.now().astimezone().isoformat(timespec="milliseconds"),
        "seconds": None,
        "command_line": shlex.join(["pace", *ctx.obj.arguments]),
        "configuration": configuration,
        "seed": configuration.get("seed"),
        "versions": _versions(),
        "device": None if device is None else _device_name(device),
        **about,
        "results": {},
        "warnings": ctx.obj.warnings,
    }
    run = Run(folder, record)
    run.save()
    try:
        yield run
    except BaseException as error:
        record["status"] = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        record["seconds"], record["error"] = round(time.monotonic() - began, 3), line_of(error, ctx.obj.options)
        with suppress(OSError):  # report the first error, even if the disk is full
            run.save()
        raise
    record["status"], record["seconds"] = "finished", round(time.monotonic() - began, 3)
    run.save()


def read_record(path: Path) -> dict[str, Any]:
    """The record of a run, given its folder or the file itself."""
    path = path.expanduser()
    file = path / _FILE if path.is_dir() else path
    if not file.is_file():
        raise Problem(f"{path}: no such run; expected a folder with {_FILE} in it")
    try:
        record = json.loads(file.read_bytes())
        if record["format"] != FORMAT or not isinstance(record["configuration"], dict):
            raise KeyError
    except (ValueError, KeyError, TypeError):
        raise Problem(f"{file} is not the record of a pace run") from None
    return dict(record)


def open_run(path: str, *commands: str) -> Run:
    """A run of one of these commands."""
    folder = Path(path).expanduser()
    record = read_record(folder)
    if record["command"] not in commands:
        expected = " or ".join(f"`pace {command}`" for command in commands)
        raise Problem(f"{path} is a run of `pace {record['command']}`; expected one of {expected}")
    return Run(folder if folder.is_dir() else folder.parent, record)


def all_runs(*commands: str) -> list[Run]:
    """The runs of these commands in runs/ that have results, oldest first."""
    found = []
    for file in _RUNS.glob(f"*/{_FILE}"):
        with suppress(Problem):
            record = read_record(file)
            if record["command"] in commands and record["results"]:
                found.append(Run(file.parent, record))
    return sorted(found, key=lambda run: datetime.fromisoformat(run.record["started"]))


def latest(*commands: str) -> Run:
    runs = all_runs(*commands)
    if not runs:
        raise Problem(f"no run in {_RUNS}/; make one with `pace {commands[0]}`, or name one with --run")
    return runs[-1]


def _own(folder: Path, command: str) -> Path:
    """The folder given with --out: new, empty, or of an earlier run of the same command."""
    if folder.exists() and not folder.is_dir():
        raise Problem(f"--out {folder} is a file; expected a folder")
    if folder.is_dir() and any(folder.iterdir()):
        try:
            earlier = read_record(folder)["command"]
        except Problem:
            raise Problem(f"--out {folder} has files that are not from a pace run; choose another folder") from None
        if earlier != command:
            raise Problem(f"--out {folder} is a run of `pace {earlier}`; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _new(name: str) -> Path:
    name = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    for number in range(1, 1000):
        folder = _RUNS / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if _RUNS.exists() and not _RUNS.is_dir():
                raise Problem(f"{_RUNS} is a file; choose a folder with --out") from None
    raise Problem(f"{_RUNS / name} and many more exist; choose a folder with --out")


def _slug(what: str) -> str:
    """The last part of a path, or a name, safe as a file name."""
    last = Path(what).expanduser().resolve().name if os.sep in what or what in (".", "..") else what
    return re.sub(r"[^A-Za-z0-9_.]+", "-", last).strip("-.")[:40] or "images"


def _located(name: str, value: Any) -> Any:
    """Full paths, so that a run can be repeated from another folder."""
    if isinstance(value, (list, tuple)):
        return [_located(name, item) for item in value]
    if name not in _PATHS or not isinstance(value, str) or value in DATASETS:
        return value
    path = Path(value).expanduser()
    return str(path.resolve()) if path.exists() else value


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"pace": __version__, "python": platform.python_version()}
    for package in ("torch", "timm", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _device_name(device: torch.device) -> str:
    import torch

    return f"{device}: {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)
