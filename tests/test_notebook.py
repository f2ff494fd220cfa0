import builtins
import re
import warnings

import numpy as np
import pytest
import sklearn
from planted import planted

from pace import PACE, Explanation, Observations


@pytest.fixture(scope="module")
def fitted():
    data = planted(k=4, d=8, images=12, grid=(3, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PACE(4, covariance="diag", max_iter=3, n_init=1).fit(data.observations), data.observations


@pytest.fixture
def without_matplotlib(monkeypatch):
    import sys

    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.startswith("pace.showing.figures")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)


def test_an_explanation_is_a_picture_that_says_in_words_what_it_shows(fitted):
    pytest.importorskip("matplotlib")
    model, observations = fitted
    explanation = model.explain(observations)
    html = explanation._repr_html_()
    top = explanation.top_concepts(0, 1)[0]
    assert f"image 0: concept {top} {explanation.theta[0, top]:.2f} [" in html
    assert "data:image/png;base64," in html
    assert explanation._repr_png_().startswith(b"\x89PNG")


def test_without_matplotlib_an_explanation_is_a_table(fitted, without_matplotlib):
    model, observations = fitted
    explanation = model.explain(observations)
    assert explanation._repr_png_() is None
    html = explanation._repr_html_()
    assert "<img" not in html
    assert html.count("<tr>") == 1 + 3


def test_figures_say_what_to_install_without_matplotlib(without_matplotlib):
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'pace-xai\[figures\]'"):
        import pace.showing.figures  # noqa: F401


def test_an_empty_explanation_is_no_picture():
    empty = Explanation(np.empty((0, 2)), np.empty((0, 2)))
    assert empty._repr_png_() is None
    assert "0 images" in empty._repr_html_()


def test_a_fitted_model_lists_its_concepts_by_use(fitted, without_matplotlib):
    model, _ = fitted
    html = model._repr_html_()
    order = np.argsort(-model.concept_weights_, kind="stable")
    order = [k for k in order if k not in model.empty_concepts_]
    places = [html.index(f">{k}</th>") for k in order]
    assert places == sorted(places)
    best = int(model.label_head_[order[0]].argmax())
    assert f"class {best} (" in html
    assert model._repr_mimebundle_()["text/html"] == html


def test_a_model_says_whether_the_number_of_its_concepts_was_found(fitted):
    model, observations = fitted
    assert "their number found" not in model._repr_html_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = PACE("auto", max_iter=1).fit(observations)
    assert "their number found in 12 images" in found._repr_html_()


def test_empty_concepts_are_counted_and_not_listed():
    data = planted(k=4, d=8, images=30, grid=(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PACE(20, prune=True, max_iter=5).fit(data.observations)
    assert model.empty_concepts_.tolist() == list(range(4, 20))
    html = model._repr_html_()
    assert "4 of 20 concepts in use" in html
    assert html.count("<meter") == 4
    explanation = model.explain(data.observations)
    assert "4 of 20 concepts" in explanation._repr_html_()
    words = re.search(r'alt="([^"]*)"', explanation._repr_html_())[1]
    named = {int(k) for k in re.findall(r"concept (\d+)", words)}
    assert named <= {0, 1, 2, 3}


def test_a_model_whose_concepts_are_all_in_use_says_just_their_number(fitted):
    model, _ = fitted
    assert not len(model.empty_concepts_)
    assert "fitted: 4 concepts;" in model._repr_html_()


def test_many_concepts_are_folded_away():
    data = planted(k=12, d=8, images=20, grid=(4, 4))
    bare = Observations(data.observations.embeddings, data.observations.attention)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PACE(20, covariance="diag", max_iter=2, n_init=1).fit(bare)
    html = model._repr_html_()
    used = 20 - len(model.empty_concepts_)
    assert used > 12
    assert f"<summary>{used - 12} more concepts in use</summary>" in html
    assert "speaks for" not in html


def test_parameters_are_escaped(fitted):
    model, _ = fitted
    name = model.device
    try:
        model.device = "<img src=x onerror=alert(1)>"
        assert "<img" not in model._repr_html_()
    finally:
        model.device = name


def test_an_unfitted_model_is_shown_as_scikit_learn_does():
    model = PACE(3)
    assert "sk-" in model._repr_html_()
    assert "sk-" in model._repr_mimebundle_()["text/html"]
    with sklearn.config_context(display="text"):
        assert not hasattr(model, "_repr_html_")
        assert "text/html" not in model._repr_mimebundle_()
