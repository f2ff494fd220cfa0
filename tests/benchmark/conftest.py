"""A transformer and datasets small enough to benchmark in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
