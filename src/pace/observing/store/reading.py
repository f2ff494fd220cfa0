"""Reading a store: the finished images, one batch at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from pace.observations import Observations
from pace.observing.store.format import Index, Shard, checksum, damaged, locked

_DTYPES: dict[str, np.dtype[Any]] = {"F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}  # safetensors' names


class StoredArray:
    """Rows of one tensor of a store, read when they are needed.

    Slices, index arrays and masks give a smaller `StoredArray` without reading; ``numpy.asarray`` or a single integer
    reads. Shards are opened only while they are read, so thousands of them need no open files.
    """

    def __init__(
        self, folder: Path, shards: Sequence[Shard], name: str, row: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._folder, self._shards, self._name = folder, shards, name
        self._ends = np.array([shard.stop for shard in shards])
        self._row, self.dtype = row, dtype
        self._rows = np.arange(shards[-1].stop)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self._rows), *self._row)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, key: int | slice | Sequence[int] | npt.NDArray[Any]) -> Any:
        if isinstance(key, tuple):
            raise TypeError("a stored array takes one index, over images; read it with numpy.asarray to index further")
        if isinstance(key, (int, np.integer)):
            return self._read(self._rows[[key]])[0]
        part = copy(self)
        part._rows = self._rows[key if isinstance(key, slice) or len(key) else []]
        return part

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("a stored array is read from disk: it cannot be had without a copy")
        array = self._read(self._rows)
        return array if dtype is None else array.astype(dtype, copy=False)

    def _read(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
        array = np.empty((len(rows), *self._row), self.dtype)
        shard_of = np.searchsorted(self._ends, rows, side="right")
        for number in np.unique(shard_of):
            shard = self._shards[number]
            places = np.flatnonzero(shard_of == number)
            with opened(self._folder / shard.file) as file:
                tensor = file.get_tensor(self._name)  # mapped, not read
                array[places] = tensor[rows[places] - shard.start].numpy()
        return array


def opened(file: Path) -> Any:
    """A shard, opened by safetensors, which checks its size against its header."""
    try:
        return safe_open(file, "pt")
    except (SafetensorError, OSError) as error:
        raise damaged(file, str(error)) from error


class ObservationStore:
    """The finished part of a store, for reading: ``ObservationStore.open(path).observations()``."""

    def __init__(self, path: Path, index: Index) -> None:
        self.path = path
        self._index = index

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ObservationStore:
        """Every shard finished so far, also while another process is still writing."""
        folder = Path(path)
        index = Index.read(folder)
        index.check_sizes(folder)
        return cls(folder, index)

    def __len__(self) -> int:
        return sum(shard.images for shard in self.shards)

    @property
    def fingerprint(self) -> dict[str, str]:
        """What these observations are of: model, layer, preprocessing, perturbation, images."""
        return dict(self._index.fingerprint)

    @property
    def shards(self) -> tuple[Shard, ...]:
        return self._index.shards

    @property
    def complete(self) -> bool:
        """Whether every image is there; never before the end when the number of images was unknown."""
        return not self._index.gaps()

    def observations(self) -> Observations:
        """The finished images as `Observations` that are read from disk batch by batch.

        Values are not checked again: they were when they were written.
        """
        if not self.shards:
            raise ValueError(f"{self.path} has no finished shard yet")
        if holes := [gap for gap in self._index.gaps() if gap.start < self.shards[-1].start]:
            missing = f"images {holes[0].start} to {holes[0].stop - 1}"
            raise ValueError(f"{self.path} lacks {missing}; run the extraction again to fill them in")
        layouts = [layout_of(self.path / shard.file) for shard in self.shards]
        arrays = {}
        for name, (row, _) in layouts[0].items():
            dtype = np.result_type(*(layout[name][1] for layout in layouts))  # float32 if any shard is
            arrays[name] = StoredArray(self.path, self.shards, name, row, dtype)
        predictions = arrays.get("predictions")
        grid, prefix_tokens = self._index.grid, self._index.prefix_tokens
        return Observations(arrays["embeddings"], arrays["attention"], predictions, grid, prefix_tokens, check=False)

    def verify(self) -> None:
        """Read every shard and compare its checksum; a ValueError names the damaged ones."""
        if found := self._damaged():
            raise damaged(self.path, "wrong checksum of " + ", ".join(shard.file for shard in found))

    def _damaged(self) -> list[Shard]:
        return [shard for shard in self.shards if checksum(self.path / shard.file) != shard.crc32]

    @classmethod
    def repair(cls, path: str | os.PathLike[str]) -> int:
        """Remove damaged shards and keep the rest; returns how many images have to be extracted again."""
        folder = Path(path)
        Index.read(folder)  # refuses a folder that is not a store before a lock file is made in it
        with locked(folder):
            index = Index.read(folder)
            lost = cls(folder, index)._damaged()
            replace(index, shards=tuple(shard for shard in index.shards if shard not in lost)).write(folder)
            for shard in lost:
                (folder / shard.file).unlink(missing_ok=True)
        return sum(shard.images for shard in lost)


def layout_of(file: Path) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shape of one image and type, of every tensor in a shard."""
    with opened(file) as shard:
        slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118
        return {name: (tuple(part.get_shape()[1:]), _DTYPES[part.get_dtype()]) for name, part in slices.items()}
