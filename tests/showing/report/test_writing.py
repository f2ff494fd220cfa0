import hashlib
import re
from base64 import b64decode, b64encode
from dataclasses import replace

import numpy as np
import pytest
import torch
from planted import planted
from report_case import HOSTILE, HOSTILE_FILE, fit, page_data

from pace import PACE, Observations
from pace.showing.report import summary, write_report, writing


def write(case, path, **changes):
    given = {"images": case.images.pixels, "observations": case.observations, **changes}
    return write_report(path, case.model, given.pop("images"), given.pop("observations"), **given)


def test_the_page_carries_theta_its_intervals_and_phi(case, report):
    data = page_data(report)
    view = data["original"]
    low, high = case.explanation.interval(0.9)
    for name, expected in (("theta", case.explanation.theta), ("low", low), ("high", high)):
        found = np.frombuffer(b64decode(view[name]["base64"]), "<u2").reshape(24, 8) / 65535
        np.testing.assert_allclose(found, expected, atol=1e-5)
    concepts, phi = (np.frombuffer(b64decode(view[name]["base64"]), np.uint8) for name in ("concept", "phi"))
    concepts, phi = concepts.reshape(24, 37, 4), phi.reshape(24, 37, 4) / 255
    np.testing.assert_array_equal(concepts[:, :, 0], case.explanation.phi.argmax(2))
    np.testing.assert_allclose(phi, -np.sort(-case.explanation.phi, 2)[:, :, :4], atol=0.5 / 255 + 1e-6)


def test_concepts_are_ordered_by_use_and_unused_ones_marked(case, report):
    data = page_data(report)
    shares = [data["concepts"][k]["share"] for k in data["order"]]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1)
    assert [concept["used"] for concept in data["concepts"]][6:] == [False, False]
    assert not {6, 7} & {k for concept in data["concepts"] for k in concept["neighbours"]}
    assert not {6, 7} & {k for found in data["classConcepts"] for k, _, _ in found}


def test_the_class_the_concepts_point_to_is_theta_through_eta(case, report):
    expected = (case.explanation.theta @ case.model.label_head_).argmax(1)
    assert page_data(report)["pointed"] == expected.tolist()


def test_how_the_number_of_concepts_was_found_is_there_if_it_was(report, counted):
    assert page_data(report)["selection"] is None
    assert "#/number" not in re.sub(r"<script.*?</script>", "", report.read_text(encoding="utf-8"), flags=re.S)
    found, selection = page_data(counted.path)["selection"], counted.model.selection_
    assert (found["numbers"], found["images"]) == (selection.numbers.tolist(), 24)
    for name in ("bounds", "evidence"):
        np.testing.assert_allclose(found[name], getattr(selection, name))


def test_evidence_that_has_no_end_is_left_open(case, tmp_path):
    cloud = np.random.default_rng(0).normal(size=case.observations.embeddings.shape)
    observations = replace(case.observations, embeddings=cloud)
    model = fit(observations, n_concepts="auto", max_iter=1)
    path = write_report(tmp_path / "r.html", model, case.images.pixels, observations)
    assert page_data(path)["selection"]["evidence"] == [None]


def test_scores_that_are_no_numbers_are_left_open(report):
    scores = {score["name"]: score for score in page_data(report)["scores"]}
    assert scores["of_a_plugin"]["value"] is None
    assert scores["stability"]["range"] == [0, None]


def test_names_from_users_do_not_appear_as_html(report):
    text = report.read_text(encoding="utf-8")
    for name in (HOSTILE, HOSTILE_FILE, 'onerror="document'):
        assert name not in text
    assert text.count("</script>") == 3
    assert page_data(report)["names"][0] == HOSTILE_FILE
    assert page_data(report)["classes"][0] == HOSTILE


def test_the_policy_names_this_style_and_this_script_and_nothing_else(report):
    text = report.read_text(encoding="utf-8")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1].replace("&#39;", "'")
    for tag, directive in (("style", "style-src"), ('script type="module"', "script-src")):
        inline = re.search(rf"<{tag}>(.*?)</{tag.split()[0]}>", text, re.S)[1]
        digest = b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy.split("; ")
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "img-src data:" in policy.split("; ")


def test_the_file_refers_to_nothing_outside_itself(report):
    text = report.read_text(encoding="utf-8")
    shell = re.sub(r"<(script|style).*?</\1>", "", text, flags=re.S)
    assert set(re.findall(r'(?:src|href)="([^"#]*)', shell)) <= {"", "data:,"}
    style = re.search(r"<style>(.*?)</style>", text, re.S)[1]
    assert "url(" not in style
    assert "@import" not in style


def test_the_same_input_gives_the_same_file(case, tmp_path):
    first, second = (write(case, tmp_path / name).read_bytes() for name in ("a.html", "b.html"))
    assert first == second


def test_an_explanation_is_computed_when_there_is_none(case, tmp_path):
    given = write(case, tmp_path / "a.html", explanation=case.model.explain(case.observations))
    assert write(case, tmp_path / "b.html").read_bytes() == given.read_bytes()


def test_observations_may_be_tensors_and_images_arrays(case, tmp_path):
    kept = case.observations
    tensors = Observations(*(torch.as_tensor(part) for part in (kept.embeddings, kept.attention, kept.predictions)),
                           grid=kept.grid, prefix_tokens=1)  # fmt: skip
    pixels = case.images.pixels.permute(0, 2, 3, 1).numpy()
    whole = write(case, tmp_path / "a.html", images=pixels / 255, observations=tensors)
    assert page_data(whole)["names"][3] == "image 3"
    assert page_data(whole)["classes"] == ["class 0", "class 1", "class 2"]


def test_the_page_carries_nothing_to_show_of_empty_concepts_which_keep_their_numbers(pruned):
    data = page_data(pruned.path)
    empty = set(pruned.model.empty_concepts_.tolist())
    assert len(data["concepts"]) == 30
    assert set(data["order"]) == set(range(30)) - empty
    for k, concept in enumerate(data["concepts"]):
        assert (concept["near"] == []) == (concept["colour"] is None) == (k in empty)
        assert not empty & set(concept["neighbours"])
    assert not any(k in empty for found in data["classConcepts"] for k, _, _ in found)


def test_a_concept_that_was_empty_is_shown_if_these_images_hold_it(case, pruned):
    empty = pruned.model.empty_concepts_
    used = np.zeros(30, bool)
    used[empty[0]] = True
    assert np.flatnonzero(summary.left_empty(pruned.model, used)).tolist() == empty[1:].tolist()


def test_a_model_without_classes_has_a_report_too(case, tmp_path):
    known = planted(k=5, images=24, d=12).observations
    model = fit(replace(known, predictions=None), n_concepts=3, max_iter=2)
    path = write_report(tmp_path / "r.html", model, case.images.pixels, known)
    data = page_data(path)
    assert data["classes"] == []
    assert data["pointed"] is None
    assert data["original"]["predictions"] is None
    assert data["perturbed"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": torch.zeros(3, 3, 8, 8, dtype=torch.uint8)}, "images: expected one for each of 24"),
        ({"class_names": ["one"]}, "class_names: expected 3, one for each class of the model; found 1"),
        ({"perturbed_images": torch.zeros(24, 3, 8, 8)}, "perturbed_images: needs perturbed"),
    ],
)
def test_input_that_does_not_match_is_refused_in_one_line(case, tmp_path, changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        write(case, tmp_path / "r.html", **changes)
    assert not list(tmp_path.iterdir())


def test_other_mismatches_are_refused(case, tmp_path):
    path = tmp_path / "r.html"
    with pytest.raises(ValueError, match="pass grid="):
        write(case, path, observations=replace(case.observations, grid=None))
    with pytest.raises(ValueError, match="perturbed: expected the same images"):
        write(case, path, perturbed=case.perturbed[:5])
    with pytest.raises(ValueError, match=r"perturbed_images: expected \(48, 48\) pixels"):
        write(case, path, perturbed=case.perturbed, perturbed_images=torch.zeros(24, 3, 8, 8))
    with pytest.raises(ValueError, match=r"explanation: expected φ of shape \(24, 37, 8\)"):
        write(case, path, explanation=case.model.explain(case.observations, patches=False))
    with pytest.raises(ValueError, match="predictions have 2 classes; the model was fitted with 3"):
        write(case, path, observations=replace(case.observations, predictions=np.full((24, 2), 0.5)))
    with pytest.raises(ValueError, match="needed to show an ImageSet"):
        write(case, path, images=case.images)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        write(case, tmp_path / "nowhere" / "r.html")
    with pytest.raises(Exception, match="not fitted"):
        write_report(path, PACE(), case.images.pixels, case.observations)
    assert not list(tmp_path.iterdir())


def test_what_cannot_fit_is_refused_before_anything_is_written(case, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "LIMIT", 50_000)
    with pytest.raises(ValueError, match="show fewer images"):
        write(case, tmp_path / "r.html")
    assert not list(tmp_path.iterdir())


def test_a_report_that_fails_leaves_the_one_before_it(case, tmp_path, monkeypatch):
    path = write(case, tmp_path / "r.html")
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda file: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write(case, path, title="another")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
