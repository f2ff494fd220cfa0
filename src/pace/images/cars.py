"""Stanford Cars (Krause et al., 2013)."""

from __future__ import annotations

import numpy as np

from pace.images.imageset import ImageFiles, OnError
from pace.images.layout import Layout, StrPath, read_mat

LAYOUT = Layout(
    title="Stanford Cars",
    folders=("stanford_cars",),
    marker="devkit/cars_meta.mat",
    expected=(
        "stanford_cars/ with cars_train/00001.jpg …, cars_test/00001.jpg …, devkit/cars_meta.mat, "
        "devkit/cars_train_annos.mat and cars_test_annos_withlabels.mat (there or in devkit/)"
    ),
)

# The devkit's own cars_test_annos.mat has no labels; they were published in a separate file.
ANNOTATIONS = {"train": "cars_train_annos.mat", "test": "cars_test_annos_withlabels.mat"}


class Cars(ImageFiles):
    """The official split: "train" has 8,144 images, "test" 8,041."""

    def __init__(self, data_root: StrPath, split: str = "train", on_error: OnError = "raise") -> None:
        file = ANNOTATIONS[LAYOUT.split(split, tuple(ANNOTATIONS))]
        root = LAYOUT.root(data_root)
        path = LAYOUT.file(root, f"devkit/{file}", file)
        annotations = np.atleast_1d(read_mat(path, "annotations"))
        if not all(hasattr(row, "fname") and hasattr(row, "class") for row in annotations):
            raise ValueError(f"{path}: expected annotations with the fields fname and class")
        class_names = np.atleast_1d(read_mat(root / LAYOUT.marker, "class_names"))
        super().__init__(
            root,
            [f"cars_{split}/{row.fname}" for row in annotations],
            [int(getattr(row, "class")) - 1 for row in annotations],
            [str(name) for name in class_names],
            layout=LAYOUT.expected,
            on_error=on_error,
        )
