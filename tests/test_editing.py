"""Names, hidden concepts and merges: what each does to the names, and how they are kept."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pace.editing import Edits
from pace.files import DamagedFile
from pace.naming import concept_names

FLAT = concept_names(None, np.ones(6))
KINDS = concept_names(np.array([0, 0, 0, 1, 1]), np.array([5.0, 3.0, 1.0, 2.0, 4.0]))  # A1 A2 A3 B2 B1


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "concepts.safetensors").write_bytes(b"of this fit")
    return tmp_path


def test_a_concept_is_called_what_its_user_says_and_keeps_its_number():
    edits = Edits(FLAT)
    assert edits.name(2, "  red   face ") == "2 is called 'red face'"
    name = edits.names[2]
    assert (name.long, name.label, name.short, name.number) == ("red face", "red face", "2", 2)
    assert [other.long for other in edits.names[:2]] == ["concept 0", "concept 1"]
    edits.name("red face", "beak")
    edits.name("2", "")
    assert edits.names == FLAT


def test_the_kinds_of_a_named_part_are_called_after_it_unless_they_have_names_of_their_own():
    edits = Edits(KINDS)
    edits.name("A", "head")
    edits.name("a2", "red face")
    assert [name.long for name in edits.names] == [
        "head · kind 1", "red face", "head · kind 3", "part B · kind 2", "part B · kind 1",
    ]  # fmt: skip
    assert [name.label for name in edits.names[2:4]] == ["head · kind 3", "B · kind 2"]
    assert edits.names[0].part_long == "head"
    assert edits.find("head") == [0, 1, 2]
    assert edits.find("B1") == [4]


def test_hidden_concepts_keep_their_place_and_a_part_stands_for_its_kinds():
    edits = Edits(KINDS)
    edits.hide("A", 3)
    edits.show("A1")
    assert [name.hidden for name in edits.names] == [False, True, True, True, False]
    assert [name.number for name in edits.names] == [0, 1, 2, 3, 4]


def test_merged_concepts_go_into_the_first_with_the_first_name_that_one_of_them_has():
    edits = Edits(FLAT)
    edits.name(4, "sky")
    edits.merge(3, 4)
    edits.merge(1, "sky", 0)
    assert edits.merges == [[3, 4], [1, 3, 0]]
    assert [name.into for name in edits.names] == [1, None, None, 1, 3, None]
    assert edits.names[1].long == "sky"
    assert Edits(KINDS).merge("A3", "A1") == "merge A3, A1"


def test_undo_takes_back_one_change_after_the_other():
    edits, before = Edits(KINDS), []
    for change in (
        lambda: edits.name(0, "x"),
        lambda: edits.hide(0),
        lambda: edits.merge(0, 1),
        lambda: edits.hide("A"),
    ):
        before.append(edits.names)
        change()
    assert edits.undo() == "hide A1, A3"
    assert edits.names == before.pop()
    while before:
        edits.undo()
        names = before.pop()
        assert edits.names == names
    with pytest.raises(ValueError, match="no change to take back"):
        edits.undo()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda e: e.name(9, "x"), "there is no concept 9; expected a number from 0 to 4, a kind such as A1"),
        (lambda e: e.name("tail", "x"), "there is no concept 'tail'"),
        (lambda e: e.name(-1, "x"), "there is no concept -1"),
        (lambda e: e.name(0, "x" * 61), "up to 60 printable characters"),
        (lambda e: e.name(0, "a\x1b[31m"), "up to 60 printable characters"),
        (lambda e: e.name(0, "\u202egnp"), "up to 60 printable characters"),
        (lambda e: e.merge(0, 3), r"kinds of different parts \(A and B\)"),
        (lambda e: e.merge(0, 0), "two or more different concepts"),
        (lambda e: e.merge(0), "two or more different concepts"),
        (lambda e: e.hide(), "expected concepts"),
        (lambda e: (e.merge(0, 1), e.name("A2", "x")), "A2 was merged into A1"),
        (lambda e: (e.name(0, "x"), e.name("B", "x"), e.hide("x")), r"more than one \(A1, part B\)"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_and_changes_nothing(change, line):
    edits = Edits(KINDS)
    with pytest.raises(ValueError, match=line) as refused:
        change(edits)
    assert "\n" not in str(refused.value)
    assert edits.names == Edits(KINDS)._after(edits.changes)


def test_changes_are_kept_in_the_run_at_once_and_undone_there(run: Path):
    edits = Edits(KINDS, run)
    assert not (run / "names.json").exists()
    edits.name("A", "hëad")
    edits.merge("A1", "A2")
    again = Edits(KINDS, run)
    assert again.names == edits.names
    again.undo()
    assert Edits(KINDS, run).names[1].into is None
    assert "hëad" in (run / "names.json").read_text(encoding="utf-8")


def test_changes_made_by_others_meanwhile_are_not_lost(run: Path):
    ours = [Edits(FLAT, run) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda k: [ours[k].name(k, f"{k}.{n}") for n in range(5)], range(6)))
    assert [name.given for name in Edits(FLAT, run).names] == [f"{k}.4" for k in range(6)]
    assert len(Edits(FLAT, run).changes) == 30


def test_names_of_another_fit_are_refused(run: Path):
    Edits(FLAT, run).name(0, "x")
    (run / "concepts.safetensors").write_bytes(b"of another fit")
    with pytest.raises(DamagedFile, match=r"names\.json cannot be used: it has the names of another fit; delete it"):
        Edits(FLAT, run)


@pytest.mark.parametrize(
    "harm",
    [
        lambda found: found["changes"][0].update(concepts=[77]),
        lambda found: found["changes"][0].update(concepts=[True, "1"]),
        lambda found: found["changes"][0].update(do="format"),
        lambda found: found["changes"][0].update(name="a\nb"),
        lambda found: found["changes"][0].update(name=None),
        lambda found: found["changes"][0].update(more=1),
        lambda found: found["changes"].append({"do": "merge", "concepts": [1], "part": None, "name": None}),
        lambda found: found["changes"].append({"do": "name", "concepts": [], "part": "Z", "name": "x"}),
        lambda found: found.update(format="pace-names-2"),
        lambda found: found.pop("fit"),
        lambda found: found.update(changes={}),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(run: Path, harm):
    Edits(FLAT, run).name(0, "x")
    found = json.loads((run / "names.json").read_text())
    harm(found)
    (run / "names.json").write_text(json.dumps(found))
    with pytest.raises(DamagedFile, match="delete it to begin anew") as refused:
        Edits(FLAT, run)
    assert "\n" not in str(refused.value)


def test_an_empty_or_broken_file_is_refused(run: Path):
    for content in (b"", b"{", b"[" * 100_000, b"\xff"):
        (run / "names.json").write_bytes(content)
        with pytest.raises(DamagedFile):
            Edits(FLAT, run)
