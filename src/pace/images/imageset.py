"""`ImageSet`: images with names and, where known, labels."""

from __future__ import annotations

import copy
import hashlib
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pace.images.decoding import UnreadableImageError, decode

OnError = Literal["raise", "skip"]
Progress = Callable[[int, int], None]  # images done, images in all

_SHOWN = 5  # names in an error message; the rest are counted


class UnreadableImagesError(ValueError):
    """Some images of a set cannot be read. `reasons` lists them all, by name."""

    def __init__(self, reasons: dict[str, str], total: int) -> None:
        self.reasons = reasons
        super().__init__(
            f"{len(reasons)} of {total} images cannot be read: {_some_reasons(reasons)}; "
            'repair or remove them, or leave them out with on_error="skip"'
        )


class ImageSet(ABC):
    """M images in a fixed order: ``images[i]`` is a uint8 RGB tensor (3, h, w), each of its own size.

    names : list of str
        One unique id per image, the same wherever the set is stored.
    labels : (M,) int64, or None
        Class of every image, an index into ``class_names``.
    class_names : list of str, or None
    """

    skipped = 0  # unreadable images that were left out when the set was opened

    def __init__(
        self, names: Sequence[str], labels: Sequence[int] | NDArray[np.int64] | None, class_names: Sequence[str] | None
    ) -> None:
        self.names = list(names)
        self.labels = None if labels is None else np.asarray(labels, dtype=np.int64)
        self.class_names = None if class_names is None else list(class_names)
        # Where each image was when the set was opened, so that a subclass can still find its own data about an image
        # (parts, colours) after some were left out.
        self._rows: NDArray[np.int64] = np.arange(len(self.names))
        self._check_alignment()

    def _check_alignment(self) -> None:
        if not self.names:
            raise ValueError(f"{type(self).__name__}: no images in this split")
        if len(set(self.names)) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise ValueError(f"{type(self).__name__}: image {twice!r} is listed twice")
        if self.labels is None:
            return
        if self.labels.shape != (len(self.names),):
            raise ValueError(f"{type(self).__name__}: {len(self.names)} images but {len(self.labels)} labels")
        last = np.inf if self.class_names is None else len(self.class_names) - 1
        wrong = np.flatnonzero((self.labels < 0) | (self.labels > last))
        if wrong.size:
            name, label = self.names[wrong[0]], self.labels[wrong[0]]
            expected = "0 or more" if self.class_names is None else f"0 to {last}, one for each class name"
            raise ValueError(f"{type(self).__name__}: {name} has label {label}; expected {expected}")

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Tensor:
        return self._image(self._position(index))

    def _position(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        return int(index) % len(self)

    @abstractmethod
    def _image(self, index: int) -> Tensor:
        """Image `index`, 0 ≤ index < M."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Short hex string that changes when the images do."""

    def check(self, progress: Progress | None = None) -> None:
        """Read every image once; `UnreadableImagesError` lists those that cannot be read."""
        if reasons := self._unreadable(progress):
            raise UnreadableImagesError(reasons, len(self))

    def _unreadable(self, progress: Progress | None) -> dict[str, str]:
        """Why images cannot be read, by name."""
        return {}

    def subset(self, indices: Iterable[int]) -> Self:
        """The same set with only these images, in this order."""
        part = copy.copy(self)
        part._keep([self._position(index) for index in indices])
        return part

    def _keep(self, positions: list[int]) -> None:
        self.names = [self.names[position] for position in positions]
        self.labels = None if self.labels is None else self.labels[positions]
        self._rows = self._rows[positions]
        self._check_alignment()

    def __repr__(self) -> str:
        classes = "" if self.class_names is None else f", {len(self.class_names)} classes"
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return f"{type(self).__name__}({len(self)} images{classes}{skipped})"


class ImageFiles(ImageSet):
    """Images that are files: ``folder / name``.

    Listed files must exist. With ``on_error="skip"`` every file is read once, here, and those that cannot be decoded
    are left out together with their labels. After that the set is fixed: an image that fails later is an error.
    """

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        labels: Sequence[int] | NDArray[np.int64] | None = None,
        class_names: Sequence[str] | None = None,
        *,
        layout: str | None = None,
        on_error: OnError = "raise",
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f'on_error: expected "raise" or "skip"; found {on_error!r}')
        super().__init__(names, labels, class_names)
        self.folder = folder
        missing = [name for name in self.names if not self.path(name).is_file()]
        if missing:
            found = f"{len(missing)} of {len(self)} listed images are missing in {folder}: {_some(missing)}"
            raise FileNotFoundError(f"{found}; expected {layout}" if layout else found)
        if on_error == "skip":
            self._skip_unreadable()

    def _skip_unreadable(self) -> None:
        reasons = self._unreadable(None)
        if not reasons:
            return
        if len(reasons) == len(self):
            raise UnreadableImagesError(reasons, len(self))
        message = f"{len(reasons)} of {len(self)} images cannot be read and are left out: {_some_reasons(reasons)}"
        warnings.warn(message, stacklevel=4)
        self._keep([position for position, name in enumerate(self.names) if name not in reasons])
        self.skipped = len(reasons)

    def path(self, name: str) -> Path:
        return self.folder / name

    def _image(self, index: int) -> Tensor:
        return decode(self.path(self.names[index]))

    def fingerprint(self) -> str:
        stats = ((name, os.stat(self.path(name))) for name in self.names)
        return short_hash((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)

    def _unreadable(self, progress: Progress | None) -> dict[str, str]:
        def why(name: str) -> str | None:
            try:
                decode(self.path(name), reduced=True)
            except UnreadableImageError as error:
                return error.reason
            return None

        reasons: dict[str, str] = {}
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # decoders release the interpreter lock
            for done, (name, reason) in enumerate(zip(self.names, pool.map(why, self.names), strict=True), start=1):
                if reason is not None:
                    reasons[name] = reason
                if progress is not None:
                    progress(done, len(self))
        return reasons


def short_hash(parts: Iterable[object]) -> str:
    """16 hex digits computed from the `repr` of plain values."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(repr(part).encode() + b"\n")
    return digest.hexdigest()


def _some(items: Sequence[str]) -> str:
    more = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _some_reasons(reasons: dict[str, str]) -> str:
    return _some([f"{name} ({why})" for name, why in reasons.items()])
