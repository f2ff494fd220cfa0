"""What the user of a fit makes of its concepts: names, which are not shown, and which are one.

`Edits` is a list of changes over the names of a fit, kept as ``names.json`` in its run if it has one:

    edits = Edits(model.names_, folder)     reads names.json, of this very fit, if it is there
    edits.name(12, "red face")              "" takes a name away
    edits.name("A", "head")                 a part: its kinds without a name of their own are then 'head · kind 3'
    edits.hide(3, "A2"), edits.show(3)      from lists and galleries, never from the numbers; a part stands for all its kinds
    edits.merge(5, 12, 7)                   one concept, number 5; the others are empty from now on
    edits.undo()                            takes the last change back, and says which
    edits.names                             a `pace.naming.Name` for every concept: .long, .label, .short, .hidden, .into
    edits.merges                            the groups in their order, for `PACE.merged`

A concept is given by its number, as 'A3' if it is a kind, or by the name it has been given. Every change is written at once,
under the run's lock and after those that others have made meanwhile, and returned in words; one that cannot be made is a
ValueError of one line. `ModelExplainer` has the same methods, which change its model too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pace.atomic import write_atomically
from pace.files import CONCEPTS, NAMES, fingerprint_of, locked, read_json, reading
from pace.naming import Name

_FORMAT = "pace-names-1"
_CHANGE = {"do": str, "concepts": [int], "part": str | None, "name": str | None}
_REMEDY = "delete it to begin anew, without names"
LONGEST = 60  # characters of a name
_WAIT = 10.0  # seconds, for others who write

What = int | str  # a concept or a part


@dataclass(frozen=True)
class Change:
    """As the file has it."""

    do: str  # name, hide, show or merge
    concepts: Sequence[int] = ()
    part: str | None = None  # its letter
    name: str | None = None


class Edits:
    """Names of concepts and parts, hidden concepts, and merges, of the fit whose own names these are."""

    def __init__(self, names: Sequence[Name], folder: Path | None = None) -> None:
        self.folder, self._own = folder, list(names)
        self.changes: list[Change] = self._read()

    @property
    def names(self) -> list[Name]:
        """What the concepts are called now."""
        return self._after(self.changes)

    @property
    def merges(self) -> list[list[int]]:
        """The groups of concepts that are one, in their order."""
        return merges_in(self.changes)

    def find(self, what: What) -> list[int]:
        """The concept that this is, or all kinds of the part; without those that were merged into others."""
        names = self.names
        concepts, part = _found(what, names)
        return concepts if part is None else [name.number for name in names if name.part == part and name.into is None]

    def name(self, what: What, name: str) -> str:
        """Call a concept or a part so; with an empty name as before."""
        concepts, part = _found(what, self.names)
        return self._change(Change("name", [] if part else concepts, part, " ".join(name.split())))

    def hide(self, *what: What) -> str:
        """Leave these out of lists and galleries."""
        return self._change(Change("hide", [k for one in what for k in self.find(one)]))

    def show(self, *what: What) -> str:
        """Show hidden ones again."""
        return self._change(Change("show", [k for one in what for k in self.find(one)]))

    def merge(self, *what: What) -> str:
        """Take these concepts for one, which has the number of the first."""
        return self._change(Change("merge", [k for one in what for k in self.find(one)]))

    def undo(self) -> str:
        """Take the last change back; says which one that was."""
        return self._change(None)

    def save(self, folder: Path) -> None:
        """Write them into another folder, which holds the same concepts."""
        if self.changes:
            self._write(folder, self.changes)

    # -- the list -----------------------------------------------------------------------------------------------------

    def _change(self, change: Change | None) -> str:
        """Add a change, or take the last one back, after those that others have made meanwhile; says which one that is."""
        if self.folder is None:
            changes, said = self._changed(self.changes, change)
        else:
            with locked(self.folder, "another pace command writes to this folder", wait=_WAIT):
                changes, said = self._changed(self._read(), change)
                self._write(self.folder, changes)
        self.changes = changes
        return said

    def _changed(self, changes: list[Change], change: Change | None) -> tuple[list[Change], str]:
        if change is None:
            if not changes:
                raise ValueError("there is no change to take back")
            return changes[:-1], self._said(changes[-1])
        self._after([*changes, change])  # refuses what cannot be
        return [*changes, change], self._said(change)

    def _said(self, change: Change) -> str:
        what = f"part {change.part}" if change.part else ", ".join(self._own[k].short for k in change.concepts)
        if change.do == "name":
            return f"{what} is called {change.name!r}" if change.name else f"{what} has no name"
        return f"{change.do} {what}"

    def _after(self, changes: Sequence[Change]) -> list[Name]:
        """The names after these changes; a ValueError if one of them cannot be made."""
        names = list(self._own)
        for change in changes:
            self._check(change, names)
            for k in change.concepts:
                names[k] = names[k]._replace(**self._fields(change, k, names))
            if change.part:
                own = next(name.part_given for name in self._own if name.part == change.part)
                given = change.name or own
                names = [name._replace(part_given=given) if name.part == change.part else name for name in names]
        return names

    def _fields(self, change: Change, k: int, names: list[Name]) -> dict[str, Any]:
        """What the change makes of the name of concept k."""
        if change.do == "name":
            return {"given": change.name or None}
        if change.do != "merge":
            return {"hidden": change.do == "hide"}
        if k != change.concepts[0]:
            return {"into": change.concepts[0]}
        return {"given": next((names[other].given for other in change.concepts if names[other].given), None)}

    def _check(self, change: Change, names: list[Name]) -> None:
        if change.do not in ("name", "hide", "show", "merge"):
            raise ValueError(f"there is no change {change.do!r}")
        if wrong := [k for k in change.concepts if not 0 <= k < len(names)]:
            raise ValueError(f"there is no concept {wrong[0]}; expected 0 to {len(names) - 1}")
        if change.part and change.part not in {name.part for name in names}:
            raise ValueError(f"there is no part {change.part}")
        for k in change.concepts:
            if (into := names[k].into) is not None:
                raise ValueError(f"{names[k].short} was merged into {names[into].short}")
        if not change.concepts and not change.part:
            raise ValueError("expected concepts to change; found none")
        if change.do == "name":
            _check_name(change.name)
        if change.do == "merge":
            parts = {names[k].part for k in change.concepts}
            if len(set(change.concepts)) < max(2, len(change.concepts)):
                raise ValueError("expected two or more different concepts to merge")
            if len(parts) > 1:
                of = " and ".join(sorted(map(str, parts)))
                raise ValueError(f"these are kinds of different parts ({of}); only kinds of one part can be merged")

    # -- the file -----------------------------------------------------------------------------------------------------

    def _read(self) -> list[Change]:
        changes = [] if self.folder is None else read_changes(self.folder)
        if self.folder is not None:
            with reading(self.folder / NAMES, _REMEDY):
                self._after(changes)
        return changes

    def _write(self, folder: Path, changes: Sequence[Change]) -> None:
        found = {"format": _FORMAT, "fit": fingerprint_of(folder / CONCEPTS), "changes": list(map(asdict, changes))}
        write_atomically(folder / NAMES, json.dumps(found, indent=1, ensure_ascii=False).encode())


def read_changes(folder: Path) -> list[Change]:
    """Those in a run, if there are any."""
    if not (file := folder / NAMES).is_file():
        return []
    found = read_json(file, {"format": _FORMAT, "fit": str, "changes": [_CHANGE]}, _REMEDY)
    with reading(file, _REMEDY):
        if found["fit"] != fingerprint_of(folder / CONCEPTS):
            raise ValueError("it has the names of another fit")
        return [Change(**change) for change in found["changes"]]


def merges_in(changes: Sequence[Change]) -> list[list[int]]:
    """The groups of concepts that are one, in their order."""
    return [list(change.concepts) for change in changes if change.do == "merge"]


def _check_name(name: str | None) -> None:
    if name is None or len(name) > LONGEST or not name.isprintable():
        raise ValueError(f"a name has up to {LONGEST} printable characters; found {name!r:.100}")


def _found(what: What, names: Sequence[Name]) -> tuple[list[int], str | None]:
    """A concept, or the letter of a part."""
    if isinstance(what, str) and not what.isdecimal():
        text = " ".join(what.split())
        kinds = [name.number for name in names if name.part and name.short == text.upper()]
        if kinds or text.upper() in {name.part for name in names}:
            return kinds, None if kinds else text.upper()
        concepts = [name.number for name in names if name.given == text and name.into is None]
        parts = sorted({str(name.part) for name in names if name.part_given == text})
        if len(concepts) + len(parts) == 1:
            return concepts, parts[0] if parts else None
        if concepts or parts:
            which = ", ".join([*(names[k].short for k in concepts), *(f"part {part}" for part in parts)])
            raise ValueError(f"{text!r} is the name of more than one ({which}); say which")
    elif 0 <= int(what) < len(names):
        return [int(what)], None
    known = f"a number from 0 to {len(names) - 1}" + (", a kind such as A1, a part such as A," if names[0].part else "")
    raise ValueError(f"there is no concept {what!r}; expected {known} or a name that was given")
