"""A model and its concepts as one object, from any kind of picture to names, tables and pages."""

import csv
import json
import sys
import warnings
from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import pace
from pace import Backbone, Explanation, Observations
from pace.backbones import color_vit
from pace.images import Color, Folder
from pace.images.given import images_from
from pace.naming import concept_names

QUICK = {"covariance": "diag", "max_iter": 10, "n_init": 1, "progress": False, "device": "cpu"}


@pytest.fixture(scope="module")
def model():
    return color_vit.load_model()


@pytest.fixture(scope="module")
def images():
    return Color(n_per_class=8, size=112)


def quick(model, images, n_concepts=3, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pace.explain_model(model, images, n_concepts, **QUICK, **options)


@pytest.fixture(scope="module")
def explainer(model, images):
    return quick(model, images, class_names=["amber", "<blue>"], layer=0)


@pytest.fixture(scope="module")
def explanation(explainer, images):
    return explainer(images)


def test_every_kind_of_picture_is_explained_alike(explainer, explanation, images, tmp_path):
    pixels = images[0]
    array = pixels.permute(1, 2, 0).numpy()
    Image.fromarray(array).save(tmp_path / "bird.png")
    kinds = [tmp_path / "bird.png", str(tmp_path / "bird.png"), Image.fromarray(array), array, pixels, pixels / 255]
    for given in [*kinds, kinds, array[None], pixels[None], tmp_path]:
        theta = explainer(given).theta
        np.testing.assert_allclose(theta, explanation.theta[[0]].repeat(len(theta), 0), atol=1e-3)
    assert len(explainer(kinds)) == 6
    grey = pixels[0].numpy()  # in whatever form
    thetas = [explainer(given).theta for given in (grey, grey[..., None], pixels[:1], np.stack([grey] * 3, -1))]
    np.testing.assert_allclose(thetas, [thetas[-1]] * 4, atol=1e-6)
    assert explainer(tmp_path / "bird.png").image_names == [str(tmp_path / "bird.png")]
    assert explainer([array, tmp_path / "bird.png"]).image_names == ["image 0", str(tmp_path / "bird.png")]
    assert len(images_from(kinds).subset([4, 0])) == 2
    with pytest.raises(ValueError, match="image 1: expected uint8 or floats in"):
        explainer([pixels, pixels.float()])


def test_an_explanation_shows_pictures_with_the_names_of_classes_in_a_notebook(explainer, explanation):
    html = explanation._repr_html_()
    said = explanation.prediction(0)
    assert said["name"] == ["amber", "<blue>"][said["class"]]
    assert html.count("data:image/png;base64,") == 3
    assert "<blue>" not in html
    assert explanation._repr_png_().startswith(b"\x89PNG")
    assert "amber (" in explainer._repr_html_() or "&lt;blue&gt; (" in explainer._repr_html_()
    titled = copy(explainer)
    titled.class_names = ["001.Cedar_Waxwing", "002.Wren"]
    assert "Cedar Waxwing (" in titled._repr_html_() or "Wren (" in titled._repr_html_()
    assert replace(explanation, explainer=titled).why(0, "Wren") == replace(explanation, explainer=titled).why(0, 1)
    assert repr(explainer).startswith("ModelExplainer(3 concepts, Backbone(VisionTransformer, block 0 of 0 to 2, ")
    assert "attention of block 0, 112 x 112 pixels, 14 x 14 patches, d = 32)" in repr(explainer.backbone)


def test_rows_frames_files_and_dictionaries_say_the_same(explanation, tmp_path, monkeypatch):
    rows, found = explanation.to_rows(), explanation.to_dict(n=1)
    first, low = rows[0], explanation.interval(0.9)[0]
    k = first["concept"]
    assert (first["picture"], first["name"]) == (explanation.image_names[0], f"concept {k}")
    assert first["theta"] == pytest.approx(explanation.theta[0, k], abs=1e-6)
    assert first["low"] == pytest.approx(low[0, k], abs=1e-6)
    number = explanation.prediction(0)["class"]
    assert first["evidence"] == pytest.approx(explanation.explainer.concepts.evidence_[k, number], abs=1e-6)
    assert found["images"][0]["top_concepts"] == [
        {name: value for name, value in first.items() if name not in ("picture", "prediction", "probability")}
    ]
    odd = explanation.images.subset(range(3))
    odd.names[:2] = ["=1+2", "-a"]
    replace(explanation[[0, 1, 2]], images=odd).to_csv(tmp_path / "odd.csv")
    with (tmp_path / "odd.csv").open(newline="") as file:  # no spreadsheet runs a name
        assert {row["picture"] for row in csv.DictReader(file)} == {"'=1+2", "'-a", odd.names[2]}
    explanation.to_csv(tmp_path / "explanation.csv")
    with (tmp_path / "explanation.csv").open(newline="") as file:
        assert [row["name"] for row in csv.DictReader(file)] == [row["name"] for row in rows]
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    assert explanation.to_frame() == rows
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match="to_frame needs pandas"):
        explanation.to_frame()


def test_where_concepts_are_kinds_rows_are_parts():
    gamma = np.array([[6.0, 3.0, 1.0], [1.0, 8.0, 2.0]])
    nested = Explanation(
        gamma / gamma.sum(1, keepdims=True),
        gamma,
        part_of=(parts := np.array([0, 0, 1])),
        called=concept_names(parts, np.array([1.0, 2.0, 9.0])),
    )
    rows = nested.to_rows()
    assert [(row["picture"], row["name"]) for row in rows] == [
        ("image 0", "part B · kind 2"), ("image 0", "part A · kind 1"),
        ("image 1", "part B · kind 1"), ("image 1", "part A · kind 1"),
    ]  # fmt: skip
    assert rows[0]["theta"] == pytest.approx(0.9)
    assert (rows[0]["part"], rows[0]["kind"], rows[0]["prediction"]) == ("B", 2, None)


def test_why_one_class_and_not_another_adds_up_over_concepts(explainer, explanation):
    evidence = explainer.concepts.evidence_
    reasons = explanation.why(2, "amber", "<blue>")
    for reason in reasons:
        assert reason.weight == pytest.approx(reason.share * (evidence[reason.concept] @ [1, -1]))
    assert [abs(reason.weight) for reason in reasons] == sorted((abs(r.weight) for r in reasons), reverse=True)
    back = {reason.concept: -reason.weight for reason in explanation.why(2, 1, 0)}
    assert back == pytest.approx({reason.concept: reason.weight for reason in reasons})
    assert explanation.why(2)[0].weight == pytest.approx(
        explanation.why(2, explanation.prediction(2)["name"], 1 - explanation.prediction(2)["class"])[0].weight
    )
    with pytest.raises(ValueError, match="there is no class 'green' among 2: amber"):
        explanation.why(0, "green")
    seen = explanation.observations
    blind = replace(explanation, observations=Observations(seen.embeddings, seen.attention, grid=seen.grid))
    assert blind.to_rows()[0]["evidence"] is None
    with pytest.raises(ValueError, match="predicts no classes that concepts could speak for"):
        blind.why(0)


def test_images_of_a_concept_and_concepts_of_a_class_are_one_call(explainer, explanation):
    assert explanation.images_with(1, 4).tolist() == np.argsort(-explanation.theta[:, 1], kind="stable")[:4].tolist()
    own = np.asarray(explanation.observations.predictions).argmax(1) == 0
    strength = (explanation.theta[own] if own.any() else explanation.theta).mean(0) * explainer.concepts.evidence_[:, 0]
    found = explanation.concepts_of("amber", 2)
    assert [k for k, _ in found] == [k for k in np.argsort(-strength)[:2] if strength[k] > 0]


def test_some_of_the_images_are_explained_by_themselves(explanation, tmp_path):
    two = explanation[[4, 1]]
    assert two.image_names == [explanation.image_names[4], explanation.image_names[1]]
    assert two.prediction(0) == explanation.prediction(4)
    page = two.report(tmp_path / "page.html", "Two")
    text = page.read_text(encoding="utf-8")
    assert '"first":0' in text  # it opens on the first of them
    assert f"{two.image_names[0]}" in text
    assert "(of the fit)" in text
    whole = explanation.report(tmp_path / "whole.html").read_text(encoding="utf-8")
    assert "(of the fit)" not in whole  # where all images of the fit are shown, none comes twice


def test_what_is_saved_is_loaded_with_the_same_model_only(explainer, explanation, model, images, tmp_path):
    folder = explainer.save(tmp_path / "saved")
    loaded = pace.load_run(folder, model=model, device="cpu")
    np.testing.assert_array_equal(loaded(images).theta, explanation.theta)
    assert (loaded.class_names, loaded.gallery) == (explainer.class_names, explainer.gallery)
    assert loaded.backbone.preprocessing == explainer.backbone.preprocessing
    with pytest.raises(ValueError, match="is there already; choose a new folder"):
        explainer.save(folder)
    with pytest.raises(ValueError, match=r"was saved in Python; pace.load_run\(.*model=…\) takes its model"):
        pace.load_run(folder)
    with pytest.raises(ValueError, match="is not the model that"):
        pace.load_run(folder, model=color_vit.new_model())


def test_a_folder_a_named_model_and_a_probe_are_opened_again_from_what_was_saved(tmp_path):
    for number, name in enumerate(("one", "two")):
        for image in range(4):
            (tmp_path / "photos" / name).mkdir(parents=True, exist_ok=True)
            noise = np.random.default_rng(10 * number + image).integers(0, 90, (40, 40, 3))
            Image.fromarray((noise + 90 * number).astype(np.uint8)).save(tmp_path / "photos" / name / f"{image}.png")
    fitted = quick("color", tmp_path / "photos", head="probe", layer=0)
    assert fitted.class_names == ["one", "two"]
    loaded = pace.load_run(fitted.save(tmp_path / "saved"), device="cpu")
    picture = tmp_path / "photos" / "two" / "0.png"
    assert loaded(picture).prediction(0) == fitted(picture).prediction(0)
    assert loaded.images.names == Folder(tmp_path / "photos").names
    (tmp_path / "saved" / "gallery.json").write_text(json.dumps({"images": [["nobody.png"]] * len(loaded.gallery)}))
    with pytest.raises(
        ValueError, match=r"^'nobody\.png', in the gallery, is no image of the fit; run `pace fit` again"
    ):
        pace.load_run(tmp_path / "saved", device="cpu")(picture).report(tmp_path / "page.html")
    picture.write_bytes((tmp_path / "photos" / "two" / "1.png").read_bytes())
    explained = pace.load_run(tmp_path / "saved", device="cpu")(tmp_path / "photos" / "one" / "0.png")
    with pytest.warns(UserWarning, match="only shown in these pictures: the images of .* have changed"):
        explained.report(tmp_path / "page.html")


def test_a_model_without_a_classifier_says_so_and_clusters_of_its_features_are_called_clusters(images):
    import timm

    bare = timm.create_model("test_vit", img_size=64, num_classes=0)
    with pytest.warns(
        UserWarning, match='this model has no classifier, .* head="clusters" from the model\'s own features'
    ):
        fitted = pace.explain_model(bare, images, 2, layer=-1, **QUICK)
    with pytest.raises(ValueError, match="predicts no classes that concepts could speak for"):
        fitted(images[0]).why()
    assert images.class_names != ["cluster 1", "cluster 2"]  # as many, but these are labels
    assert quick(bare, images, 2, layer=-1, head="clusters").class_names == ["cluster 1", "cluster 2"]


def test_the_same_concepts_in_another_order_and_on_a_finer_grid_are_matched(explanation):
    order, count = [2, 0, 1], len(explanation)
    phi = explanation.phi.reshape(count, 14, 14, 3).repeat(2, 1).repeat(2, 2).reshape(count, -1, 3)[..., order]
    other = Explanation(explanation.theta[:, order], explanation.gamma[:, order], phi, (28, 28))
    found = pace.compare(explanation, other)
    assert {match.one: match.other for match in found} == {k: order.index(k) for k in range(3)}
    assert [match.alike for match in found] == pytest.approx([1, 1, 1])
    one, two = (
        replace(explanation, phi=np.eye(3)[[[0, 0, 1]]], grid=(1, 3)),
        replace(explanation, phi=np.eye(3)[[[0, 2, 2]]], grid=(1, 3)),
    )
    (both, *_), alike = pace.compare(one[:1], two[:1]), [match.alike for match in pace.compare(one[:1], two[:1])]
    assert (both.one, both.other, alike) == (0, 0, pytest.approx([0.5, 0.5]))
    with pytest.raises(ValueError, match="explanations of the same images; found 12 and 3"):
        pace.compare(explanation, other[:3])


def test_two_models_are_compared_on_the_images_of_the_first(explainer, model, images):
    other = quick(Backbone(model, 1), images, 2)
    found = pace.compare(explainer, other)
    assert len(found) == 2
    assert all(0 <= match.alike <= 1 for match in found)


def test_scores_say_what_to_believe_of_the_test_split_or_of_a_folder_without_splits(explainer, images, tmp_path):
    for split in ("train", "test"):
        for number in range(4 if split == "train" else 6):
            file = tmp_path / "photos" / split / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[number].permute(1, 2, 0).numpy()).save(file)
    scores = explainer.evaluate(tmp_path / "photos", bootstrap=0)
    assert scores.verdict
    assert explainer.scores is scores
    assert explainer.evaluate(tmp_path / "photos" / "test", bootstrap=0).as_dict() == scores.as_dict()


def test_names_hidden_concepts_and_merges_are_the_users_and_can_be_taken_back(explainer, images, tmp_path):
    explainer.save(tmp_path / "run")
    ours = pace.load_run(tmp_path / "run", model=explainer.backbone.model, device="cpu")
    before = ours(images)
    assert ours.name(1, "<red> face") == "1 is called '<red> face'"
    assert before.names[1].long == "<red> face"
    assert "&lt;red&gt; face" in ours._repr_html_()
    assert "<red>" not in ours._repr_html_() + before._repr_html_()
    ours.hide(0)
    assert 0 not in {row["concept"] for row in before.to_rows()}
    ours.merge(2, 1)
    after = ours(images)
    assert before.names[1].into is None  # it is of the concepts there were
    np.testing.assert_allclose(after.theta[:, 1], 0, atol=1e-3)
    np.testing.assert_allclose(after.theta.sum(1), 1, rtol=1e-5)
    assert after.names[2].long == "<red> face"
    assert ours.concepts.empty_concepts_.tolist() == [1]
    assert set(ours.gallery[2]) <= set(explainer.gallery[2]) | set(explainer.gallery[1])
    again = pace.load_run(tmp_path / "run", model=explainer.backbone.model, device="cpu")
    np.testing.assert_array_equal(again(images).theta, after.theta)
    assert again.concepts.names_ == ours.concepts.names_
    with pytest.raises(ValueError, match="1 was merged into 2"):
        again.hide(1)
    again.save(tmp_path / "copy")
    assert (tmp_path / "copy" / "names.json").read_text() == (tmp_path / "run" / "names.json").read_text()
    for _ in range(3):
        again.undo()
    np.testing.assert_array_equal(again(images).theta, before.theta)
    assert [name.long for name in again.concepts.names_] == ["concept 0", "concept 1", "concept 2"]


def test_only_kinds_of_one_part_can_be_merged(explainer):
    kinds = copy(explainer.concepts)
    kinds.__class__ = type("Nested", (pace.PACE,), {"part_of_": property(lambda self: np.array([0, 1, 0]))})
    with pytest.raises(ValueError, match="of different parts"):
        kinds.merged(0, 1)
    for group in [(0,), (0, 0), (0, 5), (-1, 0)]:
        with pytest.raises(ValueError, match="two or more different concepts of 3"):
            kinds.merged(*group)
