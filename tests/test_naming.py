import numpy as np

from pace.naming import class_titles, concept_names


def test_parts_are_lettered_and_kinds_numbered_by_use():
    names = concept_names(np.array([0, 1, 0, 1, 2]), np.array([1.0, 2.0, 5.0, 8.0, np.nan]))
    assert [name.short for name in names] == ["B2", "A2", "B1", "A1", "C1"]
    assert names[2].long == "part B · kind 1"
    assert (names[2].part, names[2].kind) == ("B", 1)


def test_equal_use_keeps_the_order_of_the_numbers():
    background = concept_names(np.array([0, 1, 0]), np.array([2.0, 9.0, 4.0]), np.array([True, False]))
    assert [name.long for name in background] == ["background B · kind 2", "part A · kind 1", "background B · kind 1"]
    assert [name.short for name in concept_names(np.array([1, 0, 1]), np.array([2.0, 4.0, 2.0]))] == ["B1", "A1", "B2"]


def test_after_z_come_two_letters():
    letters = [name.part for name in concept_names(np.arange(703), np.ones(703))]
    assert letters[25:28] == ["Z", "AA", "AB"]
    assert letters[701:] == ["ZZ", "AAA"]


def test_concepts_that_are_no_kinds_have_their_number():
    names = concept_names(None, np.ones(13))
    assert names[12].long == "concept 12"
    assert names[12].short == "12"
    assert names[12].part is None


def test_class_names_are_shown_without_the_numbers_and_underscores_of_folders():
    names = [
        "001.Black_footed_Albatross",
        "02_tulip",
        "007-james bond",
        "12. rose",
        "3.5_inch_disk",
        "747-200",
        "2_stroke",
        "04",
    ]
    shown = ["Black footed Albatross", "tulip", "james bond", "rose", "3.5 inch disk", "747-200", "2 stroke", "04"]
    assert class_titles(names) == shown
    assert class_titles(["01.cat", "02.cat", "_", "03.dog"]) == ["01.cat", "02.cat", "_", "dog"]
