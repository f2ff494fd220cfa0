"""Finding images in the report, setting two side by side, and taking what is shown away as a table."""

import csv
import re

import numpy as np
import pytest
from report_case import HOSTILE, page_data

from pace.showing.report import write_report

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

SHOWN = ".browser-list li:not([hidden]) button"


def names_shown(page):
    return page.locator(SHOWN).evaluate_all("buttons => buttons.map((button) => button.title)")


def saved(page, tmp_path):
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as CSV").click()
    download.value.save_as(tmp_path / "saved.csv")
    with (tmp_path / "saved.csv").open(newline="", encoding="utf-8-sig") as file:
        return download.value.suggested_filename, list(csv.DictReader(file))


def test_search_goes_to_the_first_hit_and_stays_where_it_is_while_that_is_one(report, open_page):
    page = open_page(report, "#/images/5")
    for text, found in (("picture 1", 1), ("picture 2", 2), ("picture 20", 20), ("2", 20), ("no such picture", 20)):
        page.get_by_label("Search").fill(text)
        expect(page.locator("main h1")).to_have_text(f"folder/picture {found:02d}.jpg")
    assert page.get_by_label("Search").evaluate("e => e === document.activeElement")  # typing goes on


def test_enter_opens_the_first_class_that_is_found(report, open_page):
    page = open_page(report, "#/classes")
    page.get_by_label("Search").fill("oak")
    page.get_by_label("Search").press("Enter")
    expect(page.locator("main h1")).to_have_text("old oak")
    expect(page.locator(".facts")).to_contain_text("in the data 003.old_oak")


def test_images_are_filtered_by_what_is_wrong_with_them(case, report, open_page):
    data = page_data(report)
    predicted, pointed = case.observations.predictions.argmax(1), np.array(data["pointed"])
    here, view = (phi[:, 1:].argmax(2) for phi in (case.explanation.phi, case.model.explain(case.perturbed).phi))
    kept = (here.reshape(24, 6, 6)[:, :, ::-1].reshape(24, 36) == view).mean(1)  # the view is mirrored
    page = open_page(report, "#/images/0")
    choice = page.get_by_label("Show")
    expected = {"misclassified": predicted != case.images.labels, "doubtful": predicted != pointed, "lost": kept < 0.5}
    assert 0 < expected["misclassified"].sum() < 24
    for name, wrong in expected.items():
        title = choice.locator(f"option[value={name}]").text_content()
        assert re.fullmatch(rf"(Misclassified|Do not trust|Not followed) \({wrong.sum()}\)", title)
        choice.select_option(name)
        assert names_shown(page) == [case.images.names[m] for m in np.flatnonzero(wrong)]
        page.wait_for_url(re.compile(f"fault={name}"))
        if wrong.any():
            assert page.locator(".fault", has_text=title.rsplit(" ", 1)[0]).count() == 1  # said of the image as well


def test_faults_that_cannot_be_known_are_not_offered(bare, case, tmp_path, open_page):
    assert open_page(bare, "#/images/0").get_by_label("Show").count() == 0
    path = tmp_path / "r.html"
    write_report(path, case.model, case.images.pixels, case.observations)
    options = open_page(path, "#/images/0?fault=lost").get_by_label("Show").locator("option").all_text_contents()
    assert [re.sub(r" \(\d+\)", "", option) for option in options] == ["Every image", "Do not trust"]


def test_images_with_a_concept_come_by_their_share_of_it_and_can_be_asked_for_more(case, report, open_page):
    k = int(case.explanation.theta.sum(0).argmax())
    theta = case.explanation.theta[:, k]
    page = open_page(report, f"#/images/0?concept={k}")
    order = [m for m in np.argsort(-theta, kind="stable") if theta[m] >= 0.01]
    assert names_shown(page) == [case.images.names[m] for m in order]
    page.get_by_label("At least").fill("30")
    assert names_shown(page) == [case.images.names[m] for m in order if theta[m] >= 0.3]
    page.wait_for_url(re.compile("min=30"))
    page.get_by_role("button", name="Next image").click()
    page.get_by_label("Contains").select_option("")
    assert not page.get_by_label("At least").is_visible()
    assert names_shown(page) == case.images.names


def test_two_images_are_set_side_by_side_with_what_tells_them_apart(case, report, open_page):
    theta = case.explanation.theta
    page = open_page(report, "#/images/3")
    page.get_by_role("button", name="Set beside another").click()
    expect(page.get_by_text("Choose another image")).to_be_visible()
    page.get_by_role("button", name="Next image").click()
    card = page.get_by_role("region", name="Side by side")
    expect(card.locator("figcaption b")).to_have_text([case.images.names[m] for m in (3, 4)])
    expect(card).to_contain_text(f"{100 * np.minimum(theta[3], theta[4]).sum():.0f} % of what they are made of")
    k = int(abs(theta[3] - theta[4]).argmax())
    first = card.locator("li").first
    expect(first.locator("a")).to_have_text(f"Concept {k}")
    expect(first.locator(".figure")).to_contain_text(" · ")
    page.wait_for_url(re.compile("images/4.*beside=3"))
    page = open_page(report, page.evaluate("location.hash"))  # a link shows the same
    expect(card.locator("canvas")).to_have_count(2)
    card.get_by_role("button", name="Close").click()
    expect(card).to_have_count(0)


def test_what_is_listed_is_saved_as_a_table(case, report, open_page, tmp_path):
    data = page_data(report)
    page = open_page(report, "#/images/0")
    page.get_by_label("Search").fill("picture 1")
    name, rows = saved(page, tmp_path)
    assert name == "images.csv"
    assert [row["image"] for row in rows] == names_shown(page)
    k, m = data["order"][0], case.images.names.index(rows[2]["image"])
    assert float(rows[2][f"concept {k} (share by attention)"]) == pytest.approx(case.explanation.theta[m, k], abs=1e-4)
    assert rows[2]["predicted"] == data["classNames"][case.observations.predictions[m].argmax()]
    page = open_page(report, "#/concepts")
    name, rows = saved(page, tmp_path)
    assert (name, [row["concept"] for row in rows]) == ("concepts.csv", [f"concept {k}" for k in data["order"][:6]])
    page = open_page(report, "#/classes?q=oak")
    assert [row["class"] for row in saved(page, tmp_path)[1]] == ["003.old_oak"]


def test_names_are_whole_in_tables_and_never_formulas(case, open_page, tmp_path):
    path = tmp_path / "r.html"
    write_report(path, case.model, case.images.pixels, case.observations, class_names=[HOSTILE, "+b", "c"])
    text = path.read_text(encoding="utf-8").replace('"image 1"', '"=1+\\"2\\",3\\n"').replace('"image 2"', '"-5"')
    path.write_text(text, encoding="utf-8")
    _, rows = saved(open_page(path, "#/images/0"), tmp_path)
    assert [row["image"] for row in rows[:4]] == ["image 0", '\'=1+"2",3\n', "'-5", "image 3"]
    assert {row["predicted"] for row in rows} <= {HOSTILE, "'+b", "c"}


def test_a_page_opens_on_the_image_it_is_about_unless_a_link_says_otherwise(case, tmp_path, open_page):
    path = tmp_path / "r.html"
    write_report(path, case.model, case.images.pixels, case.observations, first=2)
    page = open_page(path)
    expect(page.locator("main h1")).to_have_text("image 2")
    page.locator(".brand").click()
    expect(page.locator("main h1")).to_have_text(re.compile("concepts in 24 images"))
    expect(open_page(path, "#/trust").locator("main h1")).to_have_text("Can it be trusted?")
