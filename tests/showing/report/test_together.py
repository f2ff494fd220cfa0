"""How concepts lie to each other and in the images: the map, what comes together, the histogram, and shares by area."""

import re

import numpy as np
import pytest
from report_case import page_data
from scipy.spatial.distance import cdist

from pace.showing.report.plane import positions

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect


def areas(explanation):
    """Of the four concepts of a patch that a page keeps; the tests' φ has hardly more."""
    phi = -np.sort(-explanation.phi[:, 1:], 2)[:, :, 3:4] <= explanation.phi[:, 1:]
    kept = np.where(phi, explanation.phi[:, 1:], 0)
    return (kept / kept.sum(2, keepdims=True)).mean(1)


def test_points_lie_with_those_of_their_own_group():
    groups = np.repeat(np.arange(5), 8)
    points = 10 * np.eye(5, 30)[groups] + np.random.default_rng(0).normal(size=(40, 30))
    found = positions(points)
    assert found.min() == 0
    assert found[:, 0].max() == 1
    assert found[:, 1].max() <= 1.1
    nearest = (cdist(found, found) + np.diag([9] * 40)).argmin(1)
    assert (groups[nearest] == groups).mean() > 0.9


@pytest.mark.parametrize("points", [np.zeros((1, 3)), np.eye(2), np.zeros((7, 3)), np.eye(40), np.ones((5, 1))])
def test_any_points_have_places_of_their_own(points):
    found = positions(points)
    assert found.shape == (len(points), 2)
    assert np.isfinite(found).all()
    assert 0 <= found.min() <= found.max() <= 1.5
    np.testing.assert_array_equal(positions(points), found)


def test_near_points_keep_room_between_them():
    points = np.concatenate([np.random.default_rng(0).normal(0, 1e-3, (30, 4)), 5 * np.eye(4)])
    found = positions(points)
    apart = cdist(found, found) + np.eye(len(found))
    assert apart.min() > 0.02


def test_the_map_shows_every_concept_in_use_and_goes_by_pointer_and_keys(case, report, open_page):
    data = page_data(report)
    page = open_page(report)
    page.get_by_role("navigation", name="Gallery or map").get_by_role("link", name="Map").click()
    expect(page.locator("main h1")).to_have_text("Map of the concepts")
    places = page.locator(".place")
    assert [int(k) for k in places.evaluate_all("all => all.map((one) => one.dataset.concept)")] == data["order"][:6]
    k = data["order"][3]
    page.locator(f".place[data-concept='{k}']").click()
    panel = page.get_by_role("region", name="Concept on the map")
    expect(panel.locator("h2 a")).to_have_text(f"Concept {k}")
    for other in data["concepts"][k]["neighbours"]:
        expect(panel).to_contain_text(f"Concept {other}")
    page.wait_for_url(re.compile(f"concepts/map.*concept={k}"))
    leftmost = min(data["order"][:6], key=lambda k: data["map"][k][0])
    for _ in range(6):
        page.keyboard.press("ArrowLeft")
    expect(page.locator(".place[aria-pressed=true]")).to_have_attribute("data-concept", str(leftmost))
    assert page.locator(".place[tabindex='0']").count() == 1  # one stop of the Tab key
    assert page.evaluate("document.activeElement.dataset.concept") == str(leftmost)


def test_concepts_that_come_together_are_counted_against_chance(case, report, open_page):
    holds = case.explanation.theta[:, :6] >= 0.01
    count = holds.sum(0)
    both = (holds[:, :, None] & holds[:, None]).sum(0)
    page, some = open_page(report), 0
    for k in range(6):
        page.evaluate(f"location.hash = '#/concepts/{k}'")
        expect(page.locator("main h1")).to_have_text(f"Concept {k}")
        rows = page.get_by_role("region", name="Comes together with").locator("li")
        for row in rows.all():
            other = int(row.locator("a").inner_text().split()[1])
            assert f"in {both[k, other]} images" in row.inner_text()
            assert both[k, other] > count[k] * count[other] / 24
            assert np.corrcoef(holds[:, k], holds[:, other])[0, 1] > 0.1
            some += 1
    assert some


def test_a_histogram_counts_images_by_their_share_and_leads_to_them(case, report, open_page):
    k = int(case.explanation.theta.mean(0).argmax())
    theta = case.explanation.theta[:, k]
    page = open_page(report, f"#/concepts/{k}")
    card = page.get_by_role("region", name="How much of it images have")
    expect(card).to_contain_text(f"{(theta >= 0.01).sum()} images have 1 % of it or more, {(theta < 0.01).sum()} less")
    labels = card.locator(".count").evaluate_all("all => all.map((one) => one.ariaLabel)")
    counts = np.histogram(theta, [0.01, *np.arange(1, 11) / 10])[0]
    assert [int(label.split()[0]) for label in labels] == counts.tolist()
    highest = int(np.flatnonzero(counts)[-1])
    card.locator("a.count").last.click()
    page.wait_for_url(re.compile(rf"images/{theta.argmax()}\?.*concept={k}"))
    shown = page.locator(".browser-list li:not([hidden])")
    expect(shown).to_have_count(int((theta >= max(0.01, highest / 10)).sum()))


def test_shares_say_that_they_go_by_attention_and_can_go_by_area(case, report, open_page):
    area = areas(case.explanation)
    page = open_page(report)
    expect(page.locator(".lead")).to_contain_text("Shares are weighted by attention")
    page.get_by_role("button", name="area").click()
    expect(page.locator(".lead")).to_contain_text("Shares are of the area")
    assert page.get_by_role("button", name="area").evaluate("e => e === document.activeElement")
    found = {
        int(name.split()[1]): float(share.removesuffix(" %")) / 100
        for name, share in page.locator(".page > .cards h2").evaluate_all(
            "all => all.map((one) => [one.firstChild.textContent, one.lastChild.textContent])"
        )
    }
    shares = area.mean(0)
    assert list(found) == sorted(found, key=lambda k: -shares[k])
    assert found == pytest.approx({k: shares[k] for k in found}, abs=0.006)
    page.get_by_role("link", name="Images").first.click()  # the choice stays, and is in the address
    page.wait_for_url(re.compile("by=area"))
    page = open_page(report, "#/images/4?by=area")
    rows = page.locator(".detail .theta li")
    k = int(re.search(r"\d+", rows.first.locator(".who").inner_text())[0])
    assert k == area[4].argmax()
    expect(rows.first.locator(".figure")).to_have_text(f"{100 * area[4, k]:.0f} %")
    assert page.locator(".detail .theta .bar i").count() == 0  # intervals are of θ
    page.get_by_role("button", name="attention").click()
    expect(page.locator(".detail .theta .bar i").first).to_be_visible()
    page.wait_for_url(re.compile(r"images/4$"))
