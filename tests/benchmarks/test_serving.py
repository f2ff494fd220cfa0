"""The script that times the live page runs as a whole, on a tiny model."""

import serving


def test_it_says_how_long_a_picture_and_a_switch_take(monkeypatch, capsys):
    monkeypatch.setattr(serving, "_SIZE", (400, 300))
    monkeypatch.setattr(serving.torch, "set_num_threads", lambda number: None)  # it would hold for all later tests
    small = ["--model", "test_vit", "--size", "160", "--concepts", "4", "--per-class", "2", "--repeats", "2"]
    monkeypatch.setattr("sys.argv", ["serving.py", *small])
    serving.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| a ")]
    assert [row.split(" | ")[0] for row in rows][:2] == ["| a picture", "| a third of the concepts off"]
    assert all(float(row.split(" | ")[1].removesuffix(" s")) < 60 for row in rows)
