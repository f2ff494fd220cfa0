"""The script that measures what a pass costs runs as a whole."""

import csv

import cost


def row(**found: object) -> cost.Row:
    return cost.Row("a machine", "full", "images", images=32, concepts=4, dim=8, **found)


def test_every_method_is_timed_and_written_down(tmp_path, monkeypatch, capsys):
    out = tmp_path / "cost.csv"
    command = ["cost.py", "--quick", "--vary", "images", "dim", "--out", str(out), "--threads", "1"]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr(cost.torch, "set_num_threads", lambda number: None)  # it would hold for all later tests
    cost.main()
    with out.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9  # three covariances, three different points
    for found in rows:
        assert found["error"] == ""
        assert float(found["pace"]) > float(found["limit"]) > 0
        assert float(found["sklearn"]) > 0
        assert bool(found["printed"]) == (found["covariance"] == "full")
        assert 1 <= float(found["weights"]) <= float(found["concepts"])
    assert capsys.readouterr().out.count("\n| full |") == 3


def test_a_method_that_fails_says_so_and_leaves_the_others(monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(cost, "mixture_at", fail)
    found = row()
    cost.measure(found, cost.GRIDS["quick"], cost.torch.device("cpu"))
    assert found.error == "sklearn: RuntimeError: no such luck; "
    assert found.pace
    assert found.printed
    assert found.sklearn is None


def test_times_are_in_units_of_pace_and_say_when_they_were_scaled_up():
    found = row(pace=0.5, sklearn=2.0, sklearn_images=16, limit=0.25)
    assert [found.times(way) for way in ("sklearn", "printed", "limit")] == ["≈ 4", "–", "0.5"]
