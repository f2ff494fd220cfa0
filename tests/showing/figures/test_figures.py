"""Every figure, drawn from tiny planted data: what is on it, and that nothing on it collides."""

import copy
import sys
import warnings
from functools import cache
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch

matplotlib = pytest.importorskip("matplotlib")

from matplotlib.figure import Figure  # noqa: E402
from matplotlib.text import Text  # noqa: E402
from matplotlib.transforms import IdentityTransform  # noqa: E402
from planted import planted  # noqa: E402
from scipy.stats import beta  # noqa: E402

from pace import PACE, Observations  # noqa: E402
from pace.editing import Edits  # noqa: E402
from pace.explanation import Explanation  # noqa: E402
from pace.naming import concept_names  # noqa: E402
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
from pace.showing.figures.drawing import Layout, fills_like, show_borders  # noqa: E402

NAMES = [r"a_b $x^2$ \frac{", "Été\x00\n" + "very " * 40 + "long", "<b>&amp; class_100%</b>"]


@cache
def fitted(k=4, grid=(4, 6), covariance="diag", d=12, planted_concepts=None, **options):
    data = planted(k=planted_concepts or min(k, 12), d=d, images=24, grid=grid)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PACE(k, covariance=covariance, max_iter=5, n_init=1, **options).fit(data.observations)
    return model, data.observations


def pixels_for(observations, size=(32, 48)):
    return np.random.default_rng(0).integers(0, 256, (len(observations), *size, 3), dtype=np.uint8)


def texts_of(figure):
    """Every text that is really drawn; none may overlap another or leave the page."""
    drawn, draw = [], Text.draw

    def record(self, renderer, *args, **kwargs):
        if self.get_visible() and self.get_text().strip():
            drawn.append((self.get_text(), self.get_window_extent(renderer)))
        return draw(self, renderer, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", record)
        figure.canvas.draw()
    assert drawn
    for text, box in drawn:
        assert (np.abs(np.clip(box.extents, 0, np.tile(figure.bbox.max, 2)) - box.extents) <= 1).all(), text
    for (one, a), (other, b) in combinations(drawn, 2):
        wide, high = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert wide <= 0.5 or high <= 0.5, f"{one!r} and {other!r} overlap"
    return [text for text, _ in drawn]


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
    yield theta_bars(explanation)


@pytest.mark.parametrize("k", [1, 60])
def test_no_text_overlaps_or_leaves_the_page(k):
    model, observations = fitted(k)
    for figure in all_figures(model, observations, pixels_for(observations), class_names=NAMES):
        assert isinstance(figure, Figure)
        assert texts_of(figure)


def test_images_of_any_size_on_a_grid_of_any_shape_are_shown_as_the_model_saw_them():
    from pace.backbones.preprocessing import Preprocessing

    model, with_cls = fitted(3, grid=(1, 7))
    observations = Observations(with_cls.embeddings[:, 1:], with_cls.attention[:, 1:], with_cls.predictions, (1, 7))
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (40 + m, 90 - m, 3), dtype=np.uint8) for m in range(len(observations))]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="0 instead of 1 tokens")
        for figure in all_figures(model, observations, images, preprocessing=Preprocessing(size=(32, 56))):
            assert texts_of(figure)


def test_class_names_are_never_markup():
    model, observations = fitted(3)
    texts = texts_of(class_concepts(model, pixels_for(observations), observations, [0, 1, 2], class_names=NAMES))
    assert NAMES[0].replace("_", " ") in texts
    assert NAMES[2].replace("_", " ") in texts
    assert any(text.startswith("Été very very") and text.endswith("…") for text in texts)


@pytest.mark.parametrize(("covariance", "d"), [("full", 12), ("low_rank", 12), ("tied", 1)])
def test_the_map_takes_every_family_and_few_dimensions(covariance, d):
    model, _ = fitted(5, covariance=covariance, d=d)
    figure = concept_map(model)
    assert texts_of(figure)
    assert all(np.isfinite(patch.get_extents().bounds).all() for patch in figure.axes[1].patches)


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


def pruned():
    """20 concepts of which the patches ask for 4."""
    return fitted(20, covariance="tied", prune=True, planted_concepts=4)


def concepts_in(texts):
    return {int(text.split()[1]) for text in texts if text.startswith("Concept ")}


def test_figures_of_a_pruned_model_show_the_concepts_in_use_and_no_other():
    model, observations = pruned()
    assert model.empty_concepts_.tolist() == list(range(4, 20))
    images, explanation = pixels_for(observations), model.explain(observations)
    drawn = [
        three_levels(model, images, observations, n_concepts=8),
        concept_gallery(model, images, observations),
        class_concepts(model, images, observations),
        overlay(images, explanation, 0, n_concepts=8),
        theta_bars(explanation, n_concepts=8),
    ]
    texts = [texts_of(figure) for figure in drawn]
    for own in texts:
        assert concepts_in(own)
        assert concepts_in(own) <= {0, 1, 2, 3}
        assert not any("other" in text for text in own)
    assert concepts_in(texts[0]) == concepts_in(texts[1]) == {0, 1, 2, 3}
    assert "4 concepts · 16 of 20 stayed empty" in texts[1]
    assert "4 concepts, found in 24 images" in texts_of(number_of_concepts(model))
    swatches = {patch.get_facecolor() for patch in drawn[0].paper.patches if patch.get_fill() and patch.get_hatch()}
    assert len(swatches) >= 3  # colours of their own, but the first, which has no hatch


def test_empty_concepts_are_crosses_without_number_and_counted():
    model = copy.copy(fitted(4)[0])
    model.concept_weights_ = np.array([50.0, 0.0, 20.0, 0.5])
    figure = concept_map(model)
    texts = texts_of(figure)
    assert {"0", "2"} <= set(texts)
    assert not {"1", "3"} & set(texts)
    assert sum(len(line.get_xdata()) for line in figure.axes[1].lines if line.get_marker() == "x") == 2
    assert "×: 2 empty" in " ".join(texts)


def test_the_bound_has_a_panel_for_each_term_the_model_has():
    model, observations = fitted(3)
    whole = bound(model)
    assert len(whole.axes) == 1 + 3  # the paper, L, L_e and L_f: there were no perturbed views
    total = whole.axes[1].lines[0].get_ydata()
    np.testing.assert_allclose(total, [value.total for value in model.lower_bounds_])
    alone = PACE(3, n_init=1).partial_fit(Observations(observations.embeddings, observations.attention))
    assert len(bound(alone).axes) == 1 + 1
    assert "batch" in texts_of(bound(alone))


@pytest.mark.parametrize("k", [1, 12])
def test_the_number_of_concepts_is_marked_where_the_bound_is_best(k):
    model = copy.copy(fitted(3)[0])
    numbers = torch.arange(1, k + 3)
    bounds = -1e5 * (numbers - k).abs().double()
    model.selection_ = SimpleNamespace(n_concepts=k, numbers=numbers, bounds=bounds, images=24)
    figure = number_of_concepts(model)
    assert texts_of(figure)
    whole, near = figure.axes[1], figure.axes[-1]
    np.testing.assert_allclose(whole.lines[0].get_xydata(), np.stack([numbers, bounds], 1))
    for panel in (whole, near):
        assert panel.lines[1].get_xydata().tolist() == [[k, 0]]
    assert len(figure.axes) == (2 if k < 5 else 3)
    assert near.lines[0].get_xdata().tolist() == [n for n in numbers.tolist() if abs(n - k) <= 3]


def test_bars_show_theta_and_its_interval_and_the_rest_adds_up():
    gamma = np.array([[6.0, 3.0, 1.0, 0.5, 0.5]])
    explanation = Explanation(gamma / gamma.sum(), gamma)
    figure = theta_bars(explanation, n_concepts=2, level=0.8)
    axes = figure.axes[1]
    np.testing.assert_allclose([bar.get_width() for bar in axes.patches], [6 / 11, 3 / 11, 2 / 11])
    assert "3 others" in texts_of(figure)
    low, high = explanation.interval(0.8)
    intervals = [(min(line.get_xdata()), max(line.get_xdata())) for line in axes.lines[1:]]
    expected = [*zip(low[0, :2], high[0, :2], strict=True), beta.ppf([0.1, 0.9], 2, 9)]
    np.testing.assert_allclose(intervals, expected)


def test_shares_too_small_to_show_still_add_up():
    gamma = np.array([[1e4, *np.full(50, 2.0)]])  # 1 % in fifty parts
    figure = theta_bars(Explanation(gamma / gamma.sum(), gamma))
    assert "the rest" in texts_of(figure)
    np.testing.assert_allclose(sum(bar.get_width() for bar in figure.axes[1].patches), 1)


def test_kinds_of_parts_are_called_so():
    gamma, part_of = np.array([[6.0, 3.0, 2.0]]), np.array([0, 1, 0])
    called = concept_names(part_of, np.array([1.0, 9.0, 2.0]))
    explanation = Explanation(gamma / gamma.sum(), gamma, part_of=part_of, called=called)
    texts = texts_of(theta_bars(explanation))
    assert [t for t in texts if "kind" in t] == ["B · kind 2", "A · kind 1", "B · kind 1"]


def test_figures_have_the_users_names_cut_to_their_room_and_leave_hidden_concepts_out():
    model, observations = fitted(4)
    first, second, *_ = np.argsort(-model.concept_weights_, kind="stable").tolist()
    edits = Edits(model.names_)
    edits.name(first, "$red_face$ with a very long name, longer than its room")
    edits.hide(second)
    model.names_ = edits.names
    texts = texts_of(concept_gallery(model, pixels_for(observations), observations))
    assert sum(text.startswith("$red_face$") and text.endswith("…") for text in texts) == 1
    assert f"Concept {second}" not in texts
    assert any("1 hidden" in text for text in texts)
    explanation = model.explain(observations)
    assert f"Concept {second}" not in texts_of(theta_bars(explanation, [0, 1, 2]))
    for draw in (three_levels, class_concepts):
        figure = draw(model, pixels_for(observations), observations)
        assert f"Concept {second}" not in texts_of(figure)


def test_class_concepts_are_those_that_carry_the_class_in_its_own_images():
    model, observations = fitted(4)
    theta, evidence = model.transform(observations), model.evidence_
    own = np.asarray(observations.predictions).argmax(1) == 1
    strength = theta[own].mean(0) * evidence[:, 1]
    expected = [k for k in np.argsort(-strength, kind="stable")[:3] if strength[k] > 0]  # the others speak against it
    texts = texts_of(class_concepts(model, pixels_for(observations), observations, 1))
    assert [t for t in texts if t.startswith("Concept")] == [f"Concept {k}" for k in expected]


def test_concepts_are_drawn_in_the_colour_of_the_palette_that_suits_their_patches():
    fills = fills_like(np.array([[20, 200, 40], [5, 5, 5], [10, 10, 190], [130, 5, 5]]))
    assert [fill.color for fill in fills] == ["#009E73", "#4D4D4D", "#0072B2", "#D55E00"]
    assert len(set(fills_like(np.zeros((50, 3))))) == 50


def test_the_outline_goes_around_what_is_inside():
    layout = Layout(40, 20)
    inside = np.pad(np.array([[True, False], [False, False]]), 1)
    show_borders(layout, inside, np.zeros((20, 40, 3)), IdentityTransform())
    lines = layout.paper.collections[0]
    edges = [lines.get_transform().transform(edge).tolist() for edge in lines.get_segments()]
    assert sorted(tuple(sorted(map(tuple, edge))) for edge in edges) == [
        ((0, 0), (0, 10)), ((0, 0), (20, 0)), ((0, 10), (20, 10)), ((20, 0), (20, 10)),
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", [".png", ".svg", ".PDF"])
def test_the_same_figure_gives_the_same_bytes_from_arrays_and_tensors(suffix, tmp_path):
    model, observations = fitted(3)
    pixels = pixels_for(observations)
    given = (pixels, torch.from_numpy(pixels).permute(0, 3, 1, 2))
    first, second = (
        save(concept_gallery(model, images, observations), tmp_path / f"f{suffix}").read_bytes() for images in given
    )
    assert first == second
    assert not any(word in first for word in (b"CreationDate", b"<dc:date>", b"Software"))
    assert [path.name for path in tmp_path.iterdir()] == [f"f{suffix}"]


def test_other_suffixes_and_missing_folders_are_refused(tmp_path):
    figure = theta_bars(Explanation(np.ones((1, 1)), np.ones((1, 1))))
    with pytest.raises(ValueError, match=r"figure.gif: figures are saved as .png, .svg or .pdf"):
        save(figure, tmp_path / "figure.gif")
    with pytest.raises(FileNotFoundError, match="no folder"):
        save(figure, tmp_path / "none" / "figure.png")


def test_the_users_settings_are_left_alone_and_pyplot_is_not_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)

    def settings():
        return {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if "backend" not in name}

    model, observations = fitted(3)
    with matplotlib.rc_context({"text.usetex": True, "axes.facecolor": "red", "lines.linewidth": 9}):
        before = settings()
        for figure in all_figures(model, observations, pixels_for(observations), class_names=NAMES):
            assert texts_of(figure)
        assert settings() == before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, o, i: three_levels(m, i[:3], o), "images: expected 24, one for each that was observed; found 3"),
        (lambda m, o, i: three_levels(m, i, o, shown=[]), "shown: expected at least one"),
        (lambda m, o, i: three_levels(m, i, o, concepts=[9]), r"concepts: expected some of 0 to 2; found \[9\]"),
        (lambda m, o, i: class_concepts(m, i, o, 7), r"classes: expected some that images are predicted as; found \[7\]"),
        (lambda m, o, i: class_concepts(m, i, o, class_names=["a"]), "class_names: expected 3, one for each class; found 1"),
        (lambda m, o, i: concept_gallery(m, i, Observations(o.embeddings, o.attention)), "layout of the patches"),
        (lambda m, o, i: class_concepts(m, i, Observations(o.embeddings, o.attention, grid=(4, 6), prefix_tokens=1)),
         "classes need predictions"),
        (lambda m, o, i: overlay(i[:2], m.explain(o), 0), "images: expected 24, one for each that was observed; found 2"),
        (lambda m, o, i: number_of_concepts(m), "the number of concepts was given, not found"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused_with_a_reason(call, message):
    model, observations = fitted(3)
    with pytest.raises(ValueError, match=message):
        call(model, observations, pixels_for(observations))
    with pytest.raises(IndexError):
        three_levels(model, pixels_for(observations), observations, shown=[99])
