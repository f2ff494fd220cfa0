"""A transformer and datasets small enough to benchmark in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pace.benchmark import Recipe


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny ViT without a classifier."""
    timm = pytest.importorskip("timm")
    from safetensors.torch import save_file

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_file(timm.create_model("test_vit", img_size=32, num_classes=0).state_dict(), path)
    return path


@pytest.fixture(scope="session")
def with_registers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A tiny ViT of CLS, four registers and patches, as DINOv2's are: weights, option and name of its architecture."""
    timm = pytest.importorskip("timm")
    from safetensors.torch import save_file
    from timm.models import register_model

    @register_model
    def tiny_with_registers(**options: Any) -> torch.nn.Module:
        return timm.create_model("test_vit", reg_tokens=4, no_embed_class=True, **options)

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("registers") / "tiny.safetensors"
    save_file(timm.create_model("tiny_with_registers", img_size=32, num_classes=0).state_dict(), path)
    return path, "--architecture", "tiny_with_registers"


@pytest.fixture
def recipe(weights: Path) -> Recipe:
    return Recipe(weights, "test_vit", 32, epochs=1, lr=1e-3, batch_size=8)


@pytest.fixture
def cars_root(tmp_path: Path) -> Path:
    """Stanford Cars as it is downloaded: two makes, dark and bright, of four training and three test images each."""
    image = pytest.importorskip("PIL.Image")
    from scipy.io import savemat

    root = tmp_path / "data" / "stanford_cars"
    kinds = [(f"bbox_{side}", int) for side in ("x1", "y1", "x2", "y2")] + [("class", int), ("fname", object)]
    files = {"train": "devkit/cars_train_annos.mat", "test": "cars_test_annos_withlabels.mat"}
    for split, count in (("train", 8), ("test", 6)):
        (root / f"cars_{split}").mkdir(parents=True)
        rows = np.zeros((1, count), dtype=kinds)
        for number in range(count):
            label, name = number % 2 + 1, f"{number + 1:05d}.jpg"
            rows[0, number] = (1, 1, 3, 3, label, name)
            image.new("RGB", (40, 32), (100 * label, 20 * number, 30)).save(root / f"cars_{split}" / name)
        (root / "devkit").mkdir(exist_ok=True)
        savemat(root / files[split], {"annotations": rows})
    names = np.array([["AM General Hummer SUV 2000", "Acura RL Sedan 2012"]], dtype=object)
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": names})
    return root.parent
