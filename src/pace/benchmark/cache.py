"""Finished work on disk: one small file for every piece, named after everything it depends on. Nothing is ever deleted."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pace import __version__
from pace.atomic import write_atomically
from pace.files import DamagedFile, read_json, reading

T = TypeVar("T")


@functools.cache
def code_digest() -> str:
    """Digest of this package's source code, as it was when first asked for: edited code computes everything anew.

    Only fine-tuned models do not depend on it: they take hours, and their files say how they were trained.
    """
    digest = hashlib.blake2b(digest_size=6)
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def key_of(**facts: Any) -> str:
    """Short hex that changes with every fact and with the version of this library."""
    text = json.dumps({"pace": __version__, **facts}, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


class Cache:
    """JSON records in a folder, by stage and key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, stage: str, key: str, suffix: str = "json") -> Path:
        return self.folder / f"{stage}-{key}.{suffix}"

    def get(self, stage: str, key: str, convert: Callable[[dict[str, Any]], T]) -> T | None:
        """What the record stands for, or None where there is none or it is damaged."""
        file = self.path(stage, key)
        try:
            with reading(file, "it is made again"):
                return convert(read_json(file, dict, "it is made again"))
        except (OSError, DamagedFile):
            return None

    def put(self, stage: str, key: str, record: dict[str, Any]) -> None:
        write_atomically(self.path(stage, key), json.dumps(record, indent=1, allow_nan=False).encode())
