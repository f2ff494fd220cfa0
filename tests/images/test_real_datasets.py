"""The real datasets, where they are at hand: the paper's counts, and a handful of real images."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pace.images import CUB, Flower

DATASETS = Path(__file__).parents[3] / "shared" / "datasets"


def unpack(archive, to, images):
    """The tables and the wanted images, as JPEG."""
    path = DATASETS / archive
    if not path.is_file():
        pytest.skip(f"no {archive} in ../shared/datasets")
    with tarfile.open(path) as tar:
        for member in tar:
            out = to / member.name
            if not member.isfile() or (out.suffix == ".webp" and not images(out.stem)):
                continue
            out.parent.mkdir(parents=True, exist_ok=True)
            if out.suffix != ".webp":
                out.write_bytes(tar.extractfile(member).read())
            else:
                Image.open(io.BytesIO(tar.extractfile(member).read())).save(out.with_suffix(".jpg"), quality=95)


@pytest.fixture(autouse=True)
def _all_images_are_there(monkeypatch):
    """To be counted, images need not be unpacked."""
    real = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda self: self.suffix == ".jpg" or real(self))


def looks_real(images, indices):
    for index in indices:
        assert images[index].shape == (3, 224, 224)
        assert images[index].float().std() > 10


def test_flower_has_the_papers_split(tmp_path):
    wanted = {"image_00001", "image_06734", "image_08189"}
    unpack("flowers-102-1of2.tar", tmp_path, wanted.__contains__)
    unpack("flowers-102-2of2.tar", tmp_path, wanted.__contains__)
    train, test = Flower(tmp_path), Flower(tmp_path, split="test")
    assert (len(train), len(test)) == (7169, 1020)
    assert not set(train.names) & set(test.names)
    for split, count in (("official-train", 1020), ("official-val", 1020), ("official-test", 6149)):
        assert len(Flower(tmp_path, split)) == count
    assert len(train.class_names) == 102
    np.testing.assert_array_equal(np.bincount(test.labels), np.full(102, 10))
    first = train.names.index("image_00001.jpg")
    assert train.class_names[train.labels[first]] == "passion flower"
    looks_real(train, [first, train.names.index("image_08189.jpg")])


def test_cub_has_the_official_split_with_parts_inside_the_images(tmp_path):
    unpack("CUB_200_2011-train.tar", tmp_path, lambda name: name.endswith("_796103"))
    unpack("CUB_200_2011-test.tar", tmp_path, lambda name: name == "Black_Footed_Albatross_0046_18")
    train, test = CUB(tmp_path), CUB(tmp_path, split="test")
    assert (len(train), len(test)) == (5994, 5794)
    assert len(train.class_names) == 200
    assert train.class_names[0] == "Black footed Albatross"
    assert len(train.part_names) == 15
    assert set(np.bincount(train.labels)) == {29, 30}
    looks_real(test, [0])
    looks_real(train, [next(i for i, name in enumerate(train.names) if name.endswith("_796103.jpg"))])
    for images in (train, test):
        parts = np.stack([images.parts(i) for i in range(0, len(images), 10)])
        boxes = np.stack([images.box(i) for i in range(0, len(images), 10)])
        visible = parts[..., 2] == 1
        assert visible.mean() > 0.7
        x, y, width, height = boxes.T
        inside = (parts[..., 0] >= x[:, None] - 5) & (parts[..., 0] <= (x + width)[:, None] + 5)
        inside &= (parts[..., 1] >= y[:, None] - 5) & (parts[..., 1] <= (y + height)[:, None] + 5)
        assert inside[visible].mean() > 0.98
