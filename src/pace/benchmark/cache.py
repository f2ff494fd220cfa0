"""What is known already: one small file for every finished piece of work, named after all that it depends on."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
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


def stored_as(*, code: str, **facts: Any) -> str:
    """What a folder of observations is called: after the code that made it, then after all that it depends on."""
    return f"observations-{key_of(code=code)}-{key_of(code=code, **facts)}"


# Until folders were called after the code as well, their names had one digest.
_STORED = re.compile(r"observations-([0-9a-f]{12})(-[0-9a-f]{12})?")
_SPLITS = {"train", "test"}  # all that is in such a folder


class Cache:
    """JSON records in a folder, by stage and key. `resumed`: an earlier run has left something in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.resumed = any(folder.iterdir())

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

    def discard_observations(self, code: str) -> list[str]:
        """Remove the folders of observations that other code than this has made, since it can never read them.

        Anything that does not look like one in every respect stays. Returns the names of those that are gone.
        """
        found = []
        for folder in sorted(self.folder.glob("observations-*")):
            name = _STORED.fullmatch(folder.name)
            if name is None or folder.is_symlink() or not folder.is_dir():
                continue
            readable = name[2] is not None and name[1] == key_of(code=code)
            if readable or not {entry.name for entry in folder.iterdir()} <= _SPLITS:
                continue
            shutil.rmtree(folder, ignore_errors=True)  # what cannot be removed is in nobody's way
            if not folder.exists():
                found.append(folder.name)
        return found
