"""The script that measures what a pass costs runs as a whole, and its page says what it measured."""

import cost
import cost_page
import pytest

LINES = {way: exponent for way, exponent in zip(cost_page.WAYS, (0.5, 1.0, 2.0, 1.0), strict=True)}


def row(varied: str, images: int = 10, dim: int = 8, **found: object) -> cost_page.Row:
    return cost_page.Row("a machine", "full", varied, images, concepts=4, dim=dim, **found)


def test_every_way_is_timed_and_written_down(tmp_path, monkeypatch, capsys):
    out = tmp_path / "cost.csv"
    monkeypatch.setattr(
        "sys.argv", ["cost.py", "--quick", "--vary", "images", "dim", "--out", str(out), "--threads", "1"]
    )
    monkeypatch.setattr(cost.torch, "set_num_threads", lambda number: None)  # it would hold for all later tests
    cost.main()
    rows = cost_page.read(out)
    assert {(r.covariance, r.varied) for r in rows} == {(c, v) for c in cost.COVARIANCES for v in ("images", "dim")}
    assert [r.error for r in rows] == [""] * len(rows)
    for r in rows:
        assert r.pace > r.limit > 0
        assert r.sklearn > 0
        assert (r.printed is not None) == (r.covariance == "full")
        assert 1 <= r.weights <= r.concepts
    assert cost_page.exponents(rows) in capsys.readouterr().out


def test_a_way_that_fails_says_so_and_leaves_the_others(monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(cost, "mixture_at", fail)
    found = row("images", images=32)
    cost.measure(found, cost.GRIDS["quick"], cost.torch.device("cpu"))
    assert found.error == "sklearn: RuntimeError: no such luck; "
    assert found.pace
    assert found.printed
    assert found.sklearn is None


def test_the_base_lies_on_every_axis_of_every_grid():
    for grid in cost.GRIDS.values():
        for axis, value in zip(cost_page.AXES, grid.base, strict=True):
            assert value in getattr(grid, axis)


def test_rows_come_back_from_a_file_as_they_were(tmp_path):
    rows = [
        row("dim", pace=1 / 3, sklearn=1.25e-7 / 3, sklearn_images=5, error='sklearn: "a", b; '),
        row("processes", processes=2),
    ]
    cost_page.write(rows, tmp_path / "rows.csv")
    assert cost_page.read(tmp_path / "rows.csv") == rows


def test_exponents_are_those_of_the_powers_they_were_made_of():
    rows = [row("dim", dim=d, **{way: 3 * d**power for way, power in LINES.items()}) for d in (8, 16, 64)]
    table = cost_page.exponents(rows).splitlines()[2:]
    assert table == [f"| full | {cost_page.WAYS[way]} | – | – | {power:.2f} |" for way, power in LINES.items()]


def test_what_was_scaled_has_no_exponent_in_the_number_of_images():
    rows = [row("images", images=m, pace=1.0 * m, sklearn=2.0 * m, sklearn_images=10) for m in (10, 20)]
    assert cost_page.exponents(rows).splitlines()[2:] == ["| full | PACE | 1.00 | – | – |"]
    assert "≈ 2" in cost_page.ratios(rows).splitlines()[-1]


def test_efficiency_is_the_share_of_what_more_processes_could_save():
    rows = [row("processes", processes=n, pace=seconds) for n, seconds in ((1, 4.0), (2, 2.5))]
    assert cost_page.processes(rows).splitlines()[-1] == "| full | 2 | 2.50 s | 80% |"


def test_the_page_is_filled_between_its_marks_and_nowhere_else(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    page, rows = tmp_path / "page.md", [row(axis, pace=0.5, limit=0.1) for axis in cost_page.AXES]
    page.write_text(f"before\n{cost_page.BEGIN}\nold\n{cost_page.END}\nafter\n", encoding="utf-8")
    cost_page.write(rows, tmp_path / "cost-cpu.csv")
    for _ in range(2):
        monkeypatch.setattr("sys.argv", ["cost_page.py", str(tmp_path / "cost-cpu.csv"), "--page", str(page)])
        cost_page.main()
        text = page.read_text(encoding="utf-8")
        assert text.startswith("before\n")
        assert text.endswith("\nafter\n")
        assert "old" not in text
        assert text.count("](cost-cpu.svg)") == 1
    assert (tmp_path / "cost-cpu.svg").stat().st_size > 1000


def test_a_page_without_marks_is_left_alone(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("nothing\n", encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["cost_page.py", "cost.csv", "--page", str(page)])
    with pytest.raises(SystemExit, match="has no"):
        cost_page.main()
    assert page.read_text(encoding="utf-8") == "nothing\n"
