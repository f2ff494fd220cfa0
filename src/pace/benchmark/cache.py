"""What is known already: one small file for every finished piece of work, named after all that it depends on."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pace import __version__
from pace.atomic import write_atomically

_PACKAGE = Path(__file__).parents[1]
# From images to observations.
_SEEING = (
    "backbones",
    "images",
    "store",
    "baselines/everytoken.py",
    "baselines/split.py",
    "extract.py",
    "observations.py",
    "pipeline.py",
    "sources.py",
)
# What shows results and makes none: a table that looks different is no reason to compute its rows again.
_SHOWING = (
    "benchmark/published.py",
    "benchmark/tables.py",
    "benchmark/writing.py",
    "cli",
    "demo",
    "figures",
    "notebook.py",
    "report",
)


@cache
def code_of(stage: Literal["observations", "methods"]) -> str:
    """Short hex of this library's own source that a stage rests on, as it was when first asked for.

    A fine-tuned model does not have it among its facts: it takes hours, and says itself how it was trained.
    """
    return source_digest(_PACKAGE, _SEEING) if stage == "observations" else source_digest(_PACKAGE, without=_SHOWING)


def source_digest(package: Path, only: tuple[str, ...] = (".",), without: tuple[str, ...] = ()) -> str:
    """Of the Python files in some folders, or of some files, by name and content."""
    kept, left_out = ([package / name for name in names] for names in (only, without))
    digest = hashlib.blake2b(digest_size=6)
    for file in sorted(package.rglob("*.py")):
        if any(file.is_relative_to(place) for place in kept) and not any(map(file.is_relative_to, left_out)):
            content = file.read_bytes()
            digest.update(f"{file.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def key_of(**facts: Any) -> str:
    """Short hex that changes when a fact does, or the version of this library."""
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
