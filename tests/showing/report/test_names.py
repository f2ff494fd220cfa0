"""Reports of concepts that their user has named, hidden and merged."""

from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from report_case import HOSTILE, AsIs, page_data

from pace.editing import Edits
from pace.naming import concept_names
from pace.showing.report import write_report

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

PART_OF = np.array([0, 1, 2, 0, 1, 0, 2, 0])


def written(case, edits, path, part_of=None):
    """A report with these edits, of flat concepts or of kinds."""
    model = copy(case.model)
    model.names_ = edits.names
    nested = {} if part_of is None else {"part_of": part_of, "weights": None, "prior": None}
    explanation = replace(case.explanation, called=edits.names, **nested)
    write_report(path, model, case.images, case.observations, explanation=explanation, preprocessing=AsIs())
    return SimpleNamespace(path=path, explanation=explanation, order=page_data(path)["order"])


@pytest.fixture(scope="module")
def flat(case, tmp_path_factory):
    """The largest concept has a hostile name, and the second is hidden."""
    largest = np.argsort(-case.model.concept_weights_)[:2].tolist()
    edits = Edits(concept_names(None, case.model.concept_weights_))
    edits.name(largest[0], HOSTILE)
    edits.hide(largest[1])
    found = written(case, edits, tmp_path_factory.mktemp("named") / "report.html")
    found.named, found.hidden = largest
    return found


@pytest.fixture(scope="module")
def parts(case, tmp_path_factory):
    edits = Edits(concept_names(PART_OF, case.model.concept_weights_))
    edits.name("A", "head")
    edits.name("A1", "red face")
    return written(case, edits, tmp_path_factory.mktemp("parts") / "report.html", PART_OF)


def test_a_name_is_shown_as_text_with_the_concepts_number(flat, open_page):
    page = open_page(flat.path)
    expect(page.locator(".cards h2 a").first).to_have_text(HOSTILE)
    page.locator(".cards h2 a").first.click()
    expect(page.locator("main h1")).to_have_text(HOSTILE)
    expect(page.locator(".facts")).to_contain_text(f"concept {flat.named}")
    assert page.title() != "broken"
    m = int(flat.explanation.theta[:, flat.named].argmax())
    page = open_page(flat.path, f"#/images/{m}")
    expect(page.locator(".theta .who a").filter(has_text="onerror")).to_have_text(HOSTILE)


def test_hidden_concepts_are_in_no_list_and_counted(flat, open_page):
    page = open_page(flat.path)
    shown = page.locator("main a[href^='#/concepts/']").evaluate_all("links => links.map((a) => a.hash)")
    assert f"#/concepts/{flat.hidden}" not in shown
    expect(page.locator("main")).to_contain_text("1 concept is hidden.")
    m = int(flat.explanation.theta[:, flat.hidden].argmax())
    page = open_page(flat.path, f"#/images/{m}")
    names = page.locator(".theta .who a").all_inner_texts()
    assert f"Concept {flat.hidden}" not in names
    expect(page.locator("section[aria-labelledby=mixture]")).to_contain_text("1 more hidden.")
    page = open_page(flat.path, f"#/concepts/{flat.hidden}")
    expect(page.locator(".facts")).to_contain_text("hidden from lists")
    data = page_data(flat.path)
    assert data["map"][flat.hidden] is None
    assert not any(flat.hidden in concept["neighbours"] for concept in data["concepts"])
    assert not any(k == flat.hidden for found in data["classConcepts"] for k, _, _ in found)


def test_the_kinds_of_a_named_part_are_called_after_it(parts, open_page):
    names = parts.explanation.names
    page = open_page(parts.path)
    heads = page.locator(".part h2").all_inner_texts()
    assert sum(text.startswith("Head") for text in heads) == 1
    assert sum(text.startswith("Part ") for text in heads) == len(heads) - 1
    cards = page.locator(".part").filter(has=page.locator("h2", has_text="Head")).locator("h3 a").all_inner_texts()
    assert "Red face" in cards
    other = next(k for k in parts.order if names[k].part == "A" and names[k].kind == 2)
    page = open_page(parts.path, f"#/concepts/{other}")
    expect(page.locator("main h1")).to_have_text("Head · kind 2")
    expect(page.locator("#siblings")).to_have_text("Other kinds of head")


def test_a_concept_that_was_merged_says_into_which(case, tmp_path, open_page):
    model = case.model.merged(1, 0)
    edits = Edits(concept_names(None, case.model.concept_weights_))
    edits.merge(1, 0)
    model.names_ = edits.names
    path = tmp_path / "report.html"
    write_report(path, model, case.images, case.observations, preprocessing=AsIs())
    page = open_page(path, "#/concepts/0")
    expect(page.locator("main")).to_contain_text("This concept was merged into Concept 1.")
    page = open_page(path)
    expect(page.locator("main")).to_contain_text("1 merged into others.")
    assert 0 not in page_data(path)["order"]
