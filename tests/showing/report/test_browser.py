"""The report in a real browser. The `open_page` fixture fails a test whose page complains or requests anything."""

import re
from itertools import pairwise

import numpy as np
import pytest
from report_case import HOSTILE, HOSTILE_FILE, HOSTILE_TITLE, fit, page_data

from pace.showing.report import write_report

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

VIEWS = (
    "concepts", "concepts/0", "concepts/map", "images", "images/3?patch=7&overlay=all",
    "images/4?patch=7&on=perturbed&overlay=kept", "images/4?concept=0&fault=misclassified&beside=3",
    "classes", "classes/0", "trust",
)  # fmt: skip
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}


def heading(page):
    return page.locator("main h1").inner_text()


def arrived(page, view):
    """Wait until a view is there: a fragment's change is heard of only a moment later."""
    expect(page.locator(f"nav [data-view={view}]")).to_have_attribute("aria-current", "page")


def go(page, view):
    """Show a view of the report that is open already; this listener is called after the page's own."""
    page.evaluate(
        """view => new Promise((done) => {
            if (location.hash === `#/${view}`) return done();
            addEventListener("hashchange", () => done(), { once: true });
            location.hash = `#/${view}`;
        })""",
        view,
    )
    arrived(page, view.split("/")[0])


def fragment(page, pattern):
    page.wait_for_url(re.compile(rf"#.*{pattern}"))


def pick(page, patch, which=0):
    """Click the middle of a patch of the 6 x 6 grid."""
    box = page.locator(".stage").nth(which).bounding_box()
    x, y = box["x"] + box["width"] * (patch % 6 + 0.5) / 6, box["y"] + box["height"] * (patch // 6 + 0.5) / 6
    page.mouse.click(x, y)


# -- concepts ---------------------------------------------------------------------------------------------------------


def test_concepts_are_shown_by_use_and_unused_ones_folded_away(report, open_page):
    data = page_data(report)
    page = open_page(report)
    assert heading(page) == "6 concepts in 24 images"
    shown = page.locator(".page > .cards h2 a").all_inner_texts()
    assert shown == [f"Concept {k}" for k in data["order"] if data["concepts"][k]["used"]]
    expect(page.get_by_role("link", name=re.compile(r"Trust\s*, \d+ warning"))).to_be_visible()  # in every view
    assert not page.get_by_role("link", name="Concept 7", exact=True).is_visible()
    page.get_by_text("2 concepts are not in use").click()
    page.get_by_role("link", name="Concept 7", exact=True).click()
    expect(page.locator(".lead")).to_contain_text("not in use")


def test_one_concept_shows_patches_in_their_image_classes_and_neighbours(report, open_page):
    data = page_data(report)
    k = data["order"][0]
    page = open_page(report, f"#/concepts/{k}")
    assert heading(page) == f"Concept {k}"
    m, patch = data["concepts"][k]["near"][0]
    sample = page.locator(".samples .sample").first
    assert sample.get_attribute("href") == f"#/images/{m}?patch={patch}"
    # The mark lies on the patch: left and top are its column and row.
    spot = sample.locator(".spot").evaluate("e => [parseFloat(e.style.left), parseFloat(e.style.top)]")
    assert spot == pytest.approx([100 * (patch % 6) / 6, 100 * (patch // 6) / 6], abs=0.01)
    assert page.get_by_role("list", name="Classes, most favoured first").get_by_role("listitem").count() == 3
    neighbours = page.locator("section[aria-labelledby=neighbours] h3 a").all_inner_texts()
    assert neighbours == [f"Concept {other}" for other in data["concepts"][k]["neighbours"]]


def test_empty_concepts_are_one_line_and_all_views_agree_on_how_many(pruned, open_page):
    used, line = pruned.used, f"{30 - pruned.used} of 30 concepts stayed empty"
    order = page_data(pruned.path)["order"]
    assert 2 < used == len(order) < 15
    page = open_page(pruned.path)
    assert heading(page) == f"{used} concepts in 24 images"
    assert page.locator(".concept").count() == used
    assert page.locator("details").count() == 0
    expect(page.locator(".page")).to_contain_text(line)
    page.get_by_role("link", name="How the number was found").click()
    expect(page.locator("main h1")).to_have_text(f"{used} concepts were found")
    expect(page.locator(".lead")).to_contain_text("30 were asked for; the others stay empty")
    assert "After the fit" not in page.locator(".lead").inner_text()
    go(page, "trust")
    facts = page.get_by_role("region", name="Counts for these images")
    expect(facts).to_contain_text(f"{used} of 30")
    expect(facts).to_contain_text(f"{line} when the model was fitted.")
    go(page, f"concepts/{order[-1]}")
    expect(page.locator(".facts")).to_contain_text(f"#{used} of {used} by use")
    assert page.locator(".steps a").all_inner_texts() == ["← More used"]
    go(page, "concepts/29")
    expect(page.locator(".lead")).to_contain_text("This concept stayed empty")
    assert page.locator("section, .sample, .card").count() == 0


# -- the number of concepts -------------------------------------------------------------------------------------------


def test_the_number_view_shows_the_bound_and_each_concepts_evidence(pruned, report, open_page):
    selection = pruned.model.selection_
    k = selection.n_concepts
    page = open_page(pruned.path, "#/number")
    assert heading(page) == f"{k} concepts were found"
    assert page.get_by_role("region", name="Do not rely on the exact number").is_visible()
    assert page.get_by_role("img", name=re.compile(f"best with {k}, ")).first.is_visible()
    chart = page.locator(".chart").first
    points = [
        tuple(map(float, point.split(","))) for point in chart.locator("polyline").get_attribute("points").split()
    ]
    assert len(points) == len(selection.numbers)
    top = min(points, key=lambda point: point[1])  # down the page
    assert top[0] == pytest.approx(float(chart.locator(".marked").get_attribute("x1")), abs=0.1)
    rows = page.locator("table tbody tr").all_inner_texts()
    near = [number for number in selection.numbers.tolist() if abs(number - k) <= 3]
    assert [int(re.match(r"\d+", row)[0]) for row in rows] == near
    assert page.locator("tr.found").inner_text().split()[-2:] == ["0", "nats"]
    concepts = page.get_by_role("list", name="Concepts, those with most evidence first").get_by_role("listitem")
    assert concepts.get_by_role("link").all_inner_texts() == [f"Concept {rank}" for rank in range(k)]
    assert f"{selection.evidence[0]:,.0f} nats" in concepts.first.inner_text()
    concepts.get_by_role("link").last.click()
    expect(page.locator("main h1")).to_have_text(f"Concept {k - 1}")
    # A link to it in the report of a model that was given the number shows something all the same.
    other = open_page(report, "#/number")
    assert heading(other) == "6 concepts in 24 images"
    assert other.get_by_role("link", name="Number").count() == 0


# -- images -----------------------------------------------------------------------------------------------------------


def swatches(page):
    """The colour of each concept beside an image that is coloured by all concepts."""
    return dict(
        page.locator(".theta li:has(.swatch)").evaluate_all(
            "rows => rows.map((row) => [row.querySelector('a').textContent, row.querySelector('.swatch').style.background])"
        )
    )


def test_few_concepts_have_one_colour_each_in_every_image_like_that_of_their_patches(pruned, open_page):
    page = open_page(pruned.path, "#/images/0?overlay=all")
    seen = {}
    for _ in range(8):
        page.locator(".regions span").first.wait_for()
        for concept, colour in swatches(page).items():
            assert seen.setdefault(concept, colour) == colour
        assert not page.get_by_text("Grey patches").is_visible()
        page.get_by_role("button", name="Next image").click()
    assert len(set(seen.values())) == len(seen) == pruned.used
    vermilion, green, yellow, navy = "rgb(226, 104, 60)", "rgb(43, 179, 138)", "rgb(232, 220, 60)", "rgb(28, 46, 74)"
    assert [seen[f"Concept {k}"] for k in range(4)] == [vermilion, green, yellow, navy]


def test_of_many_concepts_those_with_most_patches_here_are_coloured_and_grey_is_explained(case, tmp_path, open_page):
    model = fit(case.observations, n_concepts=14, max_iter=1, parts=None)
    explanation = model.explain(case.observations)
    explanation.phi[:] = np.random.default_rng(0).dirichlet(np.full(14, 0.02), explanation.phi.shape[:2])
    path = tmp_path / "r.html"
    write_report(path, model, case.images.pixels, case.observations, explanation=explanation)
    page = open_page(path, "#/images/0?overlay=all")
    page.locator(".regions span").first.wait_for()
    concepts, patches = np.unique(explanation.phi[0, 1:].argmax(1), return_counts=True)
    coloured = {int(text) for text in page.locator(".regions span").all_inner_texts()}
    assert len(coloured) == 8 < len(concepts)
    assert patches[np.isin(concepts, list(coloured))].min() >= patches[~np.isin(concepts, list(coloured))].max()
    expect(page.get_by_text("Grey patches belong to concepts with fewer patches in this image.")).to_be_visible()
    page.get_by_role("button", name="Picture", exact=True).click()
    expect(page.get_by_text("Grey patches")).to_be_hidden()


def test_pointing_at_a_patch_shows_its_mixture_and_picking_keeps_it(case, report, open_page):
    page = open_page(report, "#/images/2")
    panel = page.locator(".panel")
    box = page.locator(".stage").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 2.5 / 6, box["y"] + box["height"] * 1.5 / 6)
    page.get_by_role("heading", name="Patch at row 2, column 3").wait_for()
    phi = case.explanation.phi[2, 1 + 8]  # one prefix token before the patches
    first = panel.locator(".mixture li").first.inner_text()
    assert f"Concept {phi.argmax()}" in first
    assert f"{100 * phi.max():.0f} %" in first
    assert panel.locator(".strip .crop").count() == 6
    page.mouse.move(1, 1)
    page.get_by_role("heading", name="No patch selected").wait_for()
    pick(page, 8)
    page.mouse.move(1, 1)
    assert panel.get_by_role("heading", name="Patch at row 2, column 3").is_visible()
    fragment(page, "patch=8")


def test_an_image_shows_theta_with_intervals_and_what_drove_the_prediction(case, report, open_page):
    page = open_page(report, "#/images/4")
    explanation, moved = case.explanation, case.model.explain(case.perturbed)
    low, high = explanation.interval(0.9)
    row = page.locator(".theta li").first
    text = row.inner_text()
    k = int(re.search(r"Concept (\d+)", text)[1])
    assert f"{100 * explanation.theta[4, k]:.0f} %" in text
    assert f"{100 * low[4, k]:.0f} to {100 * high[4, k]:.0f} %" in text
    assert f"perturbed {100 * moved.theta[4, k]:.0f} %" in text
    assert row.locator(".bar.original i").count() == row.locator(".bar.perturbed i").count() == 1
    parts = explanation.theta[4] * case.model.evidence_[:, int(case.observations.predictions[4].argmax())]
    k = int(abs(parts).argmax())
    first = page.locator(".carried li").first.inner_text()
    assert f"Concept {k}" in first
    assert f"{abs(parts[k]):.2f}" in first
    assert ("−" in first) == (parts[k] < 0)


def test_a_concept_can_be_highlighted_on_both_pictures_which_stay_in_sight(case, report, open_page):
    page = open_page(report, "#/images/4")
    toggle = page.locator(".theta .toggle").first
    k = toggle.get_attribute("data-toggle")
    toggle.click()
    fragment(page, f"overlay={k}")
    assert page.locator(".stage canvas:visible").count() == 2
    assert toggle.get_attribute("aria-pressed") == "true"
    alpha = page.locator(".stage canvas").first.evaluate(
        """c => {
            const { data } = c.getContext('2d').getImageData(0, 0, c.width, c.height);
            const middle = (place, length) => Math.floor((place + 0.5) * length / 6);
            return Array.from({ length: 36 }, (_, patch) =>
                data[4 * (middle(Math.floor(patch / 6), c.height) * c.width + middle(patch % 6, c.width)) + 3]);
        }"""
    )
    phi = case.explanation.patch_map(4, int(k)).ravel()
    np.testing.assert_allclose(alpha, 204 * (1 - phi), atol=3)  # clear where the concept is, dark elsewhere
    page.get_by_role("button", name="All concepts").click()
    assert page.locator(".regions span").first.is_visible()
    page.get_by_role("button", name="Picture", exact=True).click()
    assert page.locator(".stage canvas:visible").count() == 0
    page.evaluate("scrollTo(0, 300)")
    assert page.locator(".stage").first.bounding_box()["y"] > 60  # below the bar at the top


def test_a_perturbed_view_shows_which_places_kept_their_concept(case, report, open_page):
    here, view = (phi[:, 1:].argmax(2) for phi in (case.explanation.phi, case.model.explain(case.perturbed).phi))
    here = here.reshape(24, 6, 6)[:, :, ::-1].reshape(24, 36)  # the view is mirrored
    kept = here == view
    m = int(np.argmin(abs(kept.mean(1) - 0.5)))
    assert 0 < kept[m].sum() < 36
    page = open_page(report, f"#/images/{m}")
    expect(page.locator(".look")).to_contain_text(f"{kept[m].sum()} of 36 places kept their concept")
    page.get_by_role("button", name="Kept concepts").click()
    fragment(page, "overlay=kept")
    expect(page.get_by_text("Green places kept their concept, crossed ones changed it.")).to_be_visible()
    red = (
        page.locator(".stage canvas")
        .nth(1)
        .evaluate(
            """c => {
            const { data } = c.getContext('2d').getImageData(0, 0, 96, 96);
            const at = (patch) => 4 * (96 * (16 * Math.floor(patch / 6) + 2) + 16 * (patch % 6) + 2);
            return Array.from({ length: 36 }, (_, patch) => data[at(patch)] > data[at(patch) + 1]);
        }"""
        )
    )
    assert red == (~kept[m]).tolist()
    changed = int(np.flatnonzero(~kept[m])[0])
    pick(page, changed, which=1)
    expect(page.locator(".panel")).to_contain_text(f"In the original this place has Concept {here[m, changed]}.")
    expect(page.locator("#live")).to_contain_text("In the original this place has")
    boxes = [page.locator(".cursor").nth(which).evaluate("e => parseFloat(e.style.left)") for which in (0, 1)]
    assert sum(boxes) == pytest.approx(500 / 6, abs=0.1)  # the same place, framed in both


def test_images_are_searched_and_filtered(case, report, open_page):
    page = open_page(report, "#/images/0")
    shown = page.locator(".browser-list li:not([hidden])")
    page.get_by_label("Search").fill("picture 1")
    assert shown.count() == sum("picture" in name and "1" in name for name in case.images.names)
    fragment(page, "q=picture")
    page.get_by_label("Search").fill("")
    predicted = case.observations.predictions.argmax(1)
    page.get_by_label("Predicted as").select_option(str(predicted[5]))
    assert shown.count() == (predicted == predicted[5]).sum()
    page.get_by_label("Search").fill("no such image")
    assert page.get_by_text("0 of 24 images").is_visible()
    k = page_data(report)["order"][0]
    containing = int((case.explanation.theta[:, k] >= 0.01).sum())
    assert 8 < containing < 24
    go(page, f"concepts/{k}")
    page.get_by_role("link", name=f"See all {containing} images").click()
    arrived(page, "images")
    assert heading(page) == case.images.names[case.explanation.theta[:, k].argmax()]
    expect(shown).to_have_count(containing)
    expect(page.get_by_label("Contains")).to_have_value(str(k))


# -- classes and trust ------------------------------------------------------------------------------------------------


def test_classes_are_searched_and_show_their_concepts(report, open_page):
    page = open_page(report, "#/classes")
    page.get_by_label("Search").fill("THORN")
    assert page.locator(".card.class:visible").count() == 1
    fragment(page, "q=THORN")
    page.get_by_role("link", name="rose & <b>thorn</b>").click()
    expect(page.locator("main h1")).to_have_text("rose & <b>thorn</b>")
    expected = [f"Concept {k}" for k, _, _ in page_data(report)["classConcepts"][1]]
    assert page.locator(".voice h2 a").all_inner_texts() == expected


def test_trust_leads_with_the_verdict_then_images_warnings_and_scores(case, report, open_page):
    page = open_page(report, "#/trust")
    assert page.locator(".verdict").inner_text() == case.scores.verdict
    assert "collapsed to one concept" in page.get_by_role("alert").inner_text()
    heads = page.locator("main h2").all_inner_texts()
    assert heads[:3] == ["The most telling images", "One warning", "Scores"]
    scores = page.get_by_role("region", name="Scores")
    assert "Stability ratio\n0.70" in scores.inner_text()
    assert not page.get_by_text("A score of one's own").is_visible()
    scores.get_by_text("All scores").click()
    assert page.get_by_text("A score of one's own").is_visible()
    assert page.locator(".chart polyline").count() == 4
    assert page.get_by_role("img", name=re.compile("Total: from")).is_visible()


def test_trust_shows_telling_images_with_a_sentence_and_leads_to_them(report, open_page):
    page = open_page(report, "#/trust")
    cards = page.locator(".telling a")
    found = page_data(report)["telling"]
    assert [one["why"] for one in found] == ["best", "worst", "covered"]
    best, worst, covered = (f"{100 * one['share']:.0f} % of the" for one in found)
    expect(cards.nth(0)).to_contain_text(f"Best followed{best} places kept their concept")
    expect(cards.nth(1)).to_contain_text(f"Worst followed{worst} places kept their concept")
    expect(cards.nth(2)).to_contain_text(f"{covered} picture is concept {found[2]['concept']}")
    assert cards.nth(0).locator("img").count() == 2
    expect(cards.nth(0).locator(".regions span").first).to_be_visible()
    cards.nth(1).click()
    arrived(page, "images")
    fragment(page, f"images/{found[1]['image']}\\?overlay=kept")


def test_a_report_without_classes_scores_or_perturbed_pictures_says_what_it_can(bare, open_page):
    page = open_page(bare, "#/trust")
    assert page.locator(".verdict").inner_text() == "Not known: this report has no scores."
    assert page.get_by_text("Run pace evaluate before pace report").is_visible()
    assert page.get_by_text("pace report makes them unless it is given --no-pairs").is_visible()
    assert page.locator(".telling a").all_inner_texts()[0].startswith("Most covered by one concept")
    go(page, "classes")
    assert heading(page) == "No classes"
    go(page, "images")
    expect(page.locator(".stage")).to_have_count(1)
    expect(page.locator(".detail")).to_contain_text("of the mixture moved to other concepts.")
    expect(page.locator(".theta .bar.perturbed").first).to_be_visible()


# -- links ------------------------------------------------------------------------------------------------------------


def test_a_path_of_clicks_leads_through_every_view_and_back(report, open_page):
    page = open_page(report)
    page.locator(".concept .cover").first.click()
    page.locator(".samples .sample").first.click()
    page.get_by_role("heading", name=re.compile("Patch at row")).wait_for()
    page.locator(".panel .mixture a").first.click()
    expect(page.locator("main h1")).to_have_text(re.compile("^Concept "))
    page.get_by_role("list", name="Classes, most favoured first").get_by_role("link").first.click()
    page.locator(".voice .sample.image").first.click()
    expect(page.locator(".stage canvas:visible")).to_have_count(2)  # the class's concept is highlighted
    page.get_by_role("link", name="Trust").click()
    expect(page.locator("main h1")).to_have_text("Can it be trusted?")
    page.go_back()
    page.locator(".stage").first.wait_for()
    page.go_back()
    page.locator(".voice").first.wait_for()


def test_a_link_restores_everything_that_was_chosen(report, open_page):
    page = open_page(report, "#/images/3")
    pick(page, 14, which=1)
    page.get_by_role("button", name="All concepts").click()
    page.get_by_label("Search").fill("folder")
    fragment(page, "q=folder")
    page = open_page(report, page.evaluate("location.hash"))
    assert heading(page) == "folder/picture 03.jpg"
    assert page.get_by_role("heading", name="Patch at row 3, column 3").inner_text().endswith("perturbed")
    assert page.get_by_role("button", name="All concepts").get_attribute("aria-pressed") == "true"
    assert page.get_by_label("Search").input_value() == "folder"


@pytest.mark.parametrize(
    "nonsense", ["#/nowhere", "#/concepts/999", "#/images/-1?patch=x&overlay=99&class=7", "#/classes/%E0%A4%A"]
)
def test_links_that_make_no_sense_still_show_something(report, open_page, nonsense):
    assert heading(open_page(report, nonsense))


# -- safety -----------------------------------------------------------------------------------------------------------


def test_hostile_names_are_text_everywhere(report, open_page):
    page = open_page(report)
    for view in ("concepts/0", "images/0?patch=0", "images/1", "classes", "classes/0", "trust"):
        go(page, view)
        assert page.title().endswith(HOSTILE_TITLE)
        assert page.locator(".brand .name").inner_text() == HOSTILE_TITLE
        assert page.locator("img[src='x'], main script, main b b").count() == 0
        if view == "images/0?patch=0":
            assert page.locator("main h1").text_content() == HOSTILE_FILE
        if view in ("classes/0", "trust", "classes"):
            assert HOSTILE in page.locator("main").inner_text()


def test_the_policy_stops_what_is_smuggled_in(report, tmp_path, browser):
    """Were something to get past the escaping, the browser would not run it."""
    path = tmp_path / "smuggled.html"
    text = report.read_text(encoding="utf-8")
    smuggled = "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'><img src='https://example.org/'>"
    path.write_text(text.replace("<noscript>", smuggled + "<noscript>", 1), encoding="utf-8")
    context = browser.new_context(offline=True)
    page = context.new_page()
    refused = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto(path.as_uri() + "#/trust")
    page.locator("main h1").wait_for()
    assert page.evaluate("window.ran") is None
    assert sum("Content Security Policy" in text for text in refused) >= 3
    context.close()


# -- for everyone -----------------------------------------------------------------------------------------------------


def test_the_keyboard_alone_reaches_and_reads_everything(report, open_page):
    page = open_page(report)
    keys = page.keyboard
    keys.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    for _ in range(3):
        keys.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Images"
    keys.press("Enter")
    page.locator(".stage").first.wait_for()
    assert page.evaluate("document.activeElement.id") == "content"
    for _ in range(6):  # search, class, fault, concept, the table, the list
        keys.press("Tab")
    keys.press("ArrowRight")
    assert heading(page) == "folder/picture 01.jpg"
    assert page.evaluate("document.activeElement.ariaCurrent") == "true"
    for _ in range(4):  # the two steps, side by side, the picture
        keys.press("Tab")
    assert page.evaluate("document.activeElement.className") == "stage"
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"  # focus can be seen
    keys.press("ArrowDown")  # starts in the middle
    page.get_by_role("heading", name="Patch at row 4, column 4").wait_for()
    keys.press("ArrowRight")
    keys.press("ArrowUp")
    page.get_by_role("heading", name="Patch at row 3, column 5").wait_for()
    assert re.match(r"Patch at row 3, column 5: Concept \d+ \d+ %", page.locator("#live").inner_text())
    keys.press("End")
    keys.press("ArrowRight")  # the edge holds
    page.get_by_role("heading", name="Patch at row 3, column 6").wait_for()
    keys.press("Escape")
    page.get_by_role("heading", name="No patch selected").wait_for()
    for _ in range(3):  # the perturbed picture, the overlays
        keys.press("Tab")
    keys.press("Enter")
    assert page.get_by_role("button", name="All concepts").get_attribute("aria-pressed") == "true"


def all_views(report, pruned, kinds, open_page, **options):
    of_kinds = ("concepts", "concepts/map", "images/3?patch=7&overlay=all", "images/3?beside=2", "classes/0")
    for path, views in ((kinds.path, of_kinds), (report, VIEWS), (pruned.path, ["number"])):
        page = open_page(path, **options)
        for view in views:
            go(page, view)
            yield page


def test_a_screen_reader_finds_landmarks_and_names(report, pruned, kinds, open_page):
    for page in all_views(report, pruned, kinds, open_page):
        assert page.get_by_role("banner").count() == page.get_by_role("main").count() == 1
        assert page.get_by_role("navigation", name="Views").count() == 1
        assert page.locator("main h1").count() == 1
        nameless = page.evaluate(
            """() => [...document.querySelectorAll('a, button, input, select, [role=application], svg[role=img]')]
                .filter(e => !(e.ariaLabel || e.textContent.trim() || e.labels?.length)).map(e => e.outerHTML.slice(0, 80))"""
        )
        assert nameless == []
        assert page.evaluate("[...document.images].every(image => image.hasAttribute('alt'))")
        levels = page.evaluate("[...document.querySelectorAll('main :is(h1, h2, h3)')].map(e => +e.tagName[1])")
        assert all(after <= before + 1 for before, after in pairwise(levels))


def test_a_phone_shows_every_view_without_scrolling_sideways_and_a_tap_picks_a_patch(report, pruned, kinds, open_page):
    for page in all_views(report, pruned, kinds, open_page, **PHONE):
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        small = page.evaluate(
            """() => [...document.querySelectorAll('nav[aria-label=Views] a, #theme, .segments button, .steps .button')]
                .map(e => e.getBoundingClientRect()).filter(box => box.height < 30 || box.width < 30).length"""
        )
        assert small == 0
    go(page, "images/2")
    stage = page.locator(".stage").first
    stage.scroll_into_view_if_needed()
    box = stage.bounding_box()
    page.touchscreen.tap(box["x"] + box["width"] * 0.95, box["y"] + box["height"] * 0.05)
    page.get_by_role("heading", name="Patch at row 1, column 6").wait_for()


CONTRAST = """() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (c) => (c <= 10 ? c / 3294 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = (e) => {
    const colour = channels(getComputedStyle(e).backgroundColor);
    return colour[3] === 0 ? ground(e.parentElement) : colour;
  };
  const contrast = (e) => {
    const [a, b] = [light(channels(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  return Math.min(...[...document.querySelectorAll('main :is(h1, h2, h3, p, a, th, td, .quiet, .figure)')]
    .filter((e) => e.checkVisibility() && e.textContent.trim()).map(contrast));
}"""


def test_text_can_be_read_in_the_systems_theme_and_in_the_other(report, pruned, kinds, open_page):
    background = "getComputedStyle(document.body).backgroundColor"
    seen = set()
    for page in all_views(report, pruned, kinds, open_page, color_scheme="dark"):
        for _ in range(2):
            seen.add(page.evaluate(background))
            assert page.evaluate(CONTRAST) >= 4.5  # WCAG AA
            page.get_by_role("button", name="Switch between light and dark").click()
    assert len(seen) == 2
