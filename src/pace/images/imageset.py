"""`ImageSet`: images with names and, where known, labels."""

from __future__ import annotations

import copy
import hashlib
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pace.images.decoding import UnreadableImageError, decode
from pace.terminal import one_line

OnError = Literal["raise", "skip"]

_SHOWN = 5  # names in an error message; the rest are counted


class ImageSet(ABC):
    """M images in a fixed order: ``images[i]`` is a uint8 RGB tensor (3, h, w), each of its own size.

    names : list of str
        One unique id per image, the same wherever the set is stored.
    labels : (M,) int64, or None
        Class of every image, an index into ``class_names``.
    class_names : list of str, or None
    """

    def __init__(
        self, names: Sequence[str], labels: Sequence[int] | NDArray[np.int64] | None, class_names: Sequence[str] | None
    ) -> None:
        self.names = list(names)
        self.labels = None if labels is None else np.asarray(labels, dtype=np.int64)
        self.class_names = None if class_names is None else list(class_names)
        self._check()

    def _check(self) -> None:
        kind = type(self).__name__
        if not self.names:
            raise ValueError(f"{kind}: no images in this split")
        if self.labels is None or self.class_names is None:
            return
        last = len(self.class_names) - 1
        for name, label in zip(self.names, self.labels, strict=True):
            if not 0 <= label <= last:
                raise ValueError(f"{kind}: {name} has label {label}; expected 0 to {last}, one for each class name")

    def __len__(self) -> int:
        return len(self.names)

    @abstractmethod
    def __getitem__(self, index: int) -> Tensor: ...

    @abstractmethod
    def fingerprint(self) -> str:
        """Short hex string that changes when the images do."""

    def keys(self) -> list[str]:
        """One short string per image, the same in any set that has this very image."""
        return [self.subset([number]).fingerprint() for number in range(len(self))]

    def subset(self, indices: Iterable[int]) -> Self:
        """The same set with only these images, in this order."""
        part = copy.copy(self)
        part._keep(list(indices))
        return part

    def _keep(self, positions: list[int]) -> None:
        self.names = [self.names[position] for position in positions]
        self.labels = None if self.labels is None else self.labels[positions]
        self._check()

    def __repr__(self) -> str:
        classes = "" if self.class_names is None else f", {len(self.class_names)} classes"
        return f"{type(self).__name__}({len(self)} images{classes})"


class ImageFiles(ImageSet):
    """Images that are files: ``folder / name``.

    With ``on_error="skip"`` every file is read once, here, and those that cannot be decoded are left out together with
    their labels. An image that fails later is an error.
    """

    layout = "all of them"  # which files there should be, for error messages

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        labels: Sequence[int] | NDArray[np.int64] | None = None,
        class_names: Sequence[str] | None = None,
        *,
        on_error: OnError = "raise",
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f'on_error: expected "raise" or "skip"; found {on_error!r}')
        super().__init__(names, labels, class_names)
        self.folder = folder
        if missing := [name for name in self.names if not os.path.isfile(self.path(name))]:  # false for any nonsense
            found = f"{len(missing)} of {len(self)} listed images are missing in {folder}: {_some(missing)}"
            raise FileNotFoundError(f"{found}; expected {self.layout}")
        if on_error == "skip":
            self._skip_unreadable()

    def _skip_unreadable(self) -> None:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # decoders release the interpreter lock
            reasons = list(pool.map(self._why_unreadable, self.names))
        unreadable = [f"{name} ({why})" for name, why in zip(self.names, reasons, strict=True) if why]
        message = f"{len(unreadable)} of {len(self)} images cannot be read and are left out: {_some(unreadable)}"
        if len(unreadable) == len(self):
            raise ValueError(message)
        if unreadable:
            warnings.warn(message, stacklevel=4)
            self._keep([position for position, why in enumerate(reasons) if not why])

    def _why_unreadable(self, name: str) -> str:
        try:
            decode(self.path(name))
        except UnreadableImageError as error:
            return error.reason
        return ""

    def path(self, name: str) -> Path:
        return self.folder / name

    def __getitem__(self, index: int) -> Tensor:
        return decode(self.path(self.names[index]))

    def fingerprint(self) -> str:
        stats = ((name, os.stat(self.path(name))) for name in self.names)
        return short_hash((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)

    def keys(self) -> list[str]:
        root = self.folder.resolve()
        stats = ((str(root / name), os.stat(self.path(name))) for name in self.names)
        return [short_hash([path, stat.st_size, stat.st_mtime_ns]) for path, stat in stats]


def short_hash(parts: Iterable[object]) -> str:
    """16 hex digits computed from the `repr` of plain values."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(repr(part).encode() + b"\n")
    return digest.hexdigest()


def _some(items: Sequence[str]) -> str:
    more = len(items) - _SHOWN
    return one_line(", ".join(items[:_SHOWN])) + (f" and {more} more" if more > 0 else "")
