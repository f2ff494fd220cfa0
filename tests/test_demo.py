import pytest

from pace import PACE
from pace.demo import run


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return run(tmp_path_factory.mktemp("demo") / "run", n_per_class=50, progress=False)


def test_the_run_folder_holds_the_report_the_model_and_the_figures(result):
    assert result.report.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert PACE.load(result.folder / "model.safetensors").n_concepts == 5
    assert all(figure.stat().st_size > 1000 for figure in result.figures)
    assert len(result.figures) == 5


def test_each_colour_and_black_is_a_concept_of_its_own(result):
    assert result.scores["faithfulness"].value == 1
    assert result.scores["colour_accuracy"].value > 0.9  # a colour without a concept of its own costs more
    assert result.scores["effective_concepts"].value > 4


def test_concepts_are_nearly_as_stable_as_the_true_colours_which_are_scored_beside_them(result):
    assert result.scores["stability"].value < 1.25 * result.true_colour_stability
    assert result.scores["stability_true_colours"].value == result.true_colour_stability


def test_fewer_concepts_than_colours_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="at least 5"):
        run(tmp_path / "run", n_concepts=4)
    assert not (tmp_path / "run").exists()
