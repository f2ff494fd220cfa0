import re
import sys
import warnings
from copy import copy

import numpy as np
import pytest
import sklearn
from planted import planted

from pace import PACE, Explanation, Observations
from pace.naming import concept_names


def quick_fit(observations, k, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PACE(k, covariance="diag", max_iter=2, n_init=1, **options).fit(observations)


@pytest.fixture(scope="module")
def fitted():
    observations = planted(k=4, d=8, images=24, grid=(4, 4)).observations
    return quick_fit(observations, 4), observations


def test_an_explanation_is_a_table_of_its_largest_shares_with_intervals():
    gamma = np.array([[6.0, 3.0, 1e-4], [1.0, 8.0, 1.0]])
    explanation = Explanation(gamma / gamma.sum(1, keepdims=True), gamma)
    html = explanation._repr_html_()
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in html.split("<tr>")[2:]]
    assert [(row[0], row[1]) for row in rows] == [
        ("image 0", "0"), ("", "1"), ("image 1", "1"), ("", "0"), ("", "2"),
    ]  # fmt: skip
    assert rows[0][2].endswith("0.67")
    low, high = explanation.interval(0.9)
    assert rows[0][3] == f"{low[0, 0]:.2f} to {high[0, 0]:.2f}"
    assert "0 images" in Explanation(np.empty((0, 2)), np.empty((0, 2)))._repr_html_()


def test_where_concepts_are_kinds_of_parts_an_explanation_lists_the_parts():
    gamma = np.array([[6.0, 3.0, 1e-4], [1.0, 8.0, 2.0]])
    use, part_of = np.array([1.0, 2.0, 9.0]), np.array([0, 0, 1])
    explanation = Explanation(
        gamma / gamma.sum(1, keepdims=True), gamma, part_of=part_of, called=concept_names(part_of, use)
    )
    html = explanation._repr_html_()
    assert ">part and kind</th>" in html
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in html.split("<tr>")[2:]]
    assert [(row[0], row[1]) for row in rows] == [
        ("image 0", "B · kind 2"), ("image 1", "B · kind 1"), ("", "A · kind 1"),
    ]  # fmt: skip
    low, high = explanation.part_interval(0.9)
    assert rows[1][2].endswith(f"{9 / 11:.2f}")
    assert rows[1][3] == f"{low[1, 0]:.2f} to {high[1, 0]:.2f}"


def test_where_concepts_are_kinds_of_parts_a_model_names_them_so(fitted):
    part_of = np.array([0, 1, 0, 1])
    model = copy(fitted[0])
    model.__class__ = type("Nested", (PACE,), {"part_of_": property(lambda self: part_of)})
    names = concept_names(part_of, model.concept_weights_)
    order = np.argsort(-model.concept_weights_, kind="stable")
    found = re.findall(r"<tr><td[^>]*>(.*?)</td>", model._repr_html_())
    assert found == [f"{names[k].part} · kind {names[k].kind}" for k in order]


def test_a_fitted_model_lists_its_concepts_by_use(fitted):
    model, _ = fitted
    html = model._repr_html_()
    assert "fitted: 4 concepts;" in html
    assert "their number found" not in html
    order = np.argsort(-model.concept_weights_, kind="stable")
    assert [int(k) for k in re.findall(r"<tr><td[^>]*>(\d+)</td>", html)] == order.tolist()
    best = int(model.evidence_[order[0]].argmax())
    assert f"class {best} (" in html
    assert model._repr_mimebundle_()["text/html"] == html


def test_empty_concepts_are_counted_and_not_listed(fitted):
    _, observations = fitted
    model = quick_fit(observations, 20, prune=True)
    used = 20 - len(model.empty_concepts_)
    assert 1 < used < 10
    html = model._repr_html_()
    assert f"{used} of 20 concepts in use" in html
    assert "their number found in 24 images" in html
    assert html.count("<meter") == used


def test_of_many_concepts_the_most_used_are_listed():
    data = planted(k=12, d=8, images=20, grid=(4, 4))
    model = quick_fit(Observations(data.observations.embeddings, data.observations.attention), 20)
    html = model._repr_html_()
    used = 20 - len(model.empty_concepts_)
    assert used > 12
    assert f"and {used - 12} more concepts in use" in html
    assert html.count("<meter") == 12
    assert "speaks for" not in html


def test_parameters_are_escaped(fitted):
    hostile = sklearn.clone(fitted[0]).set_params(device="<img src=x onerror=alert(1)>")
    hostile.__dict__ = fitted[0].__dict__ | hostile.__dict__
    assert "<img" not in hostile._repr_html_()


def test_an_unfitted_model_is_shown_as_scikit_learn_does():
    model = PACE(3)
    assert "sk-" in model._repr_html_()
    assert "sk-" in model._repr_mimebundle_()["text/html"]
    with sklearn.config_context(display="text"):
        assert not hasattr(model, "_repr_html_")
        assert "text/html" not in model._repr_mimebundle_()


def test_figures_say_what_to_install_without_matplotlib(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("pace.showing.figures")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'pace-xai\[figures\]'"):
        import pace.showing.figures  # noqa: F401
