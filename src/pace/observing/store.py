"""Observations on disk, for sets that do not fit in memory.

A store is a folder: ``index.json``, and shards of consecutive images as safetensors files. Only what the index lists
exists: it is replaced atomically after each finished shard and holds every shard's size and checksum. So a reader sees
finished shards only, and a killed writer leaves at most a file that the next writer deletes. The checksum of a shard is
compared when the shard is first read.

Embeddings are float16; a batch with a value beyond float16's range (±65504) makes its whole shard float32. Attention,
predictions and crops are float32: they are small next to the embeddings, and float16 would turn the small probabilities
whose logarithms are taken later into zeros.
"""

from __future__ import annotations

import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from pace.atomic import write_atomically
from pace.files import LOCK, DamagedFile, locked, read_json, reading
from pace.observations import Batch, Observations

SHARD_BYTES = 32 << 20  # what a kill may cost, and what a writer holds in memory
_NO_ORIGIN = ("images", "perturbation", "predictions")  # facts that may differ between observations of one origin
_AT_ONCE = 1024  # images whose predictions are made together
_FLOAT16_MAX = 65504.0
_FORMAT = {"format": "pace-observations", "version": 1}
_PATTERN = {**_FORMAT, "fingerprint": {str: str}, "total": int | None, "grid": list | None, "prefix_tokens": int,
            "shards": [dict.fromkeys(("start", "images", "bytes", "crc32"), int)]}  # fmt: skip
_SHARD = re.compile(r"shard-\d{9,}\.safetensors(\.tmp)?")  # .tmp: of an interrupted write
_REMEDY = "delete it and run the extraction again to fill it in"
_DTYPES: dict[str, np.dtype[Any]] = {"F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}  # safetensors' names


@dataclass(frozen=True)
class Shard:
    """One finished file: `images` consecutive images from number `start`."""

    start: int
    images: int
    bytes: int
    crc32: int

    @property
    def file(self) -> str:
        return f"shard-{self.start:09d}.safetensors"

    @property
    def stop(self) -> int:
        return self.start + self.images


@dataclass(frozen=True)
class Index:
    fingerprint: dict[str, str]
    total: int | None = None
    grid: tuple[int, int] | None = None
    prefix_tokens: int = 0
    shards: tuple[Shard, ...] = ()

    def write(self, folder: Path) -> None:
        content = {**_FORMAT, **vars(self), "shards": [vars(shard) for shard in self.shards]}
        write_atomically(folder / "index.json", json.dumps(content, indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> Index:
        file = folder / "index.json"
        if not file.is_file():
            raise FileNotFoundError(f"{folder} is not an observation store: it has no index.json")
        remedy = "delete the folder and run the extraction again"
        content = read_json(file, _PATTERN, remedy)
        with reading(file, remedy):
            grid = content["grid"] and tuple(map(int, content["grid"]))
            shards = tuple(Shard(**shard) for shard in content["shards"])
            edges = [0, *(edge for shard in shards for edge in (shard.start, shard.stop))]
            total = edges[-1] if content["total"] is None else content["total"]
            if [*edges, total] != sorted([*edges, total]) or any(shard.images < 1 for shard in shards):
                raise ValueError("its shards overlap")
            if len(grid or (0, 0)) != 2:
                raise ValueError(f"expected rows and columns of a grid; found {grid}")
            return cls(content["fingerprint"], content["total"], grid, content["prefix_tokens"], shards)

    def gaps(self) -> list[range]:
        """Images that are in no shard; the last gap has no known end when the total is unknown."""
        edges = [0, *(edge for shard in self.shards for edge in (shard.start, shard.stop))]
        edges.append(sys.maxsize if self.total is None else self.total)
        return [range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def _is_whole(file: Path, shard: Shard) -> bool:
    """Whether the file is there and not truncated; it is not read."""
    return file.is_file() and file.stat().st_size == shard.bytes


def _damaged(files: list[str], why: str) -> ValueError:
    return DamagedFile(f"{', '.join(files)}: {why}; delete what is damaged and run the extraction again to fill it in")


@dataclass(frozen=True)
class StoredArray:
    """Rows of one tensor of a store, read when they are needed.

    Slices, index arrays and masks give a smaller `StoredArray` without reading; ``numpy.asarray`` or a single integer
    reads. Shards are opened only while they are read, so thousands of them need no open files.
    """

    folder: Path
    shards: tuple[Shard, ...]
    name: str
    dtype: np.dtype[Any]
    row: tuple[int, ...]  # shape of what is stored of one image
    rows: npt.NDArray[np.intp]  # numbers of the images
    whole: set[int] = field(repr=False)  # shards whose checksum was compared, by their first image

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.row)

    def __getitem__(self, key: int | slice | Sequence[int] | npt.NDArray[Any]) -> Any:
        if isinstance(key, (int, np.integer)):
            return np.asarray(self[[key]])[0]
        return replace(self, rows=self.rows[key])

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        array = np.empty(self.shape, self.dtype)
        shard_of = np.searchsorted([shard.stop for shard in self.shards], self.rows, side="right")
        for number in np.unique(shard_of):
            shard = self.shards[number]
            places = np.flatnonzero(shard_of == number)
            path = self.folder / shard.file
            with reading(path, _REMEDY):
                if shard.start not in self.whole and _checksum(path) != shard.crc32:
                    raise ValueError("its checksum is wrong")
                self.whole.add(shard.start)
                with safe_open(path, "pt") as file:
                    tensor = file.get_tensor(self.name)  # mapped, not read
                    array[places] = tensor[self.rows[places] - shard.start].numpy()
        return array.astype(dtype or self.dtype, copy=False)


class ObservationStore:
    """The finished part of a store, for reading: ``ObservationStore.open(path).observations()``."""

    def __init__(self, path: Path, index: Index) -> None:
        self.path, self._index, self.shards = path, index, index.shards

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ObservationStore:
        """Every shard finished so far, also while another process is still writing."""
        folder = Path(path)
        index = Index.read(folder)
        if lost := [shard.file for shard in index.shards if not _is_whole(folder / shard.file, shard)]:
            raise _damaged(lost, f"missing or truncated in {folder}")
        return cls(folder, index)

    def __len__(self) -> int:
        return sum(shard.images for shard in self.shards)

    @property
    def complete(self) -> bool:
        """Whether every image is there; never before the end when the number of images was unknown."""
        return not self._index.gaps()

    @property
    def fingerprint(self) -> dict[str, str]:
        """What the observations are of."""
        return self._index.fingerprint

    def observations(self, head: Callable[[Tensor], Tensor] | None = None) -> Observations:
        """The finished images as `Observations` that are read from disk batch by batch.

        Where pooled features were kept in place of predictions, `head` makes logits of them; without it they are left as
        they are.
        """
        if not self.shards:
            raise ValueError(f"{self.path} has no finished shard yet")
        if holes := [gap for gap in self._index.gaps() if gap.start < self.shards[-1].start]:
            missing = f"images {holes[0].start} to {holes[0].stop - 1}"
            raise ValueError(f"{self.path} lacks {missing}; run the extraction again to fill them in")
        layouts = [_layout(self.path / shard.file, shard.images) for shard in self.shards]
        arrays: dict[str, Any] = {}
        numbers, whole = np.arange(self.shards[-1].stop), set[int]()
        with reading(self.path / "index.json", "delete the folder and run the extraction again"):
            for name in set(layouts[0]).intersection(*layouts):  # only pairs have crops
                row = layouts[0][name][1]
                if any(layout[name][1] != row for layout in layouts):
                    raise ValueError(f"{name} have another shape in another shard")
                dtype = np.result_type(*(layout[name][0] for layout in layouts))  # float32 if any shard is
                arrays[name] = StoredArray(self.path, self.shards, name, dtype, row, numbers, whole)
            if (features := arrays.pop("pooled", None)) is not None:
                arrays["predictions"] = features
                if head is not None:
                    with torch.no_grad():
                        parts = torch.split(torch.from_numpy(np.asarray(features)), _AT_ONCE)
                        arrays["predictions"] = torch.cat([head(part).softmax(-1) for part in parts])
            arrays |= {"grid": self._index.grid, "prefix_tokens": self._index.prefix_tokens}
            facts = self._index.fingerprint.items()
            arrays["origin"] = {name: fact for name, fact in facts if name not in _NO_ORIGIN}
            return Observations(**arrays, check=False)

    def verify(self) -> None:
        """Read every shard and compare its checksum; a ValueError names the damaged ones."""
        if lost := [shard.file for shard in self.shards if _checksum(self.path / shard.file) != shard.crc32]:
            raise _damaged(lost, f"wrong checksum in {self.path}")


def _checksum(file: Path) -> int:
    with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as content:  # faster than a copy
        return zlib.crc32(content)


def _layout(file: Path, images: int) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Type and shape of what a shard holds of one image, by name."""
    with reading(file, _REMEDY), safe_open(file, "pt") as shard:
        slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118
        if any(part.get_shape()[:1] != [images] for part in slices.values()):
            raise ValueError(f"not all of its tensors have {images} rows")
        return {name: (_DTYPES[part.get_dtype()], tuple(part.get_shape()[1:])) for name, part in slices.items()}


class StoreWriter:
    """Adds batches to a store, new or unfinished; a context manager, one at a time per store.

    `index` says what the observations are of; a store of something else is refused. A shard is written as soon as the
    batches waiting for it reach `shard_bytes`. It holds whole batches, so a run that resumes continues with the very
    batches of an uninterrupted one, and its values are the same bit for bit.
    """

    def __init__(
        self, path: str | os.PathLike[str], index: Index, shard_bytes: int = SHARD_BYTES, pooled: bool = False
    ) -> None:
        self.path, self._index, self._shard_bytes, self._pooled = Path(path), index, shard_bytes, pooled
        self._waiting: list[dict[str, Tensor]] = []
        self._start = 0  # number of the first image that is waiting

    def __enter__(self) -> StoreWriter:
        _refuse_foreign(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(locked(self.path, "another process is writing to this store"))
            self._open()
            self._lock = stack.pop_all()
        return self

    def _open(self) -> None:
        if (self.path / "index.json").exists():
            found = Index.read(self.path)
            _refuse_other(self.path, found, self._index)
            shards = tuple(shard for shard in found.shards if _is_whole(self.path / shard.file, shard))
            self._index = replace(found, shards=shards, total=self._index.total or found.total)
        self._index.write(self.path)
        self.gaps = self._index.gaps()  # when it was opened
        listed = {shard.file for shard in self._index.shards}
        for leftover in self.path.iterdir():
            if _SHARD.fullmatch(leftover.name) and leftover.name not in listed and leftover.is_file():
                leftover.unlink()  # a kill came between this file and the index, or it is truncated

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._flush()  # after Ctrl-C or a failing model, what was computed is still written

    def append(
        self, start: int, batch: Batch, bounds: Tensor | None = None, crops: npt.NDArray[np.float32] | None = None
    ) -> None:
        """Add the images from number `start` on; `bounds` are the `extremes` of the embeddings, if known already."""
        bounds = extremes(batch.embeddings) if bounds is None else bounds
        check(start, batch, bounds, self._index.grid, self._index.prefix_tokens, crops, self._pooled)
        narrow = bounds.abs().max() <= _FLOAT16_MAX
        kinds = {"embeddings": torch.float16 if narrow else torch.float32}
        parts = {name: part for name, part in batch._asdict().items() if part is not None}
        tensors = {name: part.detach().to("cpu", kinds.get(name, torch.float32)) for name, part in parts.items()}
        if self._pooled:
            tensors["pooled"] = tensors.pop("predictions")
        if crops is not None:
            tensors["crops"] = torch.from_numpy(crops)
        if start != self._start + sum(len(part["attention"]) for part in self._waiting):
            self._flush()  # a shard holds consecutive images
        if not self._waiting:
            self._start = start
        self._waiting.append(tensors)
        if sum(tensor.nbytes for part in self._waiting for tensor in part.values()) >= self._shard_bytes:
            self._flush()

    def finish(self, total: int | None = None) -> Observations:
        """Write what is waiting and, if the total was unknown, record it."""
        self._flush()
        if total is not None and self._index.total != total:
            self._index = replace(self._index, total=total)
            self._index.write(self.path)
        return ObservationStore.open(self.path).observations()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        # One batch in float32 makes its whole shard float32.
        content = save({name: torch.cat([part[name] for part in waiting]) for name in waiting[0]})
        images = sum(len(part["attention"]) for part in waiting)
        shard = Shard(self._start, images, len(content), zlib.crc32(content))
        index = replace(self._index, shards=tuple(sorted([*self._index.shards, shard], key=lambda shard: shard.start)))
        write_atomically(self.path / shard.file, content)
        index.write(self.path)
        self._index = index


def extremes(embeddings: Tensor) -> Tensor:
    """(B, J, 2): smallest and largest value of every token. NaN and infinity show in them, so they are all that has to
    be checked: on a GPU that saves the processor most of the work."""
    return torch.stack([embeddings.amin(-1), embeddings.amax(-1)], dim=-1).float()


def check(
    start: int,
    batch: Batch,
    bounds: Tensor,
    grid: tuple[int, int] | None,
    prefix_tokens: int,
    crops: npt.NDArray[np.float32] | None,
    pooled: bool = False,
) -> None:
    """The checks of `Observations` on the batch from image `start` on; `bounds` are its `extremes`."""
    try:
        Observations(bounds, batch.attention, None if pooled else batch.predictions, grid, prefix_tokens, crops=crops)
    except ValueError as error:
        raise ValueError(f"in the batch from image {start} on: {error}") from error


def _refuse_foreign(folder: Path) -> None:
    if folder.is_dir() and not (folder / "index.json").exists():
        names = [file.name for file in folder.iterdir() if file.name != LOCK and not file.name.endswith(".tmp")]
        if names:
            raise ValueError(f"{folder} is not an observation store (it holds {names[0]}); name a new or empty folder")


def _refuse_other(folder: Path, found: Index, wanted: Index) -> None:
    def facts(index: Index) -> dict[str, object]:
        known: dict[str, object] = {**index.fingerprint, "grid": index.grid, "prefix tokens": index.prefix_tokens}
        return known if found.total is None or wanted.total is None else {**known, "number of images": index.total}

    old, new = facts(found), facts(wanted)
    if differs := [f"{name} was {old.get(name)}, now {new[name]}" for name in new if old.get(name) != new[name]]:
        raise ValueError(f"{folder} holds other observations: {'; '.join(differs)}. Name another folder for these")
