"""What the live page asks for, without a server."""

import json

import numpy as np
import pytest
from live_case import HOSTILE, as_file

import pace
from pace.ablation import ablate
from pace.images import to_float
from pace.serving.session import Refused


def unpacked(packed, scale=65535):
    import base64

    return np.frombuffer(base64.b64decode(packed["base64"]), {"u8": "u1", "u16": "<u2"}[packed["kind"]]) / scale


def test_a_dropped_picture_is_explained_as_pace_explain_does_it(session, birds):
    picture = birds[7]
    found = session.add("bird.png", as_file(picture))
    known = session.explainer([picture])
    assert (found["number"] >= 12, found["name"]) == (True, "bird.png")
    np.testing.assert_allclose(unpacked(found["view"]["theta"]), known.theta[0], atol=2e-4)
    low, high = known.part_interval(0.9)
    np.testing.assert_allclose(unpacked(found["view"]["partLow"]), low[0], atol=2e-4)
    np.testing.assert_allclose(unpacked(found["view"]["partHigh"]), high[0], atol=2e-4)
    said = known.prediction(0)
    assert found["view"]["predictions"][0][0] == pytest.approx((said["class"], said["probability"]), abs=1e-3)
    assert json.dumps(found)


def test_the_prediction_without_concepts_is_that_of_ablate_for_pictures_of_the_set_and_dropped_ones(session, birds):
    number = session.add("bird.png", as_file(birds[7]))["number"]
    explainer, part_of = session.explainer, session.explainer.concepts.part_of_
    concepts = np.flatnonzero(part_of == part_of[0]).tolist()
    for picture, pixels in ((number, birds[7]), (2, birds[10])):
        known = ablate(explainer.backbone, explainer.concepts, to_float(pixels)[None], concepts)
        quick, whole = (session.without(picture, concepts, compare)["classes"] for compare in (False, True))
        for row in whole:
            for case in ("before", "after", "low", "high", "area", "attention"):
                assert row[case] == pytest.approx(getattr(known, case)[0, row["class"]], abs=2e-3)
        cases = ("class", "before", "after", "low", "high")
        assert quick == [{case: row[case] for case in cases} for row in whole]


def test_the_page_has_the_pictures_that_were_dropped_and_the_oldest_are_forgotten(session, birds, monkeypatch):
    monkeypatch.setattr("pace.serving.session._KEPT", 2)
    numbers = [session.add(f"{number}.png", as_file(birds[number]))["number"] for number in range(3)]
    page = session.page().decode()
    assert ['"name":"0.png"' in page, '"name":"1.png"' in page, '"name":"2.png"' in page] == [False, True, True]
    with pytest.raises(Refused, match="not kept any more; drop it again"):
        session.without(numbers[0], [0], False)
    assert session.without(numbers[2], [0], False)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        (b"", "cannot identify image file as one of"),
        (b"GIF89a", "bird.png: "),
        (b"%PDF-1.4 a document", "cannot identify image file as one of"),
        (as_file(np.zeros((2, 100, 3), np.uint8)), "100 x 2 pixels are too narrow a picture"),
        (as_file(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))[:800], "bird.png: "),
    ],
    ids=["empty", "no more than a beginning", "a document", "narrow", "truncated"],
)
def test_what_is_no_picture_is_refused_in_a_line_without_a_path(session, file, line):
    with pytest.raises(Refused) as refused:
        session.add("../../home/bird.png", file)
    assert line in str(refused.value)
    assert "/" not in str(refused.value)
    assert "0x" not in str(refused.value)


@pytest.mark.filterwarnings("ignore:Image size")  # Pillow's own
def test_a_picture_of_too_many_pixels_is_refused(session, monkeypatch):
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 5000)
    with pytest.raises(Refused, match=r"bird\.png: has more than 5,000 pixels; if you trust it, raise --max-pixels"):
        session.add("bird.png", as_file(np.zeros((100, 100, 3), np.uint8)))


def test_names_are_kept_in_the_run_and_undone_and_nothing_else_is_written(session, run):
    before = {file.name: file.read_bytes() for file in run.iterdir()}
    assert session.change("name", [3], HOSTILE)["said"].endswith(f"is called {HOSTILE!r}")
    assert {file.name for file in run.iterdir()} == {*before, "names.json"}
    assert all((run / name).read_bytes() == content for name, content in before.items() if name != "names.json")
    assert pace.load_run(run, device="cpu").concepts.names_[3].given == HOSTILE
    page = session.page().decode()
    assert HOSTILE not in page  # it is there as JSON, with < as an escape
    assert json.dumps(HOSTILE)[5:20] in page.replace("\\u0027", "'")
    session.change("undo", [], "")
    assert pace.load_run(run, device="cpu").concepts.names_[3].given is None


def test_merged_concepts_are_one_in_the_set_and_in_dropped_pictures(session, birds):
    found = session.add("bird.png", as_file(birds[7]))
    part_of = session.explainer.concepts.part_of_
    one, other = np.flatnonzero(part_of == np.bincount(part_of).argmax())[:2].tolist()
    before = unpacked(found["view"]["theta"])
    session.change("merge", [one, other], "")
    after = unpacked(session._entry(found["number"])["view"]["theta"])
    assert after[other] < 1e-3
    assert after.sum() == pytest.approx(before.sum(), abs=0.01)
    assert session._explanation.theta[:, other].max() < 1e-3
    session.change("undo", [], "")
    np.testing.assert_allclose(unpacked(session._entry(found["number"])["view"]["theta"]), before, atol=2e-4)


def test_a_change_that_cannot_be_made_is_a_line(session, run):
    parts = session.explainer.concepts.part_of_
    elsewhere = int(np.flatnonzero(parts != parts[0])[0])
    for do, what, line in (
        ("merge", [0, elsewhere], "kinds of different parts"),
        ("undo", [], "there is no change to take back"),
        ("hide", [99], "expected a number from 0 to 11"),
        ("name", [], "one concept or part to name"),
        ("delete", [1], "expected one of name, hide"),
    ):
        with pytest.raises(Refused, match=line):
            session.change(do, what, "")
    (run / "names.json").write_text("[]")
    with pytest.warns(UserWarning, match="names.json"), pytest.raises(Refused) as refused:
        session.change("hide", [1], "")
    assert "/" not in str(refused.value)
    (run / "names.json").unlink()
