"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def temporary_of(path: Path) -> Path:
    """What a kill may leave behind while `path` is written."""
    return path.with_name(path.name + ".tmp")


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Write the data to `path`, all or nothing, and have it on the disk before returning."""
    temporary = temporary_of(path)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:  # as when the disk is full
            error.filename = str(path)
        raise
    if os.name == "posix":  # elsewhere a folder cannot be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
