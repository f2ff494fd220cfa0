"""What lies in a store's folder: the index, shards as safetensors files, and the lock of the one writer."""

from __future__ import annotations

import errno
import json
import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from pace.atomic import write_atomically

_FORMAT, _VERSION = "pace-observations", 1
_DTYPES: dict[str, np.dtype[Any]] = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4")}  # safetensors' names


@dataclass(frozen=True)
class Shard:
    """One finished file: `images` consecutive images from number `start`."""

    file: str
    start: int
    images: int
    bytes: int
    crc32: str

    @property
    def stop(self) -> int:
        return self.start + self.images


@dataclass(frozen=True)
class Index:
    fingerprint: dict[str, str]
    total: int | None
    grid: tuple[int, int] | None
    prefix_tokens: int
    shards: tuple[Shard, ...] = ()

    def write(self, folder: Path) -> None:
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "fingerprint": self.fingerprint,
            "total": self.total,
            "grid": self.grid,
            "prefix_tokens": self.prefix_tokens,
            "shards": [vars(shard) for shard in self.shards],
        }
        write_atomically(folder / "index.json", json.dumps(content, indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> Index:
        file = folder / "index.json"
        if not file.is_file():
            raise FileNotFoundError(f"{folder} is not an observation store: it has no index.json")
        try:
            content = json.loads(file.read_bytes())
            if content["format"] != _FORMAT:
                raise ValueError(f"it is in the format {content['format']!r}, not {_FORMAT!r}")
            if content["version"] > _VERSION:
                raise ValueError(f"it is of version {content['version']}, this release reads up to {_VERSION}")
            shards = tuple(Shard(**shard) for shard in content["shards"])
            grid = None if content["grid"] is None else (int(content["grid"][0]), int(content["grid"][1]))
            return cls(content["fingerprint"], content["total"], grid, content["prefix_tokens"], shards)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from error

    def gaps(self) -> list[range]:
        """Images that no shard holds; the last gap has no known end when the total is not known."""
        edges = [0, *(edge for shard in self.shards for edge in (shard.start, shard.stop))]
        edges.append(sys.maxsize if self.total is None else self.total)
        return [range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]

    def refuse_damage(self, folder: Path) -> None:
        """A look at the size of every shard, without reading it."""
        for shard in self.shards:
            file = folder / shard.file
            if not file.is_file():
                raise ValueError(damaged(file, "it is missing"))
            if file.stat().st_size != shard.bytes:
                raise ValueError(damaged(file, f"it has {file.stat().st_size} bytes instead of {shard.bytes}"))


def safetensors_pieces(parts: Sequence[Mapping[str, npt.NDArray[Any]]]) -> list[bytes | memoryview]:
    """The parts, one after the other, as a safetensors file in pieces; no value is copied that need not be.

    The library would copy a shard three times over. A file is a length, a JSON header and raw data.
    """
    header: dict[str, Any] = {}
    data: list[memoryview] = []
    offset = 0
    for name in sorted(parts[0], key="embeddings".__eq__):  # last, since float16 could misalign what came behind it
        dtype = np.result_type(*(part[name].dtype for part in parts))  # one wide batch widens the shard
        arrays = [np.ascontiguousarray(part[name], dtype) for part in parts]
        data += [array.data.cast("B") for array in arrays]
        end = offset + sum(array.nbytes for array in arrays)
        shape = [sum(len(array) for array in arrays), *arrays[0].shape[1:]]
        header[name] = {"dtype": f"F{8 * dtype.itemsize}", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # keeps the data aligned
    return [len(encoded).to_bytes(8, "little"), encoded, *data]


def layout_of(file: Path) -> dict[str, tuple[np.dtype[Any], tuple[int, ...], int]]:
    """Type, shape and place in the file of every tensor."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > 1 << 20:
                raise ValueError("no header")
            header = json.loads(stream.read(size))
        return {
            name: (_DTYPES[tensor["dtype"]], tuple(tensor["shape"]), 8 + size + tensor["data_offsets"][0])
            for name, tensor in header.items()
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(damaged(file, "it has no safetensors header")) from error


def checksum(file: Path) -> str | None:
    if not file.is_file():
        return None
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def damaged(file: Path, what: str) -> str:
    return (
        f"{file} is damaged: {what}. ObservationStore.repair(path) takes damaged shards out and keeps the rest; "
        "the extraction then fills them in again"
    )


class Lock:
    """Be the only writer. The lock belongs to the open file, so it ends with the process however that ends."""

    _held: ClassVar[set[int]] = set()  # open files; children must let go of them, or they would hold the lock on

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
        try:
            _lock_file(self._file)
        except OSError as error:
            os.close(self._file)
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
                raise
            raise BlockingIOError(
                errno.EAGAIN, "somebody else is writing to this store; wait for it", str(folder)
            ) from None
        self._held.add(self._file)

    def release(self) -> None:
        self._held.discard(self._file)
        _lock_file(self._file, unlock=True)  # also where a child has not let go yet
        os.close(self._file)

    @classmethod
    def let_go(cls) -> None:
        for file in cls._held:
            os.close(file)
        cls._held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Lock.let_go)


def _lock_file(file: int, unlock: bool = False) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(file, msvcrt.LK_UNLCK if unlock else msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN if unlock else fcntl.LOCK_EX | fcntl.LOCK_NB)
