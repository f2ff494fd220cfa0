"""Writing a store: shard by shard, each checked, each safe once the index names it."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pace.atomic import write_atomically
from pace.observations import Batch, Observations
from pace.observing.store.format import Index, Lock, Shard, layout_of, safetensors_pieces
from pace.observing.store.reading import ObservationStore, trusted

SHARD_BYTES = 32 << 20  # what a kill may cost, and what a writer holds in memory
_FLOAT16_MAX = 65504.0


class StoreWriter:
    """Adds batches to a store, new or unfinished; a context manager, one at a time per store.

    Parameters
    ----------
    path
        The folder; made when missing.
    fingerprint
        What the observations are of. A store with another fingerprint is refused, naming what differs.
    total
        The number of images, when it is known.
    grid, prefix_tokens
        As in `Observations`.
    shard_bytes
        A shard is written as soon as the batches waiting for it reach this size. Shards hold whole batches, so a run
        that resumes goes on with the very batches of an uninterrupted one, and its values are the same bit for bit.
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
        self._shard_bytes = shard_bytes
        self._waiting: list[dict[str, npt.NDArray[Any]]] = []
        self._start = 0  # the first image waiting
        self._shapes: dict[str, tuple[int, ...]] = {}  # of one image; empty before the first
        self._failed = False
        _refuse_foreign(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = Lock(self.path)
        try:
            self._index = self._begin(Index(dict(fingerprint), total, grid, prefix_tokens))
        except BaseException:
            self._lock.release()
            raise

    def _begin(self, index: Index) -> Index:
        if (self.path / "index.json").exists():
            found = Index.read(self.path)
            found.refuse_damage(self.path)
            _refuse_other(self.path, found, index)
            index = found if index.total is None else replace(found, total=index.total)
        index.write(self.path)
        if index.shards:
            layout = layout_of(self.path / index.shards[0].file)
            self._shapes = {name: shape[1:] for name, (_, shape, _) in layout.items()}
        listed = {shard.file for shard in index.shards}
        for leftover in self.path.glob("shard-*"):
            if leftover.name not in listed:
                leftover.unlink()  # a kill came between this file and the index
        return index

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self._failed:  # after Ctrl-C or a failing model, what was computed is still kept
                self._flush()
        finally:
            self._lock.release()

    @property
    def gaps(self) -> list[range]:
        """The images still to come. The last range has no known end when the total is not known."""
        return self._index.gaps()

    def append(self, start: int, batch: Batch, bounds: Tensor | None = None) -> None:
        """Add the images from number `start` on. They are in the store once their shard is full, or at the end.

        The batch is copied: its memory may be used again.
        `bounds` are the `extremes` of the embeddings, where they are known already.
        """
        bounds = extremes(batch.embeddings) if bounds is None else bounds
        check(start, batch, bounds, self._index.grid, self._index.prefix_tokens)
        narrow = bounds.abs().max() <= _FLOAT16_MAX
        arrays = {
            "embeddings": _array(batch.embeddings, torch.float16 if narrow else torch.float32),
            "attention": _array(batch.attention, torch.float32),
        }
        if batch.predictions is not None:
            arrays["predictions"] = _array(batch.predictions, torch.float32)
        shapes = {name: array.shape[1:] for name, array in arrays.items()}
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            raise ValueError(f"images from {start} on have shapes {shapes}, those before have {self._shapes}")
        if start != self._start + sum(len(part["attention"]) for part in self._waiting):
            self._flush()
        stop = start + len(arrays["attention"])
        if not any(gap.start <= start and stop <= gap.stop for gap in self.gaps):
            raise ValueError(f"images {start} to {stop - 1} are in {self.path} already or beyond its end")
        if not self._waiting:
            self._start = start
        self._waiting.append(arrays)
        if sum(array.nbytes for part in self._waiting for array in part.values()) >= self._shard_bytes:
            self._flush()

    def finish(self, total: int | None = None) -> ObservationStore:
        """Write what waits and, when the total was not known, record it."""
        self._flush()
        if total is not None and self._index.total != total:
            self._index = replace(self._index, total=total)
            self._index.write(self.path)
        return ObservationStore.open(self.path)

    def _flush(self) -> None:
        if not self._waiting:
            return
        pieces = safetensors_pieces(self._waiting)
        count = sum(len(part["attention"]) for part in self._waiting)
        size = sum(len(piece) for piece in pieces)
        file = self.path / f"shard-{self._start:09d}.safetensors"
        try:
            with ThreadPoolExecutor(1, "pace-checksum") as beside:
                crc = beside.submit(reduce, lambda crc, piece: zlib.crc32(piece, crc), pieces, 0)
                write_atomically(file, *pieces)
            shard = Shard(file.name, self._start, count, size, f"{crc.result():08x}")
            shards = tuple(sorted([*self._index.shards, shard], key=lambda shard: shard.start))
            index = replace(self._index, shards=shards)
            index.write(self.path)
        except OSError as error:
            self._failed = True
            kept = sum(shard.images for shard in self._index.shards)
            why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
            raise OSError(
                error.errno,
                f"cannot write {size / 2**20:.1f} MiB to the store: {why}; the {kept} images finished before "
                "stay, and the same call goes on from there",
                str(file),
            ) from error
        self._index = index
        self._waiting.clear()


def extremes(embeddings: Tensor) -> Tensor:
    """(B, J, 2): smallest and largest value of every token. NaN and infinity survive in them, so they are all that
    needs to be checked."""
    return torch.stack([embeddings.amin(-1), embeddings.amax(-1)], dim=-1).float()


def check(start: int, batch: Batch, bounds: Tensor, grid: tuple[int, int] | None, prefix_tokens: int) -> None:
    """The checks that `Observations` makes, on the batch from image `start` on; `bounds` are its `extremes`."""
    fields = (bounds, batch.attention, batch.predictions, grid, prefix_tokens)
    try:
        trusted(*fields)  # the shapes
        if not _surely_right(*fields[:3]):
            Observations(*fields)  # says what is wrong, and where
    except ValueError as error:
        raise ValueError(f"in the batch from image {start} on: {error}") from error


def _surely_right(bounds: Tensor, attention: Tensor, predictions: Tensor | None) -> bool:
    """What nearly every batch passes, in a twentieth of the time: the model waits for Python's lock meanwhile.

    NaN passes no comparison, and what is between two finite values is finite.
    """
    if any(part is not None and part.dtype != torch.float32 for part in (bounds, attention, predictions)):
        return False
    values, weights = bounds.numpy(force=True), attention.numpy(force=True)
    right = values.min() > -np.inf and values.max() < np.inf
    right = right and weights.min() >= 0 and weights.max() < np.inf and weights.sum(1).min() > 0
    if predictions is not None:
        shares = predictions.numpy(force=True)
        right = right and shares.min() >= 0 and np.abs(shares.sum(1) - 1).max() < 0.01
    return bool(right)


def _array(tensor: Tensor, dtype: torch.dtype) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = torch.empty(tensor.shape, dtype=dtype, device="cpu").copy_(tensor.detach()).numpy()
    return array


def _refuse_foreign(folder: Path) -> None:
    if folder.is_dir() and not (folder / "index.json").exists():
        foreign = [file.name for file in folder.iterdir() if file.name != "lock" and not file.name.endswith(".tmp")]
        if foreign:
            raise ValueError(
                f"{folder} is not an observation store (it holds {foreign[0]}); name a new or empty folder"
            )


def _refuse_other(folder: Path, found: Index, wanted: Index) -> None:
    def facts(index: Index) -> dict[str, str]:
        return {**index.fingerprint, "grid": str(index.grid), "prefix tokens": str(index.prefix_tokens)}

    old, new = facts(found), facts(wanted)
    if found.total is not None and wanted.total is not None:
        old["number of images"], new["number of images"] = str(found.total), str(wanted.total)
    differs = [
        f"{name} was {old.get(name, 'not given')}, now {new.get(name, 'not given')}"
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]
    if differs:
        raise ValueError(f"{folder} holds other observations: {'; '.join(differs)}. Name another folder for these")
