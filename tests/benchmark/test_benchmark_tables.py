"""Bold, underlined, averaged and compared as the paper does it."""

import csv
import io
from dataclasses import replace

import pytest
from tables_case import results, row

from pace.benchmark import Method, Results, Row, as_markdown, as_rich, table_1, table_2
from pace.benchmark.tables import (
    DESIDERATA,
    exposed,
    exposing_tables,
    marks,
    printed,
    printed_average,
    published,
    time_table,
)
from pace.benchmark.writing import as_csv, as_page, write_results
from pace.metrics.declare import METRICS

# Which methods the paper sets in bold and underlines, read off its Table 1.
BOLD = {
    ("faithfulness", "color"): {"Saliency", "AGI", "PACE"},
    ("faithfulness", "flower"): {"PACE"},
    ("faithfulness", "cars"): {"Saliency", "PACE"},
    ("faithfulness", "cub"): {"PACE"},
    ("stability", "color"): {"PACE"},
    ("sparsity", "color"): {"PACE"},
    ("sparsity", "flower"): {"LIME"},
    ("sparsity", "cars"): {"LIME"},
    ("sparsity", "cub"): {"PACE"},
}
UNDERLINED = {
    ("faithfulness", "color"): set(),
    ("faithfulness", "flower"): {"Saliency"},
    ("faithfulness", "cars"): set(),
    ("faithfulness", "cub"): {"Saliency", "AGI"},
    ("stability", "color"): {"Saliency"},
    ("sparsity", "color"): {"LIME"},
    ("sparsity", "flower"): {"PACE"},
    ("sparsity", "cars"): {"PACE"},
    ("sparsity", "cub"): {"LIME"},
}


def test_the_papers_own_numbers_get_the_papers_own_marks():
    methods = list(published()["table_1"])
    for metric, dataset in BOLD:
        found = marks([printed(method, metric, dataset) for method in methods], METRICS[metric].better)
        assert {m for m, mark in zip(methods, found, strict=True) if mark == "best"} == BOLD[metric, dataset]
        assert {m for m, mark in zip(methods, found, strict=True) if mark == "second"} == UNDERLINED[metric, dataset]


@pytest.mark.parametrize("metric", DESIDERATA)
def test_the_papers_averages_are_those_of_its_table_1(metric):
    for method, averages in published()["table_2"].items():
        values = published()["table_1"][method][metric].values()
        assert averages[metric] == pytest.approx(sum(values) / 4, abs=0.0051)
        assert printed_average(method, metric, ["cub", "color", "cars", "flower"]) == averages[metric]


def test_over_fewer_datasets_the_papers_average_is_over_the_same():
    assert printed_average("PACE", "faithfulness", ["flower", "cub"]) == pytest.approx(0.68)
    assert printed_average("PACE", "faithfulness", ["flower", "zoo"]) is None
    assert printed_average("k-means", "faithfulness", ["flower"]) is None


def test_equal_to_two_digits_is_equal():
    assert marks([0.901, 0.899, 0.5], "higher") == ["best", "best", None]
    assert marks([0.3, None, 0.2, 0.4], "lower") == ["second", None, "best", None]
    assert marks([1.0, 2.0], None) == [None, None]


@pytest.fixture
def small():
    return results(
        row("flower", "pace", faithfulness=0.9, stability=0.3, sparsity=0.8, levels=3, n_concepts=100),
        row(
            "flower",
            "saliency",
            ("It says nothing.",),
            faithfulness=0.5,
            stability=0.1,
            sparsity=0.0,
            levels=1,
            n_concepts=384,
        ),
        row("flower", "embedding", faithfulness=0.99, stability=0.6, sparsity=0.1, levels=1, n_concepts=384),
        row("cub", "pace", faithfulness=0.7, stability=0.5, sparsity=0.9, levels=2, n_concepts=100),
        Row("cub", Method("saliency", "saliency"), failed="no | gradient"),
        row("cub", "embedding", faithfulness=0.6, stability=0.5, sparsity=0.1, levels=1, n_concepts=384),
    )


def test_table_1_has_our_numbers_beside_the_papers(small):
    lines = as_markdown(table_1(small)).splitlines()
    head = "| Method | Faithfulness ↑ Flower | Faithfulness ↑ CUB | Stability ↓ Flower | Stability ↓ CUB | "
    assert lines[2].startswith(head + "Sparsity ↑ Flower | Sparsity ↑ CUB | Multi-level | Concepts ↓ |")
    assert lines[4] == (
        "| PACE | **0.90** (0.80) | **0.70** (0.56) | <u>0.30</u> (0.12) | **0.50** (0.05) | **0.80** (0.48) | **0.90** (0.63) "
        "| Partial (Full) | **100** (100) |"
    )
    assert lines[5] == (
        "| Saliency ⚠ | <u>0.50</u> (0.57) | failed (0.49) | **0.10** (0.47) | failed (0.48) | <u>0.00</u> (0.00) "
        "| failed (0.00) | No (No) | <u>384</u> (768) |"
    )
    # A reference does not compete, and the paper has none.
    assert lines[6] == "| Mean embedding | 0.99 | 0.60 | 0.60 | 0.50 | 0.10 | 0.10 | No | 384 |"


def test_table_2_averages_what_is_there_on_every_dataset(small):
    lines = as_markdown(table_2(small)).splitlines()
    assert lines[4] == "| PACE | **0.80** (0.68) | **0.40** (0.09) | **0.85** (0.56) |"  # by hand: (0.9 + 0.7) / 2, …
    assert lines[5] == "| Saliency | – (0.53) | – (0.48) | – (0.00) |"
    assert lines[6] == "| Mean embedding | 0.80 | 0.55 | 0.10 |"


def test_what_exposes_a_row_is_said_in_a_line(small):
    assert exposed(small, "flower") == ["Saliency: It says nothing."]
    assert exposed(small, "cub") == ["Saliency: failed: no | gradient"]
    page = as_page(small)
    assert "- cub: Saliency: failed: no \\| gradient" in page
    assert "- flower: tiny, as it comes; 8 training and 6 test images" in page


def test_runs_with_chance_in_them_report_their_spread():
    one = row("flower", "shap", faithfulness=0.5)
    spread = replace(one, runs=7, spread={"faithfulness": 0.0123})
    assert exposed(results(spread), "flower") == [
        "SHAP: Means of 7 runs; their standard deviations are faithfulness 0.012."
    ]


def test_the_other_scores_come_with_intervals():
    scores = {"stability_ratio": 0.4, "concepts_per_image": 3.0, "colour_recovery": 0.8, "gain_over_lot": 0.2}
    found = results(row("color", "pace", **scores), row("color", "majority", stability_ratio=1.0))
    image, patch, hiding = (as_markdown(table) for table in exposing_tables(found, "color"))
    assert hiding.splitlines()[0] == "### Color: hiding concepts"
    assert "| PACE | **0.20** (0.19 to 0.21) |" in hiding  # the interval that decides whether random patches do as well
    assert "Majority class" in image
    assert "Majority class" not in patch + hiding  # it has no patches
    assert "| PACE | **0.40** (0.39 to 0.41) |" in image
    assert "Concepts per image | Colour recovery ↑" in patch
    assert "| PACE | 3.00 (2.99 to 3.01) | **0.80** (0.79 to 0.81) |" in patch
    assert "95 % bootstrap intervals" in image


def test_the_time_of_every_method_is_shown(small):
    lines = as_markdown(time_table(small)).splitlines()
    assert lines[2] == "| Dataset | Method | Fit, seconds | Explain, seconds | Score, seconds | Images per second |"
    assert lines[4] == "| Flower | PACE | 1.5 | 0.2 | 0.1 | 1,234 |"
    assert len(lines) == 4 + 5  # a method that failed has no times


def test_names_cannot_break_the_page():
    failed = Row("<b>x|y", Method("a|b=<i>", "pace"), failed="<script>alert(1)</script>")
    page = as_page(results(failed))
    assert "<script>" not in page
    assert "<b>" not in page
    assert "<i>" not in page


def test_json_brings_back_what_it_was_given(small, tmp_path):
    write_results(small, tmp_path)
    again = Results.load(tmp_path)
    assert again.as_dict() == small.as_dict()
    assert again.rows[1].warnings == ["It says nothing."]


def test_csv_has_a_line_for_every_score(small):
    lines = list(csv.DictReader(io.StringIO(as_csv(small))))
    assert len(lines) == 5 * 5 + 1
    first = lines[0]
    assert (first["dataset"], first["method"], first["metric"], first["backbone"]) == (
        "flower",
        "pace",
        "faithfulness",
        "tiny",
    )
    assert (float(first["value"]), float(first["paper"]), first["better"]) == (0.9, 0.8, "higher")
    assert float(first["low"]) == 0.9 - 0.01
    failed = [line for line in lines if line["failed"]]
    assert [(line["dataset"], line["method"], line["failed"], line["value"]) for line in failed] == [
        ("cub", "saliency", "no | gradient", "")
    ]


def test_other_results_are_shown_beside_and_replace_nothing(small):
    mine = results(row("flower", "pace", faithfulness=0.1))
    mine = mine.with_others([small])
    assert mine.datasets == ["flower", "cub"]
    assert mine.row("flower", "pace").value("faithfulness") == 0.1
    assert mine.row("cub", "pace").value("faithfulness") == 0.7


def test_a_terminal_sees_the_best_in_bold(small):
    from rich.console import Console

    console = Console(width=200, force_terminal=True, color_system="standard", record=True, file=io.StringIO())
    console.print(as_rich(table_2(small)))
    text = console.export_text(styles=True)
    assert "\x1b[1m0.80\x1b[0m" in text


def test_results_that_are_none_are_refused_in_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such results"):
        Results.load(tmp_path)
    (tmp_path / "results.json").write_text('{"rows": [{}]}')
    with pytest.raises(ValueError, match="run its benchmark again"):
        Results.load(tmp_path)
