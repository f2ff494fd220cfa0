"""Every figure, drawn from tiny planted data: what is on it, and that nothing on it collides."""

import copy
import sys
import warnings
from functools import cache
from itertools import combinations

import numpy as np
import pytest
import torch

matplotlib = pytest.importorskip("matplotlib")

from matplotlib.figure import Figure  # noqa: E402
from matplotlib.text import Text  # noqa: E402
from planted import planted  # noqa: E402

from pace import PACE, Observations  # noqa: E402
from pace.explanation import Explanation  # noqa: E402
from pace.model.selecting import Selection  # noqa: E402
from pace.showing.figures import (  # noqa: E402
    bound,
    class_concepts,
    concept_gallery,
    concept_map,
    number_of_concepts,
    overlay,
    save,
    theta_bars,
    three_levels,
)

NAMES = [r"a_b $x^2$ \frac{", "鷹 🦅\x00\n" + "very " * 40 + "long", "<b>&amp; class_100%</b>"]


@cache
def fitted(k=4, grid=(4, 6), images=24, covariance="diag", seed=0, d=12, planted_concepts=None, **options):
    there = planted_concepts or (4 if k == "auto" else min(k, 12))
    data = planted(seed=seed, k=there, d=d, images=images, grid=grid)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PACE(k, covariance=covariance, max_iter=5, n_init=1, seed=seed, **options).fit(data.observations)
    return model, data.observations


def pixels_for(observations, size=(32, 48)):
    return np.random.default_rng(0).integers(0, 256, (len(observations), *size, 3), dtype=np.uint8)


def drawn_texts(figure):
    """Every piece of text that is really drawn, with its box in pixels."""
    found, draw = [], Text.draw

    def record(self, renderer, *args, **kwargs):
        if self.get_visible() and self.get_text().strip():
            found.append((self.get_text(), self.get_window_extent(renderer)))
        return draw(self, renderer, *args, **kwargs)

    Text.draw = record
    try:
        figure.canvas.draw()
    finally:
        Text.draw = draw
    return found


def assert_legible(figure):
    texts = drawn_texts(figure)
    assert texts
    page = figure.bbox
    for text, box in texts:
        assert box.x0 >= page.x0 - 1, f"{text!r} leaves the page"
        assert box.x1 <= page.x1 + 1, f"{text!r} leaves the page"
        assert box.y0 >= page.y0 - 1, f"{text!r} leaves the page"
        assert box.y1 <= page.y1 + 1, f"{text!r} leaves the page"
    for (one, a), (other, b) in combinations(texts, 2):
        wide, high = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert wide <= 0.5 or high <= 0.5, f"{one!r} and {other!r} overlap"


def all_figures(model, observations, images, **options):
    names = {"class_names": options.pop("class_names", None)}
    explanation = model.explain(observations)
    yield three_levels(model, images, observations, **names, **options)
    yield concept_gallery(model, images, observations, **options)
    yield class_concepts(model, images, observations, **names, **options)
    yield overlay(images, explanation, 1, **options)
    yield overlay(images, explanation, 1, list(range(min(7, model.n_concepts))), **options)
    yield bound(model)
    yield concept_map(model)
    yield theta_bars(explanation, titles=[NAMES[1]] * 6)


@pytest.mark.parametrize("k", [1, 3, 30, 100])
def test_no_text_overlaps_or_leaves_the_page(k):
    model, observations = fitted(k)
    for figure in all_figures(model, observations, pixels_for(observations), class_names=NAMES):
        assert isinstance(figure, Figure)
        assert_legible(figure)


@pytest.mark.parametrize("grid", [(1, 7), (5, 3)])
def test_grids_of_any_shape_without_cls(grid):
    model, with_cls = fitted(3, grid=grid)
    observations = Observations(with_cls.embeddings[:, 1:], with_cls.attention[:, 1:], with_cls.predictions, grid)
    for figure in all_figures(model, observations, pixels_for(observations, (40, 70))):
        assert_legible(figure)


def test_images_of_different_sizes_are_shown_as_the_model_saw_them():
    from pace.backbones.preprocessing import Preprocessing

    model, observations = fitted(3)
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (40 + m, 90 - m, 3), dtype=np.uint8) for m in range(len(observations))]
    for figure in all_figures(model, observations, images, preprocessing=Preprocessing(size=(32, 48))):
        assert_legible(figure)


def test_tensors_and_arrays_give_the_same_figure(tmp_path):
    model, observations = fitted(3)
    images = pixels_for(observations)
    as_tensor = torch.from_numpy(images).permute(0, 3, 1, 2)
    one, other = (
        save(three_levels(model, i, observations), tmp_path / "f.png").read_bytes() for i in (images, as_tensor)
    )
    assert one == other


def test_class_names_are_never_markup():
    model, observations = fitted(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = class_concepts(model, pixels_for(observations), observations, [0, 1, 2], class_names=NAMES)
        texts = [text for text, _ in drawn_texts(figure)]
    assert NAMES[0] in texts
    assert NAMES[2] in texts
    assert any(text.startswith(["□ □ very", ""][0]) and text.endswith("…") for text in texts)


@pytest.mark.parametrize("covariance", ["full", "diag", "tied", "low_rank"])
def test_the_map_takes_every_family(covariance):
    model, _ = fitted(5, covariance=covariance, rank=2)
    assert_legible(concept_map(model))


def test_the_map_puts_the_means_where_their_plane_says():
    model, _ = fitted(6)
    means, weights = model.means_, model.concept_weights_ / model.concept_weights_.sum()
    centred = (means - weights @ means) * np.sqrt(weights)[:, None]
    plane = np.linalg.svd(centred)[2][:2].T
    from matplotlib.patches import Circle

    discs = np.array([p.center for p in concept_map(model).axes[1].patches if isinstance(p, Circle)])
    order = np.argsort(-weights, kind="stable")
    expected = (means @ plane)[order]

    def distances(points):
        return np.linalg.norm(points[:, None] - points[None], axis=2)

    scale = distances(discs).max() / distances(expected).max()
    np.testing.assert_allclose(distances(discs), distances(expected) * scale, rtol=1e-3, atol=0.05)


@pytest.mark.parametrize("d", [1, 2])
def test_the_map_takes_few_dimensions(d):
    model, _ = fitted(2, d=d)
    assert_legible(concept_map(model))


def pruned():
    """20 concepts of which the patches ask for 4."""
    return fitted(20, covariance="tied", prune=True, planted_concepts=4)


def concepts_in(texts):
    return {int(text.split()[1]) for text in texts if text.startswith("Concept ")}


def texts_of(figure):
    assert_legible(figure)
    return [text for text, _ in drawn_texts(figure)]


def test_figures_of_a_pruned_model_show_the_concepts_in_use_and_no_other():
    model, observations = pruned()
    assert model.empty_concepts_.tolist() == list(range(4, 20))
    images, explanation = pixels_for(observations), model.explain(observations)
    drawn = [
        three_levels(model, images, observations, n_concepts=8),
        concept_gallery(model, images, observations),
        class_concepts(model, images, observations, n_concepts=8),
        overlay(images, explanation, 0, n_concepts=8),
        theta_bars(explanation, n_concepts=8),
    ]
    for figure in drawn:
        texts = texts_of(figure)
        assert concepts_in(texts)
        assert concepts_in(texts) <= {0, 1, 2, 3}
        assert not any("other" in text for text in texts)
    assert concepts_in(texts_of(drawn[0])) == concepts_in(texts_of(drawn[1])) == {0, 1, 2, 3}
    assert "4 concepts · 16 of 20 stayed empty" in texts_of(drawn[1])
    swatches = {patch.get_facecolor() for patch in drawn[0].paper.patches if patch.get_fill() and patch.get_hatch()}
    assert len(swatches) >= 3  # colours of their own, but the first, which has no hatch


def test_others_are_those_that_the_image_shows():
    model, observations = pruned()
    explanation = model.explain(observations)
    image = max(range(len(explanation)), key=lambda m: len(explanation.shown_concepts(m)))
    others = len(explanation.shown_concepts(image)) - 1
    assert 0 < others < 4
    texts = texts_of(theta_bars(explanation, [image], n_concepts=1))
    assert ("1 other" if others == 1 else f"{others} others") in texts


def test_shares_too_small_to_show_still_add_up():
    gamma = np.array([[1e4, *np.full(50, 2.0)]])  # 1 % in fifty parts
    explanation = Explanation(gamma / gamma.sum(), gamma)
    figure = theta_bars(explanation)
    assert "the rest" in texts_of(figure)
    np.testing.assert_allclose(sum(bar.get_width() for bar in figure.axes[1].patches), 1)


def test_the_map_of_a_pruned_model_draws_no_cross_for_what_lies_far_away():
    model, _ = pruned()
    texts = texts_of(concept_map(model))
    assert any("16 empty, off the map" in text for text in texts)
    assert not any("×" in text for text in texts)


def test_empty_concepts_are_crosses_without_number_and_counted():
    model, observations = fitted(4)
    model = copy.copy(model)
    model.concept_weights_ = np.array([50.0, 0.0, 20.0, 0.5])
    figure = concept_map(model)
    texts = texts_of(figure)
    assert {"0", "2"} <= set(texts)
    assert not {"1", "3"} & set(texts)
    crosses = sum(len(line.get_xdata()) for line in figure.axes[1].lines if line.get_marker() == "x")
    assert crosses == 1  # the other lies beyond the two in use
    assert any("×: empty (1) · 1 empty, off the map" in text for text in texts)
    gallery = [text for text, _ in drawn_texts(concept_gallery(model, pixels_for(observations), observations))]
    assert "2 concepts · 2 of 4 stayed empty" in gallery
    assert "Concept 1" not in gallery


def test_the_bound_has_a_panel_for_each_term_the_model_has():
    data = planted(k=3, d=8, images=12, grid=(3, 3))
    bare = Observations(data.observations.embeddings, data.observations.attention)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = PACE(3, max_iter=4, n_init=1).fit(data.observations, perturbed=data.perturbed)
        only = PACE(3, max_iter=1, n_init=1).fit(bare)
    assert len(bound(whole).axes) == 1 + 4
    assert len(bound(only).axes) == 1 + 1
    assert_legible(bound(whole))
    assert_legible(bound(only))
    total = bound(whole).axes[1].lines[0].get_ydata()
    np.testing.assert_allclose(total, [b.total for b in whole.lower_bounds_])
    assert "batch" in [text for text, _ in drawn_texts(bound(PACE(3, n_init=1).partial_fit(bare)))]


@pytest.mark.parametrize("k", [1, 3, 12])
def test_the_number_of_concepts_is_marked_where_the_bound_is_best(k):
    model = copy.copy(fitted(3)[0])
    numbers = torch.arange(1, k + 3)
    bounds = -1e5 * (numbers - k).abs().double()
    model.selection_ = Selection(torch.zeros(k, 12), torch.zeros(k), numbers, bounds, 24)
    figure = number_of_concepts(model)
    assert_legible(figure)
    whole, near = figure.axes[1], figure.axes[-1]
    np.testing.assert_allclose(whole.lines[0].get_xydata(), np.stack([numbers, bounds], 1))
    for panel in (whole, near):
        assert panel.lines[1].get_xydata().tolist() == [[k, 0]]
    assert len(figure.axes) == (2 if k < 5 else 3)
    assert near.lines[0].get_xdata().tolist() == [n for n in numbers.tolist() if abs(n - k) <= 3]


def test_what_was_found_by_a_fit_can_be_drawn():
    model, _ = fitted("auto", covariance="tied")
    assert_legible(number_of_concepts(model))
    assert any(
        f"{len(model.means_)} concepts, found in 24 images" in text
        for text, _ in drawn_texts(number_of_concepts(model))
    )


def test_bars_show_theta_and_its_interval_and_the_rest_adds_up():
    gamma = np.array([[6.0, 3.0, 1.0, 0.5, 0.5]])
    explanation = Explanation(gamma / gamma.sum(), gamma)
    figure = theta_bars(explanation, n_concepts=2, level=0.8)
    axes = figure.axes[1]
    np.testing.assert_allclose([bar.get_width() for bar in axes.patches], [6 / 11, 3 / 11, 2 / 11])
    low, high = explanation.interval(0.8)
    intervals = [(min(line.get_xdata()), max(line.get_xdata())) for line in axes.lines[1:]]
    np.testing.assert_allclose(intervals[:2], np.stack([low[0, :2], high[0, :2]], 1))
    from scipy.stats import beta

    np.testing.assert_allclose(intervals[2], beta.ppf([0.1, 0.9], 2, 9))


def test_class_concepts_are_those_that_carry_the_class_in_its_own_images():
    model, observations = fitted(4)
    theta, head = model.transform(observations), model.label_head_
    own = np.asarray(observations.predictions).argmax(1) == 1
    strength = theta[own].mean(0) * (head[:, 1] - head.mean(1))
    expected = [k for k in np.argsort(-strength, kind="stable")[:3] if strength[k] > 0]  # the others speak against it
    texts = [t for t, _ in drawn_texts(class_concepts(model, pixels_for(observations), observations, 1))]
    assert [t for t in texts if t.startswith("Concept")] == [f"Concept {k}" for k in expected]


def test_nearest_patches_come_from_different_images_while_there_are_enough():
    from pace.showing.figures.pieces import nearest

    model, observations = fitted(3)
    closest = model.nearest_patches(observations, 0, 1)
    found = nearest(model, observations, 0, 6)
    assert found[0] == (closest.images[0], closest.patches[0])
    assert len({image for image, _ in found}) == 6
    few = nearest(model, observations[:2], 0, 6)
    assert len(set(few)) == 6
    assert {image for image, _ in few} == {0, 1}


def test_concepts_are_drawn_in_the_colour_of_the_palette_that_suits_their_patches():
    from pace.showing.figures.pieces import looks_like

    looks = looks_like(np.array([[20, 200, 40], [5, 5, 5], [10, 10, 190], [130, 5, 5]]))
    assert [look.color for look in looks] == ["#009E73", "#4D4D4D", "#0072B2", "#D55E00"]
    assert len(set(looks_like(np.zeros((50, 3))))) == 50


def test_the_outline_goes_around_what_is_inside():
    from pace.showing.figures.overlays import outline

    edges = outline(np.array([[True, False], [False, False]]), (20, 40))
    assert sorted(tuple(sorted(edge)) for edge in edges) == [
        ((0, 0), (0, 10)), ((0, 0), (20, 0)), ((0, 10), (20, 10)), ((20, 0), (20, 10)),
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", [".png", ".svg", ".PDF"])
def test_saving_gives_the_same_bytes_each_time(suffix, tmp_path):
    model, observations = fitted(3)
    images = pixels_for(observations)
    paths = [save(three_levels(model, images, observations), tmp_path / f"{n}{suffix}") for n in "ab"]
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert not any(word in first for word in (b"CreationDate", b"<dc:date>", b"Software"))
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"a{suffix}", f"b{suffix}"]


def test_other_suffixes_and_missing_folders_are_refused(tmp_path):
    figure = theta_bars(Explanation(np.ones((1, 1)), np.ones((1, 1))))
    with pytest.raises(ValueError, match=r"figure.gif: figures are saved as .png, .svg or .pdf"):
        save(figure, tmp_path / "figure.gif")
    with pytest.raises(FileNotFoundError, match="no folder"):
        save(figure, tmp_path / "none" / "figure.png")


def test_pyplot_and_the_users_settings_are_left_alone():
    model, observations = fitted(3)
    with matplotlib.rc_context({"text.usetex": True, "axes.facecolor": "red", "lines.linewidth": 9}):
        before = dict(matplotlib.rcParams)
        for figure in all_figures(model, observations, pixels_for(observations), class_names=NAMES):
            assert_legible(figure)
        assert dict(matplotlib.rcParams) == before
    if "matplotlib.pyplot" in sys.modules:
        assert not sys.modules["matplotlib.pyplot"].get_fignums()


def test_figures_do_not_import_pyplot():
    import subprocess

    code = "import sys, pace.showing.figures; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, o, i: three_levels(m, i[:3], o), "images: expected the 24 that were observed; found 3"),
        (lambda m, o, i: three_levels(m, i, o, shown=[]), "shown: expected at least one"),
        (lambda m, o, i: three_levels(m, i, o, concepts=[9]), r"concepts: expected some of 0 to 2; found \[9\]"),
        (lambda m, o, i: class_concepts(m, i, o, 7), "classes: expected 0 to 2; found 7"),
        (lambda m, o, i: class_concepts(m, i, o, class_names=["a"]), "class_names: expected 3; found 1"),
        (lambda m, o, i: concept_gallery(m, i, Observations(o.embeddings, o.attention)), "layout of the patches"),
        (lambda m, o, i: class_concepts(m, i, Observations(o.embeddings, o.attention, grid=(4, 6), prefix_tokens=1)),
         "classes need predictions"),
        (lambda m, o, i: overlay(i[:2], m.explain(o), 0), "expected the 24 that were explained; found 2"),
        (lambda m, o, i: theta_bars(m.explain(o), [0, 1], titles=["a"]), "titles: expected 2"),
        (lambda m, o, i: number_of_concepts(m), "the number of concepts was given, not found"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_said(call, message):
    model, observations = fitted(3)
    with pytest.raises(ValueError, match=message):
        call(model, observations, pixels_for(observations))


def test_an_image_that_is_not_there_is_an_index_error():
    model, observations = fitted(3)
    with pytest.raises(IndexError):
        three_levels(model, pixels_for(observations), observations, shown=[99])
