"""`invoke` runs the command line in this process, on a tiny model and a few small images."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typer.testing import CliRunner

CLASSES = ("amber", "blue")
MODEL = ("--model", "tiny.safetensors", "--architecture", "test_vit", "--image-size", "32")
QUICK = ("--covariance", "diag", "--starts", "1", "--epochs", "4", "--concepts", "3")


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        found = json.loads(self.out)  # all of it: exactly one document
        assert isinstance(found, dict)
        return found

    @property
    def error(self) -> str:
        """The one line that an error is."""
        assert self.code != 0
        lines = [line for line in self.err.splitlines() if not line.startswith(("warning: ", "- "))]  # - a stage
        assert len(lines) == 1, self.err
        return lines[0]


Pace = Callable[..., Outcome]


def invoke(*args: object) -> Outcome:
    from pace.cli.app import app

    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "--debug" in args or "Traceback" not in result.output
    return Outcome(result.exit_code, result.stdout, result.stderr)


def write_pictures(folder: Path, count: int, hue: tuple[int, int, int], seed: int) -> None:
    from PIL import Image

    folder.mkdir(parents=True)
    noise = np.random.default_rng(seed).integers(0, 90, (count, 40, 48, 3))
    for number in range(count):
        pixels = (np.array(hue) + noise[number]).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
