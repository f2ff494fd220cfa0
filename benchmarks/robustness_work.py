"""The work that the attacks of benchmarks/robustness.py disturb: tiny observations, fits, and the commands of `pace`."""

from __future__ import annotations

import atexit
import io
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pace import PACE, Observations
from pace.cli.app import app
from pace.observations import Batch
from pace.observing.store import Index, ObservationStore, StoreWriter

IMAGES, TOKENS, DIM, CLASSES = 24, 6, 4, 3
FIT = "fit --images photos --model color --concepts 3 --starts 1 --epochs 3 --checkpoint-every 0"
COMMANDS = {
    "extract": "extract --images photos --model color",
    "fit": FIT,
    "finetune": "finetune --images photos --model color --epochs 3",
    "evaluate": "evaluate --run done --bootstrap 5",
    "report": "report --run done --limit 4",
    "explain": "explain photos/a/0.png photos/b/1.png --run done",
    "benchmark": "benchmark --datasets color --limit 8 --methods pace,position -k 3 --set pace.max_iter=4 --bootstrap 2 "
    "--hidden-images 0 --patch-images 8",
}


def observed(seed: int = 0) -> Observations:
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(5, DIM, generator=draw) * 4
    tokens = centres[torch.randint(5, (IMAGES, TOKENS), generator=draw)]
    tokens = tokens + 0.3 * torch.randn(IMAGES, TOKENS, DIM, generator=draw)
    predictions = torch.randn(IMAGES, CLASSES, generator=draw).softmax(1)
    return Observations(tokens, torch.rand(IMAGES, TOKENS, generator=draw) + 0.1, predictions, (2, 3))


def learn(seen: Observations | None = None, parts: int | None = 2, n_concepts: Any = 4, **more: Any) -> PACE:
    """A fit in a moment; what `PACE.fit` takes is told from what PACE takes by its name."""
    of_fit = {name: more.pop(name) for name in list(more) if "checkpoint" in name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PACE(n_concepts, max_iter=4, n_init=1, parts=parts, device="cpu", progress=False, **more)
        return model.fit(observed() if seen is None else seen, **of_fit)


def store_of(observations: Observations, folder: Path) -> ObservationStore:
    facts = {"model": "tiny", "images": "drawn"}
    with StoreWriter(folder, Index(facts, IMAGES, observations.grid), shard_bytes=300) as writer:
        for gap in writer.gaps:
            for start in range(gap.start, gap.stop, 2):
                batch = observations.batch(slice(start, start + 2))
                writer.append(start, Batch(*(part for part in batch)))
        writer.finish()
    return ObservationStore.open(folder)


def in_python(folder: Path) -> int:
    """Observations on disk, a fit of them with checkpoints, and its file."""
    observations = store_of(observed(), folder / "store").observations()
    learn(observations, checkpoint=folder / "fit", checkpoint_every=0).save(
        folder / "model.safetensors", statistics=True
    )
    return 0


def command(text: str | list[str], folder: Path) -> int:
    """A command of `pace`, as a user calls it, that writes to this folder; its exit code."""
    code: int = _pace().main(
        [*(text.split() if isinstance(text, str) else text), "--out", str(folder)], standalone_mode=False
    )
    return code


@cache
def _pace() -> Any:
    from typer.main import get_command

    return get_command(app)


JOBS: dict[str, Callable[[Path], int]] = {
    "a fit in Python": in_python,
    **{name: partial(command, text) for name, text in COMMANDS.items()},
}


@cache
def workshop() -> Path:
    """A folder with photos and a fit of them, which the other commands need."""
    from PIL import Image

    place = Path(tempfile.mkdtemp()).resolve()
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    os.chdir(place)
    for number in range(12):
        folder = Path("photos", "ab"[number % 2])
        folder.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 255, (64, 64, 3), np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.png")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        if command(FIT, Path("done")):
            raise RuntimeError("the fit that the other commands need has failed")
    return place
