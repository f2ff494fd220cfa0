"""Run folders: a command's files, and ``run.json`` with its options, versions and results."""

from __future__ import annotations

import json
import platform
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pace import __version__
from pace.atomic import write_atomically
from pace.cli.errors import Problem, line_of
from pace.cli.output import as_json

if TYPE_CHECKING:
    import torch
    import typer

FORMAT = "pace-run-1"
_FILE = "run.json"
_NOT_RECORDED = ("out", "config", "json", "debug", "every")  # options that do not change the results
_PATHS = frozenset(  # options that may name a file or folder
    ["images", "data_root", "model", "moved", "backbone", "fit_run", "observations", "evaluation", "pictures", "add"]
)
RUNS = Path("runs")

GENERATED = ("color", "birds")  # the names that pace.images.open_images knows, without and with a folder of their own
DATASETS = (*GENERATED, "flower", "cars", "cub")


class Invocation(NamedTuple):
    """A call of `pace`: its arguments, its command's options by parameter name, and the warnings so far."""

    arguments: list[str]
    options: dict[str, str]
    warnings: list[str]


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
def running(ctx: typer.Context, what: str | None, *, device: torch.device | None = None, **about: Any) -> Iterator[Run]:
    """Make the run's folder, and write its record at the beginning and at the end, even after an error.

    The body puts the results into ``run.record["results"]``.
    """
    command, out = str(ctx.info_name), ctx.params["out"]
    folder = _own(Path(out).expanduser(), command) if out else _new(f"{command}-{_slug(str(what))}")
    began = time.monotonic()
    configuration = {name: value for name, value in ctx.params.items() if name not in _NOT_RECORDED}
    configuration |= {name: located(configuration[name]) for name in _PATHS & configuration.keys()}
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
        record["status"] = "finished"
    except BaseException as error:
        record["status"] = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        record["error"] = line_of(error, ctx.obj.options)
        raise
    finally:
        record["seconds"] = round(time.monotonic() - began, 3)
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


def open_run(path: str, command: str) -> Run:
    folder = Path(path).expanduser()
    record = read_record(folder)
    if record["command"] != command:
        raise Problem(f"{path} is a run of `pace {record['command']}`; expected one of `pace {command}`")
    return Run(folder if folder.is_dir() else folder.parent, record)


def all_runs(command: str, folder: Path = RUNS) -> list[Run]:
    """The runs of this command in a folder that have results, oldest first."""
    found = []
    for file in folder.glob(f"*/{_FILE}"):
        with suppress(Problem):
            run = open_run(str(file), command)
            if run.record["results"]:
                found.append(run)
    return sorted(found, key=lambda run: datetime.fromisoformat(run.record["started"]))


def _own(folder: Path, command: str) -> Path:
    """The folder given with --out: new, empty, or of an earlier run of the same command."""
    if folder.exists() and not folder.is_dir():
        raise Problem(f"--out {folder} is a file; expected a folder")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / _FILE).is_file():
            raise Problem(f"--out {folder} has files that are not from a pace run; choose another folder")
        if (earlier := read_record(folder)["command"]) != command:
            raise Problem(f"--out {folder} is a run of `pace {earlier}`; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _new(name: str) -> Path:
    first = folder = RUNS / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    number = 1
    while folder.exists():
        number += 1
        folder = first.with_name(f"{first.name}-{number}")
    folder.mkdir(parents=True)
    return folder


def _slug(what: str) -> str:
    """The last part of a path, or a name, safe as a file name."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", Path(what).resolve().name).strip("-.")[:40] or "images"


def located(value: Any) -> Any:
    """Full paths, so that a run can be repeated from another folder; names of datasets and models stay."""
    if isinstance(value, (list, tuple)):
        return [located(item) for item in value]
    if not isinstance(value, str) or value in DATASETS or not Path(value).expanduser().exists():
        return value
    return str(Path(value).expanduser().resolve())


def _versions() -> dict[str, str]:
    found = {"pace": __version__, "python": platform.python_version()}
    for package in ("torch", "timm", "transformers"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _device_name(device: torch.device) -> str:
    import torch

    return f"{device}: {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)
