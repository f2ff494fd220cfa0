"""Checkpoints of a fit: a folder that always holds one complete set of files, whenever the power fails.

``index.json`` says what the set is of, and its number, which is in the names of its files; it is there before they are. The
files of the next set are written beside the old ones; then the index is replaced, which happens whole or not at all; then the
old files are removed. Nothing else in the folder is touched.
"""

from __future__ import annotations

import json
import time
import warnings
import zlib
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pace.atomic import temporary_of, write_atomically
from pace.files import LOCK, DamagedFile, locked, read_json, read_tensors, reading, save_tensors
from pace.fitting.distributed import Team
from pace.observations import Lazy, Observations

FORMAT = "pace-checkpoint-5"
_INDEX = "index.json"
_PATTERN = {"format": FORMAT, "about": dict, "processes": int, "number": int, "removed": bool}
_REMEDY = "remove the folder to begin anew"
_COMPARED = 32  # images that stand for all when data are compared
_Facts = dict[str, Any]


class Saved(NamedTuple):
    """How far a fit had come: what all processes share, and what this one has for itself."""

    common: dict[str, Tensor]
    own: dict[str, Tensor]


class HowFar(NamedTuple):
    """What a checkpoint has behind it: epochs (with minibatches, these), then steps of refining."""

    done: int
    refined: int


def how_far(folder: str | PathLike[str]) -> HowFar | None:
    """For people to read, whatever the checkpoint is of; None where there is none, or a damaged one."""
    folder = Path(folder)
    try:
        index = read_json(folder / _INDEX, _PATTERN | {"removed": False}, _REMEDY)
        common, _ = read_tensors(_file_in(folder, "common", index["number"]), dict, _REMEDY)
        return HowFar(len(common["bounds"]), len(common["refinement"]))
    except (OSError, DamagedFile, KeyError):
        return None


class Checkpoint:
    """Where a fit writes how far it has come, at most every so many seconds."""

    def __init__(self, folder: str | PathLike[str], every: float, about: _Facts, team: Team):
        self._folder, self._every, self._about, self._team = Path(folder), every, about, team
        self._last = time.monotonic()
        self._number = 0
        self._stack = ExitStack()
        if not every >= 0:
            raise ValueError(f"checkpoint_every: expected seconds, 0 or more; found {every!r}")
        if not self._folder.parent.is_dir():
            raise FileNotFoundError(f"no folder {self._folder.parent} to keep the checkpoint {self._folder.name} in")
        if self._folder.exists() and not self._folder.is_dir():
            raise ValueError(f"checkpoint: {self._folder} is a file; expected a folder, which is made if it is missing")

    def __enter__(self) -> Checkpoint:
        """Keep other fits out of the folder."""
        problem = None
        if self._team.rank == 0:
            try:
                self._folder.mkdir(exist_ok=True)
                self._stack.enter_context(locked(self._folder, "another fit keeps its checkpoint here"))
            except OSError as error:
                problem = error
        if any(self._team.gathered(problem is not None)):
            raise problem or BlockingIOError("the first process cannot use the checkpoint's folder")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        if self._team.rank == 0:
            with suppress(OSError):  # there is something in it
                self._folder.rmdir()

    def reading(self) -> AbstractContextManager[None]:
        return reading(self._folder, _REMEDY)

    def load(self) -> Saved | None:
        """What an earlier fit left, if there is anything. A checkpoint of another fit is refused."""
        index_file = self._folder / _INDEX
        present = self._team.gathered(index_file.is_file())
        if not any(present):
            begun = {LOCK, temporary_of(index_file).name}  # what a kill leaves before there is an index
            if foreign := [file.name for file in self._folder.glob("*") if file.name not in begun]:
                raise ValueError(
                    f"{self._folder} holds {foreign[0]}, which is not of a checkpoint; choose another folder"
                )
            return None
        if not all(present):
            raise ValueError(f"not every process finds the checkpoint {self._folder}; keep it where all can read it")
        index = read_json(index_file, _PATTERN, _REMEDY)
        self._number = index["number"]
        if index["removed"]:
            return None
        self._refuse_other(index["about"], index["processes"])
        saved = Saved(self._read("common"), self._read(f"own-{self._team.rank}"))
        if self._team.rank == 0:  # what a kill left
            _discard(self._folder, self._number - 1, self._team.size)
        return saved

    def _refuse_other(self, found: _Facts, processes: int) -> None:
        if processes != self._team.size:
            raise ValueError(
                f"{self._folder} is a checkpoint of {processes} processes; resume it with as many, not {self._team.size}"
            )
        for name, here in self._about.items():
            if found.get(name) != here:
                raise ValueError(
                    f"{self._folder} is a checkpoint of another fit: {name} was {found.get(name)!r:.80} and is {here!r:.80}; "
                    "remove it to begin anew, or choose another folder"
                )

    def _read(self, name: str) -> dict[str, Tensor]:
        return read_tensors(_file_in(self._folder, name, self._number), dict, _REMEDY)[0]

    def due(self) -> bool:
        """Whether it is time, by the clock of the first process. All of them have to ask."""
        late = time.monotonic() - self._last >= self._every
        return bool(self._team.gathered(late)[0])

    def write(self, common: dict[str, Tensor], own: dict[str, Tensor]) -> None:
        """All processes together. Killed at any moment, either the set before this one is left or this one.

        Where it cannot be written, as on a full disk, the fit goes on with the set before this one, and a warning.
        """
        before, self._number = self._number, self._number + 1
        problem, failed = None, False
        for step in (self._begin, partial(self._put, f"own-{self._team.rank}", own), partial(self._end, common)):
            try:
                step()
            except OSError as error:
                problem = error
            if failed := any(self._team.gathered(problem is not None)):
                break
        if self._team.rank == 0:
            _discard(self._folder, self._number if failed else before, self._team.size)
        if failed:
            self._number = before
        if problem is not None:
            why = f"{problem.filename}: {problem.strerror}"
            warnings.warn(f"{why}; the fit goes on, and this is not kept if it is stopped", UserWarning, stacklevel=5)
        self._last = time.monotonic()

    def _begin(self) -> None:
        """An index without a set, for files that are not there yet."""
        if self._team.rank == 0 and self._number == 1:
            self._list(0, removed=True)

    def _end(self, common: dict[str, Tensor]) -> None:
        """All processes have written what is their own."""
        if self._team.rank == 0:
            self._put("common", common)
            self._list(self._number, removed=False)

    def _list(self, number: int, removed: bool) -> None:
        index = {"format": FORMAT, "about": self._about, "processes": self._team.size, "number": number}
        write_atomically(self._folder / _INDEX, json.dumps(index | {"removed": removed}).encode())

    def _put(self, name: str, tensors: dict[str, Tensor]) -> None:
        save_tensors(_file_in(self._folder, name, self._number), tensors, {})

    def remove(self) -> None:
        """The fit is done. All processes together."""
        self._team.gathered(0)  # where nothing was left to do, the others may still be reading it
        if self._team.rank == 0:
            remove(self._folder)


def remove(folder: str | PathLike[str]) -> None:
    """Delete a checkpoint. Its index says so first, so that nothing half-removed can be resumed; other files stay."""
    folder = Path(folder)
    try:
        index = read_json(folder / _INDEX, _PATTERN, _REMEDY)
        write_atomically(folder / _INDEX, json.dumps(index | {"removed": True}).encode())
        for number in (-1, 0, 1):  # what a kill left of the set before it, and of the next one
            _discard(folder, index["number"] + number, index["processes"])
        (folder / _INDEX).unlink()
        folder.rmdir()
    except (OSError, DamagedFile):  # it is not there, or files of others are; what was learned matters more
        return


def _discard(folder: Path, number: int, processes: int) -> None:
    """The files of one set, and what an interrupted write left of them."""
    for name in ("common", *(f"own-{rank}" for rank in range(processes))):
        file = _file_in(folder, name, number)
        for one in (file, temporary_of(file)):
            with suppress(OSError):
                one.unlink()


def _file_in(folder: Path, name: str, number: int) -> Path:
    return folder / f"{name}-{number}.safetensors"


def likeness(observations: Observations | None) -> str | None:
    """Short hex that differs for other data, by the shape and some of the images."""
    if observations is None:
        return None
    if isinstance(observations, Lazy):
        return observations.identity()
    some = np.unique(np.linspace(0, len(observations) - 1, _COMPARED).astype(np.int64))
    value = zlib.crc32(f"{observations.shape} {observations.n_classes}".encode())
    for tensor in observations.batch(some):
        if tensor is not None:
            value = zlib.crc32(tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes(), value)
    return f"{value:08x}"
