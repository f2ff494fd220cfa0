import pytest

from pace import PACE
from pace.demo import run


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return run(tmp_path_factory.mktemp("demo") / "run", n_per_class=20, progress=False)


def test_the_run_folder_holds_the_report_the_model_and_the_figures(result):
    assert result.report.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert PACE.load(result.folder / "model.safetensors").part_of_ is not None
    assert all(figure.stat().st_size > 1000 for figure in result.figures)
    assert len(result.figures) == 5


def test_concepts_are_kinds_of_parts_and_scored_by_the_true_ones(result):
    assert result.scores["faithfulness"].value > 0.6  # ten classes
    assert result.scores["part_recovery"].value > 0.2
    assert result.scores["kind_accuracy"].value > 0.6
