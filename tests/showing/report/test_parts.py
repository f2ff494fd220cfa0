"""Reports whose concepts are kinds of parts."""

import re

import numpy as np
import pytest
from report_case import HOSTILE, page_data

from pace.showing import summary

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

REGIONS = "e => [...e.getContext('2d').getImageData(0, 0, e.width, e.height).data]"


def named(kinds, k):
    name = kinds.names[k].long
    return name[0].upper() + name[1:]


def test_flat_concepts_have_numbers_and_no_parts(report):
    data = page_data(report)
    assert data["parts"] is None
    assert [concept["name"] for concept in data["concepts"]] == [f"concept {k}" for k in range(8)]


def test_the_page_carries_the_parts_and_their_intervals(kinds):
    data = page_data(kinds.path)
    assert [concept["short"] for concept in data["concepts"]] == [name.short for name in kinds.names]
    assert [concept["part"] for concept in data["concepts"]] == kinds.explanation.part_of.tolist()
    assert sum(part["share"] for part in data["parts"]) == pytest.approx(1)
    assert {part["letter"] for part in data["parts"]} == {"A", "B", "C"}
    assert {"partLow", "partHigh"} <= data["perturbed"].keys()


def test_the_gallery_is_grouped_by_part_largest_first(kinds, open_page):
    data = page_data(kinds.path)
    page = open_page(kinds.path)
    assert page.locator("main h1").inner_text() == "3 parts of 6 kinds in 24 images"
    parts = sorted(data["parts"], key=lambda part: -part["share"])
    heads = [text.split() for text in page.locator(".part h2").all_inner_texts()]
    assert [words[1] for words in heads] == [part["letter"] for part in parts]
    used = [[k for k in part["kinds"] if data["concepts"][k]["used"]] for part in parts]
    assert [words[-2] for words in heads] == [str(len(own)) for own in used]
    for section, own in zip(page.locator(".part").all(), used, strict=True):
        expect(section.locator("h3 a")).to_have_text([f"Kind {kinds.names[k].kind}" for k in own])
    page.locator(".part h3 a").first.click()
    expect(page.locator("main h1")).to_have_text(named(kinds, used[0][0]))
    others = page.locator("section[aria-labelledby=siblings] h3 a")
    expect(others).to_have_text([named(kinds, k) for k in used[0][1:]])


def test_an_image_lists_its_parts_with_their_kind_largest_first(kinds, open_page):
    explanation = kinds.explanation
    page = open_page(kinds.path, "#/images/3")
    order = [p for p in np.argsort(-explanation.parts[3], kind="stable") if explanation.parts[3, p] >= 0.01]
    low, high = (end[3] for end in explanation.part_interval(0.9))
    lead = [int(np.where(explanation.part_of == p, explanation.theta[3], -1).argmax()) for p in order]
    rows = page.locator(".theta li")
    expect(rows.locator(".who a")).to_have_text([named(kinds, k) for k in lead])
    expect(rows.locator(".figure")).to_have_text([f"{100 * explanation.parts[3, p]:.0f} %" for p in order])
    ends = f"{100 * low[order[0]]:.0f} to {100 * high[order[0]]:.0f} %"
    expect(rows.first.locator("small")).to_contain_text(ends)
    assert rows.first.locator(".strip a").count() == 6  # typical patches of its kind


def test_a_part_is_highlighted_while_pointed_at_and_kept_when_chosen(kinds, open_page):
    page = open_page(kinds.path, "#/images/3")
    overlay = page.locator(".stage canvas").first
    row = page.locator(".theta li").first
    letter = row.locator(".who a").inner_text()[5]
    expect(overlay).to_be_hidden()
    row.locator(".figure").hover()
    expect(overlay).to_be_visible()
    part = int(row.locator(".toggle").get_attribute("data-toggle").removeprefix("part-"))
    dark = np.reshape(overlay.evaluate(REGIONS), (6, 16, 6, 16, 4))[:, 8, :, 8, 3] / 255
    np.testing.assert_allclose(dark, 0.8 * (1 - kinds.explanation.part_map(3, part)), atol=0.02)
    page.mouse.move(0, 0)
    expect(overlay).to_be_hidden()
    row.get_by_role("button", name=f"Highlight Part {letter} in the image").click()
    page.wait_for_url(re.compile(f"overlay=part-{part}"))
    page.mouse.move(0, 0)
    expect(overlay).to_be_visible()
    expect(page.get_by_role("button", name=f"Part {letter}", exact=True)).to_have_attribute("aria-pressed", "true")


def test_a_part_that_does_not_exist_is_ignored(kinds, report, open_page):
    for path in (kinds.path, report):
        page = open_page(path, "#/images/3?overlay=part-3")
        expect(page.locator(".stage canvas").first).to_be_hidden()


def test_a_class_names_kinds_and_is_told_from_another(kinds, open_page):
    page = open_page(kinds.path, "#/classes/1")
    concepts = page_data(kinds.path)["classConcepts"][1]
    expect(page.locator(".voice h2 a")).to_have_text([named(kinds, k) for k, _, _ in concepts])
    some = 0
    for other in (0, 2):
        page.get_by_label("Compared with").select_option(str(other))
        found = summary.contrast(kinds.explanation.theta, kinds.explanation.part_of, kinds.classes, 1, other)
        rows = page.locator(".contrast li")
        expect(rows).to_have_count(len(found))
        for row, one in zip(rows.all(), found, strict=True):
            shown = [link.get_attribute("aria-label") for link in row.locator("a").all()]
            assert shown == [named(kinds, one.kind_in_a), named(kinds, one.kind_in_b)]
            assert row.locator(".figure").inner_text() == f"{100 * one.difference:.0f} %"
        some += len(found)
    assert some
    assert HOSTILE in page.get_by_label("Compared with").inner_text()


def test_every_view_speaks_of_parts_and_kinds_not_of_numbers(kinds, open_page):
    page = open_page(kinds.path)
    for view in ("concepts", "concepts/0", "images/3?patch=7&overlay=all", "classes", "classes/0", "trust"):
        page.goto("about:blank")
        page.goto(f"{kinds.path.as_uri()}#/{view}")
        page.locator("main h1").wait_for()
        assert not re.search(r"[Cc]oncept \d", page.locator("main").inner_text()), view
    page.goto("about:blank")
    page.goto(f"{kinds.path.as_uri()}#/images/3?overlay=all")
    expect(page.locator(".regions span").first).to_have_text(re.compile(r"^[ABC]\d$"))
