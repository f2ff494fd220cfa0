"""Finished work on disk: one small file for every piece, named after everything it depends on."""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pace import __version__
from pace.atomic import write_atomically

_PACKAGE = Path(__file__).parents[1]
# The code between images and observations; `source_digest` fails if one of these is renamed.
_OBSERVING = ("backbones", "images", "observing", "baselines/head.py", "observations.py")
# Code that only shows results: a table that looks different is no reason to compute its rows again.
_SHOWING = ("cli", "demo", "showing", "benchmark/published.py", "benchmark/tables.py", "benchmark/writing.py")


@cache
def code_of(stage: Literal["observations", "methods"]) -> str:
    """Digest of the source code that a stage depends on, as it was when first asked for.

    Fine-tuned models do not depend on it: they take hours, and their files say how they were trained.
    """
    return source_digest(_PACKAGE, only=_OBSERVING) if stage == "observations" else source_digest(_PACKAGE, _SHOWING)


def source_digest(package: Path, without: tuple[str, ...] = (), only: tuple[str, ...] = (".",)) -> str:
    """Of all Python files in a folder, or in some parts of it, by name and content."""
    kept, left_out = ([package / name for name in names] for names in (only, without))
    missing = [str(part) for part in (*kept, *left_out) if not part.exists()]
    if missing:
        raise FileNotFoundError(f"{', '.join(missing)}: no such source code; was it renamed?")
    digest = hashlib.blake2b(digest_size=6)
    for file in sorted(package.rglob("*.py")):
        if any(map(file.is_relative_to, kept)) and not any(map(file.is_relative_to, left_out)):
            content = file.read_bytes()
            digest.update(f"{file.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def key_of(**facts: Any) -> str:
    """Short hex that changes with every fact and with the version of this library."""
    text = json.dumps({"pace": __version__, **facts}, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


class Cache:
    """JSON records in a folder, by stage and key. `resumed`: an earlier run has left something in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.resumed = any(folder.iterdir())

    def path(self, stage: str, key: str, suffix: str = "json") -> Path:
        return self.folder / f"{stage}-{key}.{suffix}"

    def get(self, stage: str, key: str) -> dict[str, Any] | None:
        """The record, or None where there is none or it is damaged."""
        try:
            return dict(json.loads(self.path(stage, key).read_bytes()))
        except (OSError, ValueError):
            return None

    def put(self, stage: str, key: str, record: dict[str, Any]) -> None:
        write_atomically(self.path(stage, key), json.dumps(record, indent=1, allow_nan=False).encode())

    def observations(self, code: str) -> Path:
        """The folder for observations that this code makes."""
        return self.folder / "observations" / code

    def discard_observations(self, code: str) -> list[str]:
        """Remove observations that other code made, since nothing will read them; returns the names of their folders."""
        current = self.observations(code)
        old = [folder for folder in sorted(current.parent.glob("*")) if folder != current and folder.is_dir()]
        for folder in old:
            shutil.rmtree(folder, ignore_errors=True)
        return [folder.name for folder in old]
