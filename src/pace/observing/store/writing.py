"""Writing a store: shard by shard, each checked, each safe once the index lists it."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from pace.atomic import write_atomically
from pace.observations import Batch, Observations
from pace.observing.store.format import Index, Shard, locked
from pace.observing.store.reading import ObservationStore

SHARD_BYTES = 32 << 20  # what a kill may cost, and what a writer holds in memory
_FLOAT16_MAX = 65504.0


class StoreWriter:
    """Adds batches to a store, new or unfinished; a context manager, one at a time per store.

    Parameters
    ----------
    path
        The folder; created if missing.
    fingerprint
        What the observations are of. A store with another fingerprint is refused, naming the difference.
    total
        The number of images, if known.
    grid, prefix_tokens
        As in `Observations`.
    shard_bytes
        A shard is written as soon as the batches waiting for it reach this size. Shards hold whole batches, so a run
        that resumes continues with the very batches of an uninterrupted one, and its values are the same bit for bit.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        fingerprint: Mapping[str, str],
        total: int | None = None,
        grid: tuple[int, int] | None = None,
        prefix_tokens: int = 0,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.path = Path(path)
        self._index = Index(dict(fingerprint), total, grid, prefix_tokens)
        self._shard_bytes = shard_bytes
        self._waiting: list[dict[str, Tensor]] = []
        self._start = 0  # number of the first image that is waiting
        self._failed = False

    def __enter__(self) -> StoreWriter:
        _refuse_foreign(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(locked(self.path))
            self._open()
            self._lock = stack.pop_all()
        return self

    def _open(self) -> None:
        if (self.path / "index.json").exists():
            found = Index.read(self.path)
            found.check_sizes(self.path)
            _refuse_other(self.path, found, self._index)
            self._index = found if self._index.total is None else replace(found, total=self._index.total)
        self._index.write(self.path)
        listed = {shard.file for shard in self._index.shards}
        for leftover in self.path.glob("shard-*"):
            if leftover.name not in listed:
                leftover.unlink()  # a kill came between this file and the index

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if not self._failed:  # after Ctrl-C or a failing model, what was computed is still written
                self._flush()

    @property
    def gaps(self) -> list[range]:
        """The images still to come. The last range has no known end when the total is unknown."""
        return self._index.gaps()

    def append(self, start: int, batch: Batch, bounds: Tensor | None = None) -> None:
        """Add the images from number `start` on. They are in the store once their shard is full, or at the end.

        `bounds` are the `extremes` of the embeddings, where they are known already.
        """
        bounds = extremes(batch.embeddings) if bounds is None else bounds
        check(start, batch, bounds, self._index.grid, self._index.prefix_tokens)
        narrow = bounds.abs().max() <= _FLOAT16_MAX
        kinds = {"embeddings": torch.float16 if narrow else torch.float32}
        tensors = {
            name: part.detach().to("cpu", kinds.get(name, torch.float32))
            for name, part in batch._asdict().items()
            if part is not None
        }
        if start != self._start + sum(len(part["attention"]) for part in self._waiting):
            self._flush()  # a shard holds consecutive images
        if not self._waiting:
            self._start = start
        self._waiting.append(tensors)
        if sum(tensor.nbytes for part in self._waiting for tensor in part.values()) >= self._shard_bytes:
            self._flush()

    def finish(self, total: int | None = None) -> ObservationStore:
        """Write what is waiting and, if the total was unknown, record it."""
        self._flush()
        if total is not None and self._index.total != total:
            self._index = replace(self._index, total=total)
            self._index.write(self.path)
        return ObservationStore.open(self.path)

    def _flush(self) -> None:
        if not self._waiting:
            return
        # One batch in float32 makes its whole shard float32.
        content = save({name: torch.cat([part[name] for part in self._waiting]) for name in self._waiting[0]})
        images = sum(len(part["attention"]) for part in self._waiting)
        with ThreadPoolExecutor(1, "pace-checksum") as beside:
            crc = beside.submit(zlib.crc32, content)
            shard = Shard(self._start, images, len(content), "")
            try:
                write_atomically(self.path / shard.file, content)
                shard = replace(shard, crc32=f"{crc.result():08x}")
                shards = tuple(sorted([*self._index.shards, shard], key=lambda shard: shard.start))
                index = replace(self._index, shards=shards)
                index.write(self.path)
            except OSError as error:
                self._failed = True
                raise self._not_written(shard, error) from error
        self._index = index
        self._waiting.clear()

    def _not_written(self, shard: Shard, error: OSError) -> OSError:
        done = sum(shard.images for shard in self._index.shards)
        why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
        message = (
            f"cannot write {shard.bytes / 2**20:.1f} MiB to the store: {why}; the {done} images finished before stay, "
            "and the same call goes on from there"
        )
        return OSError(error.errno, message, str(self.path / shard.file))


def extremes(embeddings: Tensor) -> Tensor:
    """(B, J, 2): smallest and largest value of every token. NaN and infinity show in them, so they are all that has to
    be checked: on a GPU that saves the processor most of the work."""
    return torch.stack([embeddings.amin(-1), embeddings.amax(-1)], dim=-1).float()


def check(start: int, batch: Batch, bounds: Tensor, grid: tuple[int, int] | None, prefix_tokens: int) -> None:
    """The checks of `Observations` on the batch from image `start` on; `bounds` are its `extremes`."""
    try:
        Observations(bounds, batch.attention, batch.predictions, grid, prefix_tokens)
    except ValueError as error:
        raise ValueError(f"in the batch from image {start} on: {error}") from error


def _refuse_foreign(folder: Path) -> None:
    if folder.is_dir() and not (folder / "index.json").exists():
        foreign = [file.name for file in folder.iterdir() if file.name != "lock" and not file.name.endswith(".tmp")]
        if foreign:
            raise ValueError(
                f"{folder} is not an observation store (it holds {foreign[0]}); name a new or empty folder"
            )


def _refuse_other(folder: Path, found: Index, wanted: Index) -> None:
    def facts(index: Index) -> dict[str, str]:
        known = {**index.fingerprint, "grid": str(index.grid), "prefix tokens": str(index.prefix_tokens)}
        both = found.total is not None and wanted.total is not None
        return {**known, "number of images": str(index.total)} if both else known

    old, new = facts(found), facts(wanted)
    differs = [
        f"{name} was {old.get(name, 'not given')}, now {new.get(name, 'not given')}"
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]
    if differs:
        raise ValueError(f"{folder} holds other observations: {'; '.join(differs)}. Name another folder for these")
