import pytest

from pace import PACE, load_run
from pace.backbones.birds_vit import LAYER
from pace.demo import run
from pace.images import Birds


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return run(tmp_path_factory.mktemp("demo") / "run", n_per_class=20, progress=False)


def test_the_run_folder_holds_the_report_the_model_and_the_figures(result):
    assert result.report.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert PACE.load(result.folder / "model.safetensors").part_of_ is not None
    assert all(figure.stat().st_size > 1000 for figure in result.figures)
    assert len(result.figures) == 5


def test_its_concepts_explain_other_birds(result):
    explainer = load_run(result.folder / "run", device="cpu")
    assert explainer.backbone.layer == LAYER
    found = explainer(Birds("test", n_per_class=5, size=112))
    assert found.n_parts == result.model.n_parts_
    assert found.explainer.gallery[0][0].split("/")[0] in map(str, range(10))


def test_concepts_are_kinds_of_parts_and_scored_by_the_true_ones(result):
    assert result.scores["faithfulness"].value > 0.6  # ten classes
    assert result.scores["part_recovery"].value > 0.2
    assert result.scores["kind_accuracy"].value > 0.6
