"""A workshop for the command line: a tiny model, a few small images, and a fit, made once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from in_process import CLASSES, MODEL, QUICK, Pace, invoke, write_pictures


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny.safetensors, photos/ with splits and classes, flat/ with neither, and fit/, a run on photos."""
    import timm
    from safetensors.torch import save_file

    root = tmp_path_factory.mktemp("workshop")
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=32, num_classes=len(CLASSES))
    save_file(model.state_dict(), root / "tiny.safetensors")
    bare = {name: weight for name, weight in model.state_dict().items() if not name.startswith("head.")}
    save_file(bare, root / "bare.safetensors")
    for seed, split in enumerate(("train", "test")):
        for hue, name in (((150, 100, 0), CLASSES[0]), ((0, 0, 160), CLASSES[1])):
            write_pictures(root / "photos" / split / name, 6, hue, seed)
    write_pictures(root / "flat", 7, (80, 80, 80), 9)
    before = Path.cwd()
    os.chdir(root)
    try:
        assert invoke("fit", "--images", "photos", *MODEL, *QUICK, "--out", "fit").code == 0
    finally:
        os.chdir(before)
    return root


@pytest.fixture
def pace(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> Pace:
    """`pace(...)` in the workshop; runs go to a folder of each test's own choosing."""
    monkeypatch.chdir(workshop)
    return invoke


@pytest.fixture
def elsewhere(workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in, from which ``shop/`` is the workshop."""
    (tmp_path / "shop").symlink_to(workshop, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path
