"""The files of a store: the index, the shards, and the lock of the one writer."""

from __future__ import annotations

import errno
import json
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pace.atomic import write_atomically

_FORMAT, _VERSION = "pace-observations", 1


@dataclass(frozen=True)
class Shard:
    """One finished file: `images` consecutive images from number `start`."""

    start: int
    images: int
    bytes: int
    crc32: str

    @property
    def file(self) -> str:
        return f"shard-{self.start:09d}.safetensors"

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
        content = {"format": _FORMAT, "version": _VERSION, **vars(self), "shards": [vars(s) for s in self.shards]}
        write_atomically(folder / "index.json", json.dumps(content, indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> Index:
        file = folder / "index.json"
        if not file.is_file():
            raise FileNotFoundError(f"{folder} is not an observation store: it has no index.json")
        try:
            content = json.loads(file.read_bytes())
            found = content.pop("format"), content.pop("version")
            if found != (_FORMAT, _VERSION):
                raise ValueError(f"expected {_FORMAT!r} in version {_VERSION}; found {found[0]!r} in {found[1]!r}")
            grid = content.pop("grid")
            shards = tuple(Shard(**shard) for shard in content.pop("shards"))
            return cls(**content, grid=None if grid is None else (int(grid[0]), int(grid[1])), shards=shards)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from error

    def gaps(self) -> list[range]:
        """Images that are in no shard; the last gap has no known end when the total is unknown."""
        edges = [0, *(edge for shard in self.shards for edge in (shard.start, shard.stop))]
        edges.append(sys.maxsize if self.total is None else self.total)
        return [range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]

    def check_sizes(self, folder: Path) -> None:
        """Refuse a store with a missing or truncated shard, without reading the shards."""
        for shard in self.shards:
            file = folder / shard.file
            if not file.is_file():
                raise damaged(file, "it is missing")
            if file.stat().st_size != shard.bytes:
                raise damaged(file, f"it has {file.stat().st_size} bytes instead of {shard.bytes}")


def checksum(file: Path) -> str | None:
    """CRC-32 of the file's content; None if there is no such file."""
    if not file.is_file():
        return None
    value = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def damaged(file: Path, what: str) -> ValueError:
    return ValueError(
        f"{file} is damaged: {what}. ObservationStore.repair(path) removes damaged shards and keeps the rest; "
        "the extraction then fills them in again"
    )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One writing process at a time. The lock ends with the process, however that ends, and child processes lack it."""
    if sys.platform == "win32":  # has no such locks
        yield
        return
    import fcntl

    with (folder / "lock").open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            message = "another process is writing to this store; wait for it to finish"
            raise BlockingIOError(errno.EAGAIN, message, str(folder)) from error
        yield
