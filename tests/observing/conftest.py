import threading

import pytest
import torch
from PIL import Image
from tiny_backbone import COUNT, SIZE


@pytest.fixture(scope="session")
def pixels():
    return torch.randint(0, 256, (COUNT, 3, SIZE, SIZE), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def folder(pixels, tmp_path_factory):
    path = tmp_path_factory.mktemp("images")
    for number, image in enumerate(pixels):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path / f"{number:03d}.png")
    return path


@pytest.fixture(autouse=True)
def _no_thread_survives():
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pace-")]
