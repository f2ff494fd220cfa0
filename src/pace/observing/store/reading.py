"""Reading a store: the finished images, one batch at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pace.observations import ArrayLike, Observations
from pace.observing.store.format import Index, Lock, Shard, checksum, damaged, layout_of


class StoredArray:
    """Rows of one tensor of a store, read when they are asked for.

    Slices, index arrays and masks give a smaller `StoredArray` without reading; ``numpy.asarray`` or a single
    integer reads. Files are mapped for the time of a read only, so thousands of shards need no open files.
    """

    def __init__(
        self, folder: Path, shards: Sequence[Shard], name: str, row: tuple[int, ...], dtype: npt.DTypeLike
    ) -> None:
        self._folder, self._shards, self._name = folder, shards, name
        self._ends = np.asarray([shard.stop for shard in shards])
        self._row, self.dtype = row, np.dtype(dtype)
        self._rows: range | npt.NDArray[np.intp] = range(shards[-1].stop)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self._rows), *self._row)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: int | slice | Sequence[int] | npt.NDArray[Any]) -> Any:
        if isinstance(key, tuple):
            raise TypeError("a stored array takes one index, over images; read it with numpy.asarray to index further")
        if isinstance(key, (int, np.integer)):
            row = self._rows[int(key)]
            return self._read(range(int(row), int(row) + 1))[0]
        part = object.__new__(StoredArray)
        part.__dict__.update(self.__dict__)
        if isinstance(key, slice):
            part._rows = self._rows[key]
        else:
            part._rows = _chosen(self._rows, np.asarray(key))
        return part

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("a stored array is read from disk: it cannot be had without a copy")
        array = self._read(self._rows)
        return array if dtype is None else array.astype(dtype, copy=False)

    def _read(self, rows: range | npt.NDArray[np.intp]) -> npt.NDArray[Any]:
        array = np.empty((len(rows), *self._row), self.dtype)
        # Each shard is opened once and read from its beginning to its end, whatever the order asked for.
        wanted = np.asarray(rows, dtype=np.intp)
        order = np.argsort(wanted, kind="stable")
        wanted = wanted[order]
        number = np.searchsorted(self._ends, wanted, side="right")
        runs = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(wanted)]
        for first, last in pairwise(runs if len(wanted) else []):
            shard = self._shards[number[first]]
            local = wanted[first:last] - shard.start
            tensor = self._map(shard)
            if isinstance(rows, range) and rows.step == 1:
                array[first:last] = tensor[local[0] : local[0] + len(local)]
            else:
                array[order[first:last]] = tensor[local]
        return array

    def _map(self, shard: Shard) -> npt.NDArray[Any]:
        file = self._folder / shard.file
        dtype, shape, offset = layout_of(file)[self._name]
        try:
            return np.memmap(file, dtype, "r", offset, shape)
        except ValueError as error:  # shorter than its header says
            raise ValueError(damaged(file, "it is truncated")) from error


def _chosen(rows: range | npt.NDArray[np.intp], index: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Some rows, by an index array or a mask; of a range without writing all of it down, which may be of millions."""
    index = index if len(index) else index.astype(np.intp)
    if not isinstance(rows, range):
        chosen: npt.NDArray[np.intp] = rows[index]
        return chosen
    if index.dtype == bool:
        if index.shape != (len(rows),):
            raise IndexError(f"expected a mask of {len(rows)} images; found shape {index.shape}")
        index = np.flatnonzero(index)
    if index.ndim != 1 or index.dtype.kind not in "iu":
        raise IndexError(f"expected a list of images; found {index.dtype} of shape {index.shape}")
    if len(index) and not (-len(rows) <= index.min() and index.max() < len(rows)):
        raise IndexError(f"expected images -{len(rows)} to {len(rows) - 1}; found {index.min()} to {index.max()}")
    places: npt.NDArray[np.intp] = index.astype(np.intp)
    places[places < 0] += len(rows)
    places *= rows.step
    places += rows.start
    return places


class ObservationStore:
    """The finished part of a store, for reading: ``ObservationStore.open(path).observations()``."""

    def __init__(self, path: Path, index: Index) -> None:
        self.path = path
        self._index = index

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ObservationStore:
        """Every shard finished so far, also while another process goes on writing."""
        folder = Path(path)
        index = Index.read(folder)
        index.refuse_damage(folder)
        return cls(folder, index)

    def __len__(self) -> int:
        return sum(shard.images for shard in self._index.shards)

    @property
    def fingerprint(self) -> dict[str, str]:
        """What these observations are of: model, layer, preprocessing, perturbation, images."""
        return dict(self._index.fingerprint)

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self._index.shards

    @property
    def complete(self) -> bool:
        """Whether every image is there; never before the end when the number of images was not known."""
        return not self._index.gaps()

    def observations(self) -> Observations:
        """The finished images as `Observations` that are read from disk batch by batch.

        Values are not checked again: each was when it was written.
        """
        shards = self._index.shards
        if not shards:
            raise ValueError(f"{self.path} holds no finished shard yet")
        if holes := [gap for gap in self._index.gaps() if gap.start < shards[-1].start]:
            raise ValueError(
                f"{self.path} lacks images {holes[0].start} to {holes[0].stop - 1}; run the extraction again to fill "
                "them in"
            )
        layout = layout_of(self.path / shards[0].file)
        wide = any(layout_of(self.path / shard.file)["embeddings"][0].itemsize == 4 for shard in shards)
        arrays = {
            name: StoredArray(
                self.path, shards, name, shape[1:], np.float16 if name == "embeddings" and not wide else np.float32
            )
            for name, (_, shape, _) in layout.items()
        }
        predictions = arrays.get("predictions")
        grid, prefix_tokens = self._index.grid, self._index.prefix_tokens
        return trusted(arrays["embeddings"], arrays["attention"], predictions, grid, prefix_tokens)

    def verify(self) -> None:
        """Read every shard and compare its checksum; a ValueError names the damaged ones."""
        if found := self._damaged():
            raise ValueError(damaged(self.path, "wrong checksum of " + ", ".join(shard.file for shard in found)))

    def _damaged(self) -> list[Shard]:
        return [shard for shard in self._index.shards if checksum(self.path / shard.file) != shard.crc32]

    @classmethod
    def repair(cls, path: str | os.PathLike[str]) -> int:
        """Take damaged shards out of the store, keep the rest; returns how many images have to be extracted again."""
        folder = Path(path)
        Index.read(folder)  # no lock file in a folder that is no store
        lock = Lock(folder)
        try:
            index = Index.read(folder)
            lost = cls(folder, index)._damaged()
            kept = tuple(shard for shard in index.shards if shard not in lost)
            replace(index, shards=kept).write(folder)
            for shard in lost:
                (folder / shard.file).unlink(missing_ok=True)
        finally:
            lock.release()
        return sum(shard.images for shard in lost)


def trusted(
    embeddings: ArrayLike,
    attention: ArrayLike,
    predictions: ArrayLike | None,
    grid: tuple[int, int] | None,
    prefix_tokens: int,
) -> Observations:
    """`Observations` of values that went through `check` before."""
    observations = object.__new__(Observations)
    fields = {"embeddings": embeddings, "attention": attention, "predictions": predictions}
    for name, value in {**fields, "grid": grid, "prefix_tokens": prefix_tokens}.items():
        object.__setattr__(observations, name, value)
    observations._check_shapes()
    return observations
