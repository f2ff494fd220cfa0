"""Oxford 102 Flower (Nilsback and Zisserman, 2008)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from pace.images.imageset import ImageFiles, OnError
from pace.images.layout import Layout, StrPath, read_mat

LAYOUT = Layout(
    title="Oxford 102 Flower",
    folders=("flowers-102", "102flowers", "oxford-102-flower"),
    marker="setid.mat",
    expected="flowers-102/ with jpg/image_00001.jpg …, imagelabels.mat, setid.mat and, optionally, cat_to_name.json",
)

# Variables of setid.mat in each split. The paper trains on the official train + test and tests on validation.
SPLITS = {
    "train": ("trnid", "tstid"),
    "test": ("valid",),
    "official-train": ("trnid",),
    "official-test": ("tstid",),
    "official-val": ("valid",),
}


class Flower(ImageFiles):
    """The paper's split: "train" has 7,169 images, "test" 1,020. The three official ones begin with "official-".

    ``class_names`` is None without cat_to_name.json, which is not part of the official download.
    """

    def __init__(self, data_root: StrPath, split: str = "train", on_error: OnError = "raise") -> None:
        parts = SPLITS[LAYOUT.split(split, tuple(SPLITS))]
        root = LAYOUT.root(data_root)
        set_ids = LAYOUT.file(root, "setid.mat")
        labels = np.atleast_1d(read_mat(LAYOUT.file(root, "imagelabels.mat"), "labels")).astype(np.int64)
        ids = np.sort(np.concatenate([np.atleast_1d(read_mat(set_ids, part)) for part in parts])).astype(np.int64)
        if ids.size and not 1 <= ids.min() <= ids.max() <= len(labels):
            raise ValueError(f"{set_ids} lists image {ids.max()} but imagelabels.mat has {len(labels)} labels")

        super().__init__(
            root / "jpg",
            [f"image_{number:05d}.jpg" for number in ids],
            labels[ids - 1] - 1,
            _read_names(root / "cat_to_name.json"),
            layout=LAYOUT.expected,
            on_error=on_error,
        )


def _read_names(path: Path) -> list[str] | None:
    """Class names from ``{"1": "pink primrose", …}``, if the file is there."""
    if not path.is_file():
        return None
    try:
        titles = json.loads(path.read_text(encoding="utf-8"))
        return [str(titles[str(number)]) for number in range(1, len(titles) + 1)]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{path}: expected {{"1": "name", "2": "name", …}} without gaps ({error!r})') from error
