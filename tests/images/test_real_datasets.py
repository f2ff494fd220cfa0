"""The real datasets, where they are at hand: the paper's counts, and annotations that fit together."""

import tarfile
from pathlib import Path

import numpy as np
import pytest

from pace.images import CUB, Flower

DATASETS = Path(__file__).parents[3] / "shared" / "datasets"


@pytest.fixture
def unpack(tmp_path):
    """Unpacks the tables of some archives, and an empty file for every image: to be counted, no image is read."""

    def run(*archives):
        for archive in archives:
            if not (DATASETS / archive).is_file():
                pytest.skip(f"no {archive} in ../shared/datasets")
            with tarfile.open(DATASETS / archive) as tar:
                for member in filter(tarfile.TarInfo.isfile, tar):
                    if member.name.endswith(".webp"):
                        image = (tmp_path / member.name).with_suffix(".jpg")
                        image.parent.mkdir(parents=True, exist_ok=True)
                        image.touch()
                    else:
                        tar.extract(member, tmp_path, filter="data")
        return tmp_path

    return run


def test_flower_has_the_papers_split(unpack):
    root = unpack("flowers-102-1of2.tar", "flowers-102-2of2.tar")
    train, test = Flower(root), Flower(root, split="test")
    assert (len(train), len(test)) == (7169, 1020)
    assert not set(train.names) & set(test.names)
    assert len(train.class_names) == 102
    np.testing.assert_array_equal(np.bincount(test.labels), np.full(102, 10))
    assert train.class_names[train.labels[train.names.index("image_00001.jpg")]] == "passion flower"


def test_cub_has_the_official_split_with_parts_inside_the_boxes(unpack):
    root = unpack("CUB_200_2011-train.tar", "CUB_200_2011-test.tar")
    train, test = CUB(root), CUB(root, split="test")
    assert (len(train), len(test)) == (5994, 5794)
    assert (len(train.class_names), train.class_names[0]) == (200, "Black footed Albatross")
    assert len(train.part_names) == 15
    assert set(np.bincount(train.labels)) == {29, 30}
    for images in (train, test):
        parts = np.stack([images.parts(i) for i in range(0, len(images), 10)])
        x, y, width, height = np.stack([images.box(i) for i in range(0, len(images), 10)]).T[:, :, None]
        visible = parts[..., 2] == 1
        assert visible.mean() > 0.7
        inside = (parts[..., 0] >= x - 5) & (parts[..., 0] <= x + width + 5)
        inside &= (parts[..., 1] >= y - 5) & (parts[..., 1] <= y + height + 5)
        assert inside[visible].mean() > 0.98
