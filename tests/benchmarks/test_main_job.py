"""The script that measures the commands beside the bare model, as a whole on a tiny one, in this process."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import main_job
import pytest
import torch
from in_process import MODEL, QUICK, write_pictures


def test_every_command_is_set_beside_the_passes_it_cannot_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import timm
    from safetensors.torch import save_file

    asked = []

    def spawn(arguments: list[str], folder: Path) -> tuple[main_job.Cost, str]:
        asked.append(arguments[0])
        said = io.StringIO()
        with redirect_stdout(io.StringIO()), redirect_stderr(said):
            main_job.child(arguments)
        return main_job.Cost(3.0, 4.0, 500.0), said.getvalue() + "- learning: 2.5 s\n"

    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=32, num_classes=2)
    save_file(model.state_dict(), tmp_path / "tiny.safetensors")
    for seed, split in enumerate(("train", "test")):
        for hue, name in (((150, 100, 0), "amber"), ((0, 0, 160), "blue")):
            write_pictures(tmp_path / "photos" / split / name, 6, hue, seed)
    monkeypatch.setattr(main_job, "spawn", spawn)
    monkeypatch.chdir(tmp_path)
    arguments = ["--images", "photos", "--limit", "8", "--device", "cpu", *MODEL, *QUICK]
    monkeypatch.setattr("sys.argv", ["main_job.py", *arguments])
    main_job.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert asked == ["fit", "evaluate", "report", "explain", "bare", "bare", "bare"]
    assert [row.split(" | ")[0] for row in rows] == ["| command", "| fit", "| evaluate", "| report", "| explain"]
    assert "| 3.0 | – | 4.0 | – | 500 MB" in rows[3]  # a report of images that were evaluated needs no pass
    assert rows[4].startswith("| explain | 3.0 | 1.00 |")
    assert "learning 2.5" in rows[1]
