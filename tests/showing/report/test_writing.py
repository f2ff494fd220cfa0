import hashlib
import re
from base64 import b64decode, b64encode
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from report_case import HOSTILE, HOSTILE_FILE, page_data

from pace import PACE, Observations
from pace.showing.report import contents, write_report


def write(case, path, **changes):
    given = {"images": case.images.pixels, "observations": case.observations, **changes}
    return write_report(path, case.model, given.pop("images"), given.pop("observations"), **given)


def test_the_page_carries_theta_its_intervals_and_phi(case, report):
    view = page_data(report)["original"]
    low, high = case.explanation.interval(0.9)
    for name, expected in (("theta", case.explanation.theta), ("low", low), ("high", high)):
        found = np.frombuffer(b64decode(view[name]["base64"]), "<u2").reshape(24, 8) / 65535
        np.testing.assert_allclose(found, expected, atol=1e-5)
    concepts, phi = (np.frombuffer(b64decode(view[name]["base64"]), np.uint8) for name in ("concept", "phi"))
    concepts, phi = concepts.reshape(24, 37, 4), phi.reshape(24, 37, 4) / 255
    np.testing.assert_array_equal(concepts[:, :, 0], case.explanation.phi.argmax(2))
    np.testing.assert_allclose(phi, -np.sort(-case.explanation.phi, 2)[:, :, :4], atol=0.5 / 255 + 1e-6)


def test_concepts_are_ordered_by_use_and_unused_ones_marked(report):
    data = page_data(report)
    shares = [data["concepts"][k]["share"] for k in data["order"]]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1)
    assert data["effective"] == pytest.approx(np.exp(-sum(share * np.log(share) for share in shares if share)))
    assert [concept["used"] for concept in data["concepts"]][6:] == [False, False]
    assert not {6, 7} & {k for concept in data["concepts"] for k in concept["neighbours"]}
    assert not {6, 7} & {k for found in data["classConcepts"] for k, _, _ in found}


def test_the_class_the_concepts_point_to_is_theta_through_eta(case, report):
    expected = (case.explanation.theta @ case.model.label_head_).argmax(1)
    assert page_data(report)["pointed"] == expected.tolist()


def test_how_the_number_of_concepts_was_found_is_there_if_it_was(report, pruned):
    assert page_data(report)["selection"] is None
    assert "#/number" not in re.sub(r"<script.*?</script>", "", report.read_text(encoding="utf-8"), flags=re.S)
    found, selection = page_data(pruned.path)["selection"], pruned.model.selection_
    assert (found["numbers"], found["images"]) == (selection.numbers.tolist(), 24)
    for name in ("bounds", "evidence"):
        np.testing.assert_allclose(found[name], getattr(selection, name))


def test_what_is_not_a_number_is_null(report):
    scores = {score["name"]: score for score in page_data(report)["scores"]}
    assert scores["of_a_plugin"]["value"] is None
    assert scores["stability"]["range"] == [0, None]
    only = SimpleNamespace(images=1, numbers=torch.ones(1), bounds=torch.ones(1), evidence=torch.tensor([torch.inf]))
    model = SimpleNamespace(lower_bounds_=[], means_=[0], selection_=only)
    assert contents.learning(model)["selection"]["evidence"] == [None]


def test_the_neighbours_of_a_concept_are_the_nearest_in_use():
    means = np.array([[0.0], [1.0], [1.5], [10.0]])
    used = np.array([True, True, False, True])
    assert contents.nearest_concepts(means, used, n=2) == [[1, 3], [0, 3], [1, 0], [1, 0]]
    assert contents.nearest_concepts(np.zeros((1, 2)), np.array([True]), n=4) == [[]]


def test_names_from_users_do_not_appear_as_html(report):
    text = report.read_text(encoding="utf-8")
    for name in (HOSTILE, HOSTILE_FILE, 'onerror="document'):
        assert name not in text
    assert text.count("</script>") == 3
    assert page_data(report)["names"][0] == HOSTILE_FILE
    assert page_data(report)["classes"][0] == HOSTILE


def test_the_file_allows_its_own_style_and_script_and_refers_to_nothing_outside(report):
    text = report.read_text(encoding="utf-8")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1].replace("&#39;", "'")
    for tag, directive in (("style", "style-src"), ('script type="module"', "script-src")):
        inline = re.search(rf"<{tag}>(.*?)</{tag.split()[0]}>", text, re.S)[1]
        digest = b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy.split("; ")
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    shell = re.sub(r"<(script|style).*?</\1>", "", text, flags=re.S)
    assert set(re.findall(r'(?:src|href)="([^"#]*)', shell)) <= {"", "data:,"}
    style = re.search(r"<style>(.*?)</style>", text, re.S)[1]
    assert "url(" not in style
    assert "@import" not in style


def test_the_same_input_gives_the_same_file_however_it_is_kept(case, tmp_path):
    kept = case.observations
    tensors = Observations(*(torch.as_tensor(part) for part in (kept.embeddings, kept.attention, kept.predictions)),
                           grid=kept.grid, prefix_tokens=1)  # fmt: skip
    pixels = case.images.pixels.permute(0, 2, 3, 1).numpy()
    first = write(case, tmp_path / "a.html", explanation=case.model.explain(kept))
    second = write(case, tmp_path / "b.html", images=pixels / 255, observations=tensors)
    assert first.read_bytes() == second.read_bytes()
    assert page_data(first)["names"][3] == "image 3"
    assert page_data(first)["classes"] == ["class 0", "class 1", "class 2"]


def test_empty_concepts_keep_their_numbers_and_have_nothing_to_show(pruned):
    data = page_data(pruned.path)
    empty = set(pruned.model.empty_concepts_.tolist())
    assert len(data["concepts"]) == 30
    assert set(data["order"]) == set(range(30)) - empty
    for k, concept in enumerate(data["concepts"]):
        assert (concept["near"] == []) == (concept["colour"] is None) == (k in empty)
        assert not empty & set(concept["neighbours"])
    assert not any(k in empty for found in data["classConcepts"] for k, _, _ in found)
    np.testing.assert_allclose([concept["colour"] for concept in data["concepts"][:4]], pruned.paint[:4], atol=5)


def test_a_concept_that_was_empty_is_shown_if_these_images_hold_it(case, pruned, tmp_path):
    empty = int(pruned.model.empty_concepts_[0])
    explanation = pruned.model.explain(case.observations)
    explanation.phi[:, :3] = np.eye(30)[empty]
    path = tmp_path / "r.html"
    write_report(path, pruned.model, case.images.pixels, case.observations, explanation=explanation)
    assert empty in page_data(path)["order"]


def test_a_model_without_classes_has_a_report_too(bare):
    data = page_data(bare)
    assert (data["classes"], data["pointed"], data["original"]["predictions"]) == ([], None, None)


def test_input_that_does_not_match_is_refused_in_one_line_and_nothing_is_written(case, tmp_path):
    path = tmp_path / "r.html"
    small, parts = torch.zeros(24, 3, 8, 8), (case.observations.embeddings, case.observations.attention)
    for changes, message in [
        ({"images": small[:3]}, "^images: expected 24, one for each"),
        ({"images": case.images}, "needed to show an ImageSet"),
        ({"class_names": ["one"]}, "^class_names: expected 3, one for each class; found 1"),
        ({"perturbed_images": small}, "^perturbed_images: needs perturbed"),
        ({"perturbed": case.perturbed, "perturbed_images": small}, r"perturbed_images: expected \(48, 48\) pixels"),
        ({"perturbed": case.perturbed[:5]}, "perturbed: expected the same images"),
        ({"observations": Observations(*parts, prefix_tokens=1)}, "pass grid="),
        ({"explanation": case.model.explain(case.observations, patches=False)}, r"expected φ of shape \(24, 37, 8\)"),
        ({"observations": Observations(*parts, np.full((24, 2), 0.5), (6, 6), 1)}, "predictions have 2 classes"),
    ]:
        with pytest.raises(ValueError, match=message):
            write(case, path, **changes)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        write(case, tmp_path / "nowhere" / "r.html")
    with pytest.raises(Exception, match="not fitted"):
        write_report(path, PACE(), case.images.pixels, case.observations)
    assert not list(tmp_path.iterdir())


def test_a_report_that_fails_leaves_the_one_before_it(case, tmp_path, monkeypatch):
    path = write(case, tmp_path / "r.html")
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda file: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write(case, path, title="another")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("kind", "dtype", "scale", "low"),
    [("u16", "<u2", 65535, 0), ("u8", np.uint8, 255, 0), ("i16", "<i2", 32767 / 2, -2)],
)
def test_numbers_come_back_to_half_a_step(kind, dtype, scale, low):
    values = np.random.default_rng(0).uniform(low, -low or 1, (7, 3))
    found = np.frombuffer(b64decode(contents.packed(values, kind, scale)["base64"]), dtype)
    assert np.abs(found / scale - values.ravel()).max() <= 0.5 / scale + 1e-12
