"""Where the files of a published dataset should be, with error messages for when they are not there."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

StrPath = str | PathLike[str]


@dataclass(frozen=True)
class Layout:
    """The official layout of one dataset.

    folders : usual names of its folder
    marker : a file that every copy has, relative to that folder
    expected : the whole layout in words, for error messages
    """

    title: str
    folders: tuple[str, ...]
    marker: str
    expected: str

    def root(self, data_root: StrPath) -> Path:
        """The dataset's own folder, given that folder or its parent."""
        base = Path(data_root).expanduser()
        if not base.is_dir():
            raise FileNotFoundError(f"{self.title}: data_root {base} is not a folder; expected {self.expected}")
        candidates = [base, *(base / name for name in self.folders)]
        for folder in candidates:
            if (folder / self.marker).is_file():
                return folder
        searched = " or ".join(map(str, candidates))
        raise FileNotFoundError(f"{self.title}: no {self.marker} in {searched}; expected {self.expected}")

    def file(self, root: Path, *names: str) -> Path:
        """The first of these files that exists."""
        for name in names:
            if (root / name).is_file():
                return root / name
        raise FileNotFoundError(f"{self.title}: no {' or '.join(names)} in {root}; expected {self.expected}")

    def split(self, split: str, splits: tuple[str, ...]) -> str:
        """`split`, if this dataset has it."""
        if split not in splits:
            raise ValueError(f"{self.title}: split {split!r} does not exist; expected one of {', '.join(splits)}")
        return split


def read_mat(path: Path, key: str) -> Any:
    """One variable of a MATLAB file, squeezed; structs become objects with attributes."""
    from scipy.io import loadmat

    try:
        content = loadmat(path, squeeze_me=True, struct_as_record=False, variable_names=[key])
    except Exception as error:  # the reader raises nearly anything on damaged files
        raise ValueError(f"{path} cannot be read as a MATLAB file: {error}") from error
    if key not in content:
        raise ValueError(f"{path} holds no variable {key!r}")
    return content[key]


def read_table(path: Path, columns: int) -> dict[int, list[str]]:
    """Rows of ``id value …`` by id. The last column may contain spaces."""
    rows: dict[int, list[str]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        fields = line.split(maxsplit=columns - 1)
        if len(fields) != columns or not fields[0].isdecimal():
            raise ValueError(f"{path}, line {number}: expected {columns} columns, an id first; found {line!r}")
        rows[int(fields[0])] = [field.strip() for field in fields[1:]]
    return rows
