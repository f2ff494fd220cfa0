"""The live page in a real browser. The `open_live` fixture fails a test whose page complains or asks anybody else."""

import base64
import re
import threading

import pytest
import timm
import torch
from live_case import HOSTILE, as_file, seen_twice, served

import pace
from pace.images import Color
from pace.places import matching_patches
from pace.serving import Session
from pace.serving.session import LARGEST

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def picture(birds):
    return as_file(birds[7])


def give(page, name, file, how="drop"):
    """Drop a file on the page, or paste it, as a browser tells of it."""
    page.evaluate(
        """([name, content, how]) => {
            const files = new DataTransfer();
            files.items.add(new File([Uint8Array.from(atob(content), (c) => c.charCodeAt(0))], name));
            const options = { bubbles: true, cancelable: true };
            document.body.dispatchEvent(how === "drop" ? new DragEvent("drop", { ...options, dataTransfer: files })
                : new ClipboardEvent("paste", { ...options, clipboardData: files }));
        }""",
        [name, base64.b64encode(file).decode(), how],
    )


def explained(page, name):
    expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()


def outcome(page):
    return page.locator(".outcome")


@pytest.mark.parametrize("how", ["drop", "paste", "choose"])
def test_a_picture_is_explained_beside_those_of_the_set(open_live, session, birds, picture, how):
    page = open_live.page()
    if how == "choose":
        with page.expect_file_chooser() as chooser:
            page.get_by_role("button", name="Try a picture").click()
        chooser.value.set_files({"name": "my bird.png", "mimeType": "image/png", "buffer": picture})
    else:
        give(page, "my bird.png", picture, how)
    explained(page, "my bird.png")
    known = session.explainer([birds[7]])
    expect(page.locator(".facts")).to_contain_text(f"predicted {known.prediction(0)['name']}")
    rows = page.locator(".rows.theta li")
    assert rows.count() == len([p for p in range(known.n_parts) if known.parts[0, p] >= 0.01])
    largest = known.shown_parts(0)[0]
    expect(rows.first).to_contain_text(f"{100 * known.parts[0, largest]:.0f} %")
    expect(rows.first.locator("small")).to_have_text(re.compile(r"\d+ to \d+ %"))
    assert page.locator(".browser-list li").first.get_by_role("button").get_attribute("title") == "my bird.png"
    assert page.locator(".stage img").count() == 2  # its perturbed view as well
    for shown in page.locator(".stage img").all():
        assert shown.evaluate("e => e.decode().then(() => e.naturalWidth)") == 112


def test_a_dropped_picture_is_shown_beside_its_perturbed_view_with_the_places_that_kept_their_concept(
    open_live, session, picture
):
    page = open_live.page()
    give(page, "moved.png", picture)
    explained(page, "moved.png")
    last = list(session._added.values())[-1]
    there, seen = (one.phi[0, one.prefix_tokens :].argmax(1) for one in (last.explanation, last.moved))
    (places,) = matching_patches(last.moved.observations.crops, last.explanation.grid)
    kept = int((there[places] == seen).sum())
    expect(page.locator(".look")).to_contain_text(f"{kept} of {len(places)} places kept their concept")
    sources = page.locator(".stage img").evaluate_all("some => some.map((one) => one.src)")
    assert [source.partition("base64,")[2] for source in sources] == [last.picture, last.moved_picture]
    page.get_by_role("button", name="Kept concepts").click()
    expect(page.locator(".look")).to_contain_text("Green places kept their concept")
    page.goto(page.url.split("#")[0] + "#/images/2")  # the set's have theirs
    explained(page, session.images.names[2])
    other = page.locator(".stage img").nth(1).get_attribute("src").partition("base64,")[2]
    assert other == session._encoded[len(session.images) + 2].strip()


def test_parts_are_switched_off_and_on_and_the_prediction_follows(open_live, session, client):
    page = open_live.page("#/images/3")
    expect(outcome(page)).to_contain_text("Switch parts off below")
    switches = page.get_by_role("switch")
    first = switches.first.get_attribute("aria-label").removesuffix(" in the prediction")
    switches.first.click()
    expect(switches.first).to_have_attribute("aria-checked", "false")
    expect(outcome(page).get_by_role("heading")).to_have_text(f"Prediction without {first}")
    part = int(page.locator(".rows.theta .toggle").first.get_attribute("data-toggle").removeprefix("part-"))
    concepts = [k for k, of in enumerate(session.explainer.concepts.part_of_) if of == part]
    known = client.post("without", {"picture": 3, "concepts": concepts, "compare": True}).said["classes"]
    for row, one in zip(outcome(page).locator("li").all(), known, strict=False):
        expect(row).to_contain_text(re.compile(rf"{shown(one['before'])} → {shown(one['after'])}"))
    before = max(known, key=lambda one: one["before"])
    expect(outcome(page)).to_contain_text(f"elsewhere: {shown(before['area'])}")
    assert page.locator(".gone").count() == 1  # the patches are grey in the picture
    switches.nth(1).click()
    expect(outcome(page).get_by_role("heading")).to_contain_text(f"without {first}, ")
    page.get_by_role("button", name="Switch all on").click()
    expect(outcome(page)).to_contain_text("Switch parts off below")
    assert page.locator(".gone").count() == 0
    assert {switch.get_attribute("aria-checked") for switch in switches.all()} == {"true"}


def shown(share):
    return f"{100 * share:.0f} %"


def test_of_many_switches_at_once_the_last_state_is_shown(open_live):
    page = open_live.page("#/images/4")
    page.get_by_role("switch").first.wait_for()
    page.evaluate(
        "() => { const first = document.querySelector('.switch'); for (let i = 0; i < 41; i++) first.click(); }"
    )
    expect(outcome(page).locator("li").first).to_contain_text("→")
    page.evaluate(
        "() => { const first = document.querySelector('.switch'); for (let i = 0; i < 41; i++) first.click(); }"
    )
    expect(outcome(page)).to_contain_text("Switch parts off below")


def test_dropped_pictures_are_found_compared_and_there_after_a_reload_and_in_other_tabs(open_live, session, picture):
    page = open_live.page()
    give(page, "found later.png", picture)
    explained(page, "found later.png")
    page.get_by_label("Search").fill("found later")
    expect(page.locator(".browser-list li:not([hidden])")).to_have_count(1)
    page.get_by_label("Search").fill("")
    predicted = page.locator(".facts b").first.inner_text()
    page.get_by_label("Predicted as").locator("option", has_text=predicted).evaluate(
        "e => { e.parentNode.value = e.value; e.parentNode.dispatchEvent(new Event('change')); }"
    )
    assert page.locator(".browser-list li:not([hidden]) button").first.get_attribute("title") == "found later.png"
    page.get_by_label("Predicted as").select_option(value="")
    theta = list(session._added.values())[-1].explanation.theta[0]
    page.get_by_label("Contains").select_option(value=str(theta.argmax()))
    titles = page.locator(".browser-list li:not([hidden]) button").evaluate_all("some => some.map((one) => one.title)")
    assert "found later.png" in titles
    page.get_by_label("Contains").select_option(value="")
    page.get_by_role("button", name="Set beside another").click()
    page.get_by_role("button", name="Next image").click()
    expect(page.get_by_role("heading", name="Side by side")).to_be_visible()
    expect(page.locator(".beside")).to_contain_text("found later.png")
    page.get_by_role("button", name="Previous image").click()
    explained(page, "found later.png")
    page.wait_for_timeout(300)  # the address is remembered when the keys rest
    page.reload()
    explained(page, "found later.png")
    other = open_live.page("#" + page.url.split("#")[1])
    explained(other, "found later.png")


def test_concepts_and_parts_are_renamed_for_good_and_markup_is_text(open_live, session):
    page = open_live.page("#/concepts")
    page.get_by_role("button", name="Rename").first.click()
    page.get_by_role("textbox", name="Name").fill("feathers")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Feathers")).to_be_visible()
    expect(page.locator(".tray")).to_contain_text("is called 'feathers'")
    page.locator(".cards a.cover").first.click()
    page.get_by_role("link", name="All concepts").wait_for()
    page.get_by_role("button", name="Rename").click()
    page.get_by_role("textbox", name="Name").fill(HOSTILE)
    page.get_by_role("button", name="Save").click()
    name = HOSTILE  # as it is, but for its first letter, which is no letter
    expect(page.locator("h1")).to_have_text(name)
    assert page.title() == "Concepts · Birds"
    page.reload()
    expect(page.locator("h1")).to_have_text(name)
    page.get_by_role("button", name="Undo").first.click()
    expect(page.locator("h1")).not_to_have_text(name)
    page.get_by_role("button", name="Undo").first.click()
    expect(page.locator(".tray")).to_contain_text("Undone: part A is called 'feathers'")
    assert not session.explainer.edits.changes


def test_what_is_changed_in_one_tab_is_seen_in_the_others_and_nothing_old_is_answered(open_live, session):
    one, other, third = (open_live.page("#/concepts") for _ in range(3))
    one.get_by_role("button", name="Rename").first.click()
    one.get_by_role("textbox", name="Name").fill("plumage")
    one.keyboard.press("Enter")
    expect(one.get_by_role("heading", name="Plumage").first).to_be_visible()
    other.evaluate("() => window.dispatchEvent(new Event('focus'))")  # it is looked at again
    expect(other.get_by_role("heading", name="Plumage").first).to_be_visible()
    expect(other.locator(".tray")).to_contain_text("Concepts were changed in another tab")
    third.get_by_role("button", name="Rename").nth(1).click()  # it was in sight all the time
    third.get_by_role("textbox", name="Name").fill("twig")
    third.keyboard.press("Enter")
    expect(third.get_by_role("heading", name="Plumage").first).to_be_visible()
    assert len(session.explainer.edits.changes) == 1  # what was asked of the old page was not done
    third.get_by_role("button", name="Undo").first.click()
    expect(third.locator(".tray")).to_contain_text("Undone")
    assert not session.explainer.edits.changes


def test_concepts_are_hidden_and_merged_and_this_is_undone(open_live, session):
    page = open_live.page("#/concepts")
    card = page.locator(".cards a.cover").first
    k = int(card.get_attribute("href").split("/")[-1])
    card.click()
    page.get_by_role("link", name="All concepts").wait_for()
    title = page.locator("h1").inner_text()
    page.get_by_role("button", name="Hide").click()
    expect(page.get_by_role("button", name="Show")).to_be_visible()
    page.get_by_role("link", name="All concepts").click()
    assert page.locator(f'.cards a[href="#/concepts/{k}"]').count() == 0
    page.get_by_role("link", name=title).click()
    with page.expect_navigation():
        page.get_by_role("button", name="Show").click()
    merge = page.get_by_label("Merge with")
    other = merge.locator("option").nth(1).get_attribute("value")
    merge.select_option(value=other)
    assert not session.explainer.edits.merges  # the arrow keys walk through the choices
    page.get_by_role("button", name="Merge", exact=True).click()
    expect(page.locator(".tray")).to_contain_text("Merge")
    assert session.explainer.edits.merges == [[k, int(other)]]
    page.goto(page.url.split("#")[0] + f"#/concepts/{other}")
    expect(page.locator(".lead")).to_contain_text("was merged into")
    for _ in range(3):
        page.goto(page.url.split("#")[0] + "#/concepts")
        with page.expect_navigation():
            page.get_by_role("button", name="Undo").first.click()
        expect(page.locator(".tray")).to_contain_text("Undone")
    assert not session.explainer.edits.changes


def test_what_is_refused_is_told_and_nothing_else_happens(open_live, session):
    page = open_live.page("#/images/2")
    give(page, f"{HOSTILE}.txt", b"no picture at all")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("cannot identify image file as one of")
    assert page.locator("img[src=x]").count() == 0
    alert.get_by_role("button", name="Close").click()
    expect(alert).to_have_count(0)
    assert page.url.endswith("#/images/2")
    page.evaluate(  # not even sent
        """(size) => {
            const files = new DataTransfer();
            files.items.add(new File([new Uint8Array(size)], "large.png"));
            document.body.dispatchEvent(new DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer: files }));
        }""",
        LARGEST + 1,
    )
    expect(alert).to_contain_text("large.png: larger than 31 MB")
    # A browser says itself that an answer was no success.
    open_live.complaints[:] = [line for line in open_live.complaints if "status of 415" not in line]


def test_the_keyboard_alone_is_enough(open_live):
    page = open_live.page("#/images/5")
    button = page.get_by_role("button", name="Try a picture")
    with page.expect_file_chooser():
        button.press("Enter")
    switch = page.get_by_role("switch").first
    switch.focus()
    page.keyboard.press("Space")
    expect(switch).to_have_attribute("aria-checked", "false")
    expect(switch).to_be_focused()
    expect(outcome(page).locator("li").first).to_contain_text("→")
    expect(switch).to_be_focused()
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement !== document.body")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it(open_live, picture, scheme):
    page = open_live.page(color_scheme=scheme, **PHONE)
    give(page, "phone.png", picture)
    explained(page, "phone.png")
    page.get_by_role("switch").first.tap()
    expect(outcome(page).locator("li").first).to_contain_text("→")
    for view in ("", "#/concepts", "#/concepts/0"):
        page.goto(page.url.split("#")[0] + view)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
    ground = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 200) == (scheme == "dark")


def test_what_takes_long_is_seen_to_be_under_way_and_a_server_that_ended_is_told(
    open_live, session, picture, monkeypatch
):
    real, seen = session.add, threading.Event()
    monkeypatch.setattr(session, "add", lambda *given: (seen.wait(60), real(*given))[1])
    page = open_live.page()
    give(page, "slow.png", picture)
    expect(page.get_by_role("status").filter(has_text=re.compile(r"Explaining slow\.png … [1-9] s"))).to_be_visible()
    seen.set()
    explained(page, "slow.png")
    expect(page.locator(".tray p")).to_have_count(0)
    page.route("**/add*", lambda route: route.abort())
    give(page, "gone.png", picture)
    expect(page.get_by_role("alert")).to_contain_text("pace serve does not answer")
    open_live.complaints[:] = [line for line in open_live.complaints if "ERR_FAILED" not in line]


@pytest.mark.parametrize("classes", [3, 0])
def test_concepts_without_parts_and_models_without_classes_are_live_too(open_live, classes):
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=32, num_classes=classes)
    images, quick = Color(n_per_class=6, size=32), {"covariance": "diag", "max_iter": 3, "n_init": 1, "device": "cpu"}
    explainer = pace.explain_model(model, images, 3, **quick)
    with served(Session(explainer, images, seen_twice(explainer, images), "Colours")) as client:
        page = open_live.page(client=client)
        give(page, "colour.png", as_file(images[0]))
        explained(page, "colour.png")
        if classes:
            page.get_by_role("switch").first.click()
            expect(outcome(page).get_by_role("heading")).to_have_text(re.compile("Prediction without Concept [0-2]$"))
            expect(outcome(page)).to_contain_text("elsewhere:")
        else:
            expect(page.locator(".rows.theta li").first).to_be_visible()
            assert page.get_by_role("switch").count() == 0
            refused = client.post("without", {"picture": 0, "concepts": [0], "compare": False})
            assert refused.error == "this model predicts no classes"
        page.goto(client.address + "#/concepts/0")
        page.get_by_role("button", name="Rename").click()
        page.get_by_role("textbox", name="Name").fill("a colour")
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_have_text("A colour")
        page.goto("about:blank")
