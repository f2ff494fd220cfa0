"""What concepts are called: by number, or, where they are kinds of parts, by the part's letter and the kind's number, until
their user names them (`pace.editing`); how much each is used; and what classes are called where they are shown.

In a module of its own since the notebook, which knows no report, uses the same names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Name(NamedTuple):
    """Of a concept: 'part A · kind 3', short 'A3'; or 'concept 12', short '12'; or what its user calls it (`pace.editing`)."""

    number: int
    part: str | None = None  # its part's letter
    kind: int | None = None  # its number within the part, from 1
    given: str | None = None  # by the user
    part_given: str | None = None  # likewise, or since it is background
    hidden: bool = False  # by the user, from lists
    into: int | None = None  # the concept that it was merged into

    @property
    def long(self) -> str:
        if self.given or self.part is None:
            return self.given or f"concept {self.number}"
        return f"{self.part_long} · kind {self.kind}"

    @property
    def label(self) -> str:
        """For tables: 'A · kind 3', or '12', or as it is called."""
        if self.given or self.part is None:
            return self.given or self.short
        return f"{self.part_given or self.part} · kind {self.kind}"

    @property
    def short(self) -> str:
        """Never changes: `pace name` takes it."""
        return f"{self.number}" if self.part is None else f"{self.part}{self.kind}"

    @property
    def part_long(self) -> str:
        return self.part_given or f"part {self.part}"


def concept_names(part_of: Array | None, use: Array, background: Array | None = None) -> list[Name]:
    """A name for each of the K concepts: parts are lettered by use, kinds numbered by use within their part.

    Parts that are `background` (P,) are called so, next to their letter.

    `use` (K,) is how many of the patches it was learned from each concept holds, `PACE.concept_weights_`: a name must not
    depend on the images that are shown. Where it is the same, the order is that of the numbers.
    """
    if part_of is None:
        return [Name(k) for k in range(len(use))]
    held = np.nan_to_num(np.asarray(use, np.float64))
    by_part = np.bincount(part_of, held)
    letters = {int(part): _letter(rank) for rank, part in enumerate(np.argsort(-by_part, kind="stable"))}
    names: dict[int, Name] = {}
    for part, letter in letters.items():
        kinds = np.flatnonzero(part_of == part)
        for number, k in enumerate(kinds[np.argsort(-held[kinds], kind="stable")], start=1):
            called = f"background {letter}" if background is not None and background[part] else None
            names[int(k)] = Name(int(k), letter, number, part_given=called)
    return [names[k] for k in range(len(use))]


def hidden_among(names: Sequence[Name]) -> Array:
    """Which of them their user has hidden (K,)."""
    return np.array([name.hidden for name in names], dtype=bool)


class Use(NamedTuple):
    """How much each concept is used."""

    shares: Array  # (K,) of all patches
    used: Array  # (K,) whether it holds at least one patch
    order: list[int]  # the concepts in use, largest share first


def use_of(patches: Array) -> Use:
    """From the patches that each concept holds (K,): `PACE.concept_weights_`, or of some images."""
    held = np.nan_to_num(np.asarray(patches, np.float64))
    shares, used = held / max(held.sum(), np.finfo(np.float64).tiny), ~(patches < 1)
    return Use(shares, used, [int(k) for k in np.argsort(-shares, kind="stable") if used[k]])


def class_titles(names: Sequence[str]) -> list[str]:
    """Class names to be read, "Black footed Albatross" for "001.Black_footed_Albatross"; as they are if two became one."""
    titles = [_title(name) for name in names]
    often = Counter(titles)
    return [title if often[title] == 1 else name for name, title in zip(names, titles, strict=True)]


def _title(name: str) -> str:
    spaced = " ".join(name.replace("_", " ").split())
    return re.sub(r"^(\d+\. ?|0\d*[ -])(?=[^\W\d])", "", spaced) or name


def _letter(rank: int) -> str:
    """A to Z, then AA, AB and so on."""
    before, last = divmod(rank, 26)
    return (_letter(before - 1) if before else "") + chr(ord("A") + last)
