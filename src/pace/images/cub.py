"""CUB-200-2011 (Wah et al., 2011), with its part locations and bounding boxes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pace.images.imageset import ImageFiles, OnError
from pace.images.layout import Layout, StrPath, read_table

LAYOUT = Layout(
    title="CUB-200-2011",
    folders=("CUB_200_2011",),
    marker="images.txt",
    expected=(
        "CUB_200_2011/ with images/, images.txt, image_class_labels.txt, train_test_split.txt, classes.txt, "
        "bounding_boxes.txt, parts/parts.txt and parts/part_locs.txt"
    ),
)

SPLITS = {"train": "1", "test": "0"}


class CUB(ImageFiles):
    """The official split: "train" has 5,994 images, "test" 5,794. `part_names` names the rows of `parts`."""

    def __init__(self, data_root: StrPath, split: str = "train", on_error: OnError = "raise") -> None:
        flag = SPLITS[LAYOUT.split(split, tuple(SPLITS))]
        root = LAYOUT.root(data_root)

        def table(name: str, columns: int) -> dict[int, list[str]]:
            return read_table(LAYOUT.file(root, name), columns)

        paths = table("images.txt", 2)
        splits = table("train_test_split.txt", 2)
        labels = table("image_class_labels.txt", 2)
        boxes = table("bounding_boxes.txt", 5)
        for name, rows in (("train_test_split", splits), ("image_class_labels", labels), ("bounding_boxes", boxes)):
            if absent := paths.keys() - rows.keys():
                raise ValueError(f"{root / name}.txt has no line for image {min(absent)} of images.txt")
        ids = [image for image in sorted(paths) if splits[image][0] == flag]
        # "001.Black_footed_Albatross" in the file.
        titles = [title.split(".", 1)[-1].replace("_", " ") for _, (title,) in sorted(table("classes.txt", 2).items())]

        part_titles = table("parts/parts.txt", 2)
        self.part_names = [part_titles[part][0] for part in sorted(part_titles)]
        parts = _read_parts(LAYOUT.file(root, "parts/part_locs.txt"), sorted(paths), sorted(part_titles))
        self._parts = parts[np.isin(sorted(paths), ids)]
        self._boxes = np.array([boxes[image] for image in ids], dtype=np.float32)

        super().__init__(
            root / "images",
            [paths[image][0] for image in ids],
            [int(labels[image][0]) - 1 for image in ids],
            titles,
            layout=LAYOUT.expected,
            on_error=on_error,
        )

    def parts(self, index: int) -> NDArray[np.float32]:
        """(15, 3): x, y and whether it is visible, for every part, in pixels of the stored image."""
        return np.array(self._parts[self._rows[self._position(index)]])

    def box(self, index: int) -> NDArray[np.float32]:
        """x, y, width and height of the bird in pixels of the stored image."""
        return np.array(self._boxes[self._rows[self._position(index)]])


def _read_parts(path: Path, images: list[int], parts: list[int]) -> NDArray[np.float32]:
    """Lines of ``image part x y visible`` as (images, parts, 3)."""
    try:
        lines = np.loadtxt(path, dtype=np.float64, ndmin=2)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if lines.shape != (len(images) * len(parts), 5):
        raise ValueError(f"{path}: expected 5 columns and a line for each part of each image; found {lines.shape}")
    lines = lines[np.lexsort((lines[:, 1], lines[:, 0]))]
    if not np.array_equal(lines[:, 0], np.repeat(images, len(parts))):
        raise ValueError(f"{path}: expected the images of images.txt; found others")
    return lines[:, 2:].reshape(len(images), len(parts), 3).astype(np.float32)
