"""Checkpoints of a fit: a folder that always holds one complete set of files, whenever the power fails.

``index.json`` names the set: what it is of, and the checksum of every file. The files of the next set are written beside the
old ones; then the index is replaced, which happens whole or not at all; then the old files are removed.
"""

from __future__ import annotations

import json
import re
import time
import zlib
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from pace.atomic import write_atomically
from pace.fitting.distributed import Team
from pace.observations import Lazy, Observations

FORMAT = "pace-checkpoint-4"
_INDEX = "index.json"
_FILES = re.compile(r"(index\.json|(common|own-\d+)-\d+\.safetensors)(\.tmp)?")  # .tmp: of an interrupted write
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
    try:
        index = json.loads((Path(folder) / _INDEX).read_bytes())
        with safe_open(_file_in(Path(folder), "common", index["number"]), "pt") as common:
            done, refined = (common.get_slice(name).get_shape()[0] for name in ("bounds", "refinement"))
            return HowFar(done, refined)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        return None


class Checkpoint:
    """Where a fit writes how far it has come, at most every so many seconds."""

    def __init__(self, folder: str | PathLike[str], every: float, about: _Facts, team: Team):
        self._folder, self._every, self._about, self._team = Path(folder), every, about, team
        self._last = time.monotonic()
        self._number = 0
        if not every >= 0:
            raise ValueError(f"checkpoint_every: expected seconds, 0 or more; found {every!r}")
        if not self._folder.parent.is_dir():
            raise FileNotFoundError(f"no folder {self._folder.parent} to keep the checkpoint {self._folder.name} in")
        if self._folder.exists() and not self._folder.is_dir():
            raise ValueError(f"checkpoint: {self._folder} is a file; expected a folder, which is made if it is missing")

    def load(self) -> Saved | None:
        """What an earlier fit left, if there is anything. A checkpoint of another fit is refused."""
        index_file = self._folder / _INDEX
        present = self._team.gathered(index_file.is_file())
        if not any(present):
            foreign = [p.name for p in self._folder.glob("*") if not _FILES.fullmatch(p.name)]
            if foreign:
                raise ValueError(
                    f"{self._folder} holds {foreign[0]}, which is not of a checkpoint; choose another folder"
                )
            return None
        if not all(present):
            raise ValueError(f"not every process finds the checkpoint {self._folder}; keep it where all can read it")
        try:
            index = json.loads(index_file.read_bytes())
            if index["format"] != FORMAT:
                raise ValueError(f"{self._folder} has format {index['format']}; this version reads {FORMAT}")
            self._refuse_other(index["about"], index["processes"])
            self._number = int(index["number"])
            common, own = index["common"], index["own"][self._team.rank]
            return Saved(self._read("common", common), self._read(f"own-{self._team.rank}", own))
        except (KeyError, TypeError, AttributeError, IndexError, json.JSONDecodeError, UnicodeDecodeError):
            raise ValueError(self._damaged(_INDEX)) from None

    def _refuse_other(self, found: _Facts, processes: int) -> None:
        if processes != self._team.size:
            raise ValueError(
                f"{self._folder} is a checkpoint of {processes} processes; resume it with as many, not {self._team.size}"
            )
        for name, here in self._about.items():
            if found.get(name) != here:
                raise ValueError(
                    f"{self._folder} is a checkpoint of another fit: {name} was {found.get(name)!r} and is {here!r}; "
                    "remove it to begin anew, or choose another folder"
                )

    def _read(self, name: str, checksum: int) -> dict[str, Tensor]:
        file = _file_in(self._folder, name, self._number)
        with suppress(OSError, SafetensorError):
            content = file.read_bytes()
            if zlib.crc32(content) == checksum:
                return load(content)
        raise ValueError(self._damaged(file.name))

    def _damaged(self, what: str) -> str:
        return f"the checkpoint {self._folder} is damaged ({what}); remove it to begin anew"

    def due(self) -> bool:
        """Whether it is time, by the clock of the first process. All of them have to ask."""
        late = time.monotonic() - self._last >= self._every
        return bool(self._team.gathered(late)[0])

    def write(self, common: dict[str, Tensor], own: dict[str, Tensor]) -> None:
        """All processes together. Killed at any moment, either the set before this one is left or this one."""
        self._folder.mkdir(exist_ok=True)
        before, self._number = self._number, self._number + 1
        ours = self._put(f"own-{self._team.rank}", own)
        checksums = self._team.gathered(ours)  # all are on the disk when this returns
        if self._team.rank == 0:
            index = {"format": FORMAT, "about": self._about, "processes": self._team.size, "number": self._number,
                     "common": self._put("common", common), "own": checksums}  # fmt: skip
            write_atomically(self._folder / _INDEX, json.dumps(index).encode())
            for name in ("common", *(f"own-{rank}" for rank in range(self._team.size))):
                _file_in(self._folder, name, before).unlink(missing_ok=True)
        self._last = time.monotonic()

    def _put(self, name: str, tensors: dict[str, Tensor]) -> int:
        content = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        write_atomically(_file_in(self._folder, name, self._number), content)
        return zlib.crc32(content)

    def remove(self) -> None:
        """The fit is done. All processes together."""
        self._team.gathered(0)  # where nothing was left to do, the others may still be reading it
        if self._team.rank == 0:
            remove(self._folder)


def remove(folder: str | PathLike[str]) -> None:
    """Delete a checkpoint. The index goes first, so that nothing half-removed can be resumed; other files stay."""
    folder = Path(folder)
    if not folder.is_dir():
        return
    (folder / _INDEX).unlink(missing_ok=True)
    for file in folder.iterdir():
        if _FILES.fullmatch(file.name) and file.is_file():
            file.unlink()
    with suppress(OSError):  # somebody else's files are in it
        folder.rmdir()


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
