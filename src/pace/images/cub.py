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
            absent = paths.keys() - rows.keys()
            if absent:
                raise ValueError(f"{root / name}.txt has no line for image {min(absent)} of images.txt")
        ids = [image for image in sorted(paths) if splits[image][0] == flag]
        # "001.Black_footed_Albatross" in the file.
        titles = [title.split(".", 1)[-1].replace("_", " ") for _, (title,) in sorted(table("classes.txt", 2).items())]

        part_titles = table("parts/parts.txt", 2)
        self.part_names = [part_titles[part][0] for part in sorted(part_titles)]
        locations = LAYOUT.file(root, "parts/part_locs.txt")
        self._parts = _read_parts(locations, ids, sorted(part_titles))
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
        found: NDArray[np.float32] = self._parts[self._rows[self._position(index)]]
        return found.copy()

    def box(self, index: int) -> NDArray[np.float32]:
        """x, y, width and height of the bird in pixels of the stored image."""
        found: NDArray[np.float32] = self._boxes[self._rows[self._position(index)]]
        return found.copy()


def _read_parts(path: Path, images: list[int], parts: list[int]) -> NDArray[np.float32]:
    """Lines of ``image part x y visible`` as (images, parts, 3)."""
    try:
        values = np.loadtxt(path, dtype=np.float64, ndmin=2)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if values.shape[1] != 5:
        raise ValueError(f"{path}: expected 5 columns (image, part, x, y, visible); found {values.shape[1]}")
    table = np.full((len(images), len(parts), 3), np.nan, dtype=np.float32)
    row, column = {image: i for i, image in enumerate(images)}, {part: i for i, part in enumerate(parts)}
    for image, part, x, y, visible in values.tolist():
        if image in row and part in column:
            table[row[image], column[part]] = x, y, visible
    absent = np.argwhere(np.isnan(table))
    if absent.size:
        raise ValueError(f"{path} has no line for image {images[absent[0, 0]]}, part {parts[absent[0, 1]]}")
    return table
