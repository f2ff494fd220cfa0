"""The real datasets, where they are at hand: the paper's counts, and a handful of real images."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pace.images import CUB, Flower, ImageFiles

DATASETS = Path(__file__).parents[3] / "shared" / "datasets"


def unpack(archive: str, to: Path, images: Callable[[str], bool]) -> None:
    """The tables and the wanted images, as JPEG. Other images become empty files, which is enough to be counted."""
    path = DATASETS / archive
    if not path.is_file():
        pytest.skip(f"no {archive} in ../shared/datasets")
    with tarfile.open(path) as tar:
        for member in tar:
            if not member.isfile():
                continue
            out = to / member.name
            out.parent.mkdir(parents=True, exist_ok=True)
            if out.suffix != ".webp":
                content = tar.extractfile(member)
                assert content is not None
                out.write_bytes(content.read())
            elif images(out.stem):
                content = tar.extractfile(member)
                assert content is not None
                Image.open(io.BytesIO(content.read())).save(out.with_suffix(".jpg"), quality=95)
            else:
                out.with_suffix(".jpg").touch()


def looks_real(images: ImageFiles, indices: list[int]) -> None:
    for index in indices:
        assert images[index].shape == (3, 224, 224)
        assert images[index].float().std() > 10


def test_flower_has_the_papers_split(tmp_path: Path) -> None:
    wanted = {"image_00001", "image_06734", "image_08189"}
    unpack("flowers-102-1of2.tar", tmp_path, wanted.__contains__)
    unpack("flowers-102-2of2.tar", tmp_path, wanted.__contains__)
    train, test = Flower(tmp_path), Flower(tmp_path, split="test")
    assert (len(train), len(test)) == (7169, 1020)
    assert not set(train.names) & set(test.names)
    for split, count in (("official-train", 1020), ("official-val", 1020), ("official-test", 6149)):
        assert len(Flower(tmp_path, split)) == count
    assert train.class_names is not None
    assert len(train.class_names) == 102
    np.testing.assert_array_equal(np.bincount(test.labels), np.full(102, 10))
    first = train.names.index("image_00001.jpg")
    assert train.class_names[train.labels[first]] == "passion flower"
    looks_real(train, [first, train.names.index("image_08189.jpg")])


def test_cub_has_the_official_split_with_parts_inside_the_images(tmp_path: Path) -> None:
    unpack("CUB_200_2011-train.tar", tmp_path, lambda name: name.endswith("_796103"))
    unpack("CUB_200_2011-test.tar", tmp_path, lambda name: name == "Black_Footed_Albatross_0046_18")
    train, test = CUB(tmp_path), CUB(tmp_path, split="test")
    assert (len(train), len(test)) == (5994, 5794)
    assert train.class_names is not None
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
