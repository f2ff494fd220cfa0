"""Run folders: a command's files, and ``run.json`` with its options, versions and results."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import time
import warnings
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
from pace.files import LOCK, DamagedFile, expect, locked, read_json, reading

if TYPE_CHECKING:
    import torch
    import typer

FORMAT = "pace-run-1"
_FILE = "run.json"
_PATTERN = {"format": FORMAT, "command": str, "status": str, "started": str, "configuration": dict, "results": dict}
_IMAGES = {"images": str | None, "data_root": str | None, "split": str | None, "limit": int | None,
           "skip_unreadable": bool, "max_pixels": int | None, "seed": int, "fingerprint": str | None}  # fmt: skip
_MODEL = {"name": str | None, "architecture": str | None, "image_size": int | None, "normalize": str | None,
          "layer": int | str | list | None, "attention_layer": int | None, "count_cls": bool, "head": str | None,
          "fingerprint": str, "class_names": list | None}  # fmt: skip
_REMEDY = "delete its folder, and run the command again"
_NO_MATTER = ("device", "memory", "batch_size", "checkpoint_every")  # options that change rounding at most
_PARTS = {"model": "weights", "images": "images", "fit": "fit"}  # of a record that its results depend on
_ADDS = ("extract", "benchmark")  # commands that compute only what their folder lacks
_NOT_RECORDED = ("out", "config", "json", "debug", "every", "keep")  # options that do not change the results
# Options that may name a file or folder.
_PATHS = {"images", "data_root", "model", "moved", "backbone", "classes"}
_PATHS |= {"fit_run", "observations", "evaluation", "pictures", "add"}
RUNS = Path("runs")

GENERATED = ("color", "birds")  # the names that pace.images.open_images knows, without and with a folder of their own
DATASETS = (*GENERATED, "flower", "cars", "cub")


class Invocation(NamedTuple):
    """A call of `pace`: its arguments, its command's options by parameter name, and the warnings so far."""

    arguments: list[str]
    options: dict[str, str]
    warnings: list[str]


class Finished(Exception):
    """Nothing is left to do: the folder has the results of the same command, which are here too."""

    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__(f"{record['folder']} has the results of this very command; nothing was done")
        self.record = record


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
    with locked(folder, "another pace command writes to this folder"):
        yield from _recorded(ctx, folder, device, about)


def _recorded(ctx: typer.Context, folder: Path, device: torch.device | None, about: dict[str, Any]) -> Iterator[Run]:
    began = time.monotonic()
    configuration = _configuration(ctx)
    record = {
        "format": FORMAT,
        "command": str(ctx.info_name),
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
        "results": earlier_results(ctx, folder, about),  # they stay until there are others
        "warnings": ctx.obj.warnings,
    }
    if record["results"] and (model := read_record(folder).get("model")):
        record["model"] = model  # of which they are
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
    record: dict[str, Any] = read_json(file, _PATTERN, _REMEDY)
    with reading(file, _REMEDY):
        datetime.fromisoformat(record["started"])
        observed = record["command"] in ("fit", "extract")
        if "images" in record or observed:
            expect(record["images"], _IMAGES, "images")
        if observed and ("model" in record or record["results"]):  # known once the images were observed
            expect(record["model"], _MODEL, "model")
    return record


def _configuration(ctx: typer.Context) -> dict[str, Any]:
    found = {name: value for name, value in ctx.params.items() if name not in _NOT_RECORDED}
    return found | {name: located(found[name]) for name in _PATHS & found.keys()}


def earlier_results(ctx: typer.Context, folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Those of an earlier run in this folder, of which nothing may be lost: other options, images or models are refused,
    and if it is finished there is nothing left to do."""
    if not (folder / _FILE).is_file():
        return {}
    earlier = read_record(folder)
    results: dict[str, Any] = earlier["results"]
    if not results or earlier["command"] == "benchmark":
        return results

    def facts(record: dict[str, Any]) -> dict[str, Any]:
        own = {name: value for name, value in record["configuration"].items() if name not in _NO_MATTER}
        return own | {f"the {name}": record.get(part) for name, part in _PARTS.items()}

    old, new = facts(earlier), facts(json.loads(as_json({"configuration": _configuration(ctx), **about})))
    for name in sorted(old.keys() | new.keys(), key=lambda name: name.startswith("the ")):
        if old.get(name) != new.get(name):
            differs = f"{ctx.obj.options.get(name, name)} was {old.get(name)}, now {new.get(name)}"
            differs = f"{name} differ" + "s" * (name != "the images") if name.startswith("the ") else differs
            raise Problem(f"--out {folder} has other results ({differs}); choose another folder, or delete it first")
    if earlier["status"] == "finished" and earlier["command"] not in _ADDS:
        raise Finished(earlier)
    return results


def open_run(path: str, *commands: str) -> Run:
    folder = Path(path).expanduser()
    record = read_record(folder)
    if record["command"] not in commands:
        expected = " or ".join(f"`pace {command}`" for command in commands)
        raise Problem(f"{path} is a run of `pace {record['command']}`; expected one of {expected}")
    return Run(folder if folder.is_dir() else folder.parent, record)


def all_runs(command: str | None = None, folder: Path = RUNS) -> list[Run]:
    """The runs of this command in a folder that have results, or all there are, oldest first."""
    found = []
    for file in folder.glob(f"*/{_FILE}"):
        try:
            run = Run(file.parent, read_record(file))
        except Problem:
            continue
        except DamagedFile as error:
            warnings.warn(f"left out: {error}", stacklevel=2)
            continue
        if command is None or (run.record["command"] == command and run.record["results"]):
            found.append(run)
    return sorted(found, key=lambda run: datetime.fromisoformat(run.record["started"]))


def _own(folder: Path, command: str) -> Path:
    """The folder given with --out: new, empty, or of an earlier run of the same command."""
    if folder.exists() and not folder.is_dir():
        raise Problem(f"--out {folder} is a file; expected a folder")
    begun = {LOCK, _FILE + ".tmp"}  # what a kill leaves of a run that had just begun
    if folder.is_dir() and any(file.name not in begun for file in folder.iterdir()):
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
    if not isinstance(value, str) or value in DATASETS or not os.path.exists(os.path.expanduser(value)):
        return value
    return os.path.realpath(os.path.expanduser(value))


def _versions() -> dict[str, str]:
    found = {"pace": __version__, "python": platform.python_version()}
    for package in ("torch", "timm", "transformers"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _device_name(device: torch.device) -> str:
    import torch

    return f"{device}: {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)
