"""What is known already: one small file for every finished piece of work, named after all that it depends on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pace import __version__
from pace.atomic import write_atomically


def key_of(**facts: Any) -> str:
    """Short hex that changes when a fact does, or this library."""
    text = json.dumps({"pace": __version__, **facts}, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


class Cache:
    """JSON records in a folder, by stage and key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, stage: str, key: str, suffix: str = "json") -> Path:
        return self.folder / f"{stage}-{key}.{suffix}"

    def get(self, stage: str, key: str) -> dict[str, Any] | None:
        """The record, or None where there is none. A damaged one counts as none: it is only work to do again."""
        try:
            return dict(json.loads(self.path(stage, key).read_bytes()))
        except (OSError, ValueError):
            return None

    def put(self, stage: str, key: str, record: dict[str, Any]) -> None:
        write_atomically(self.path(stage, key), json.dumps(record, indent=1, allow_nan=False).encode())
