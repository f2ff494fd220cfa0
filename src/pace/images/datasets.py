"""`open_images`: the paper's datasets in their official layouts (Flower, Cars, CUB), and any folder of images."""

from __future__ import annotations

import os
import warnings
from abc import abstractmethod
from collections import Counter
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pace.files import read_json, reading
from pace.images.birds import Birds
from pace.images.color import Color
from pace.images.decoding import readable
from pace.images.imageset import ImageFiles, ImageSet, OnError
from pace.naming import class_titles
from pace.terminal import one_line, visible

StrPath = str | PathLike[str]
_REMEDY = "get the dataset again"
Listing = tuple[list[str], NDArray[np.int64], list[str] | None]  # names, labels and class names


class Published(ImageFiles):
    """A dataset with the splits "train" and "test". `data_root` is its folder or the one around it."""

    layout: str  # begins with the usual name of the folder
    subfolder = ""  # where the images are

    def __init__(self, data_root: StrPath, split: str = "train", on_error: OnError = "raise") -> None:
        if split not in ("train", "test"):
            raise ValueError(f"{type(self).__name__}: split {split!r} does not exist; expected train or test")
        base = Path(data_root).expanduser()
        inside = base / self.layout.split("/")[0]
        self._root = inside if inside.is_dir() else base
        with reading(self._root, _REMEDY):  # whatever its lists may hold
            listing = self._list(split)
            super().__init__(self._root / self.subfolder, *listing, on_error=on_error)

    @abstractmethod
    def _list(self, split: str) -> Listing: ...

    def _file(self, *names: str) -> Path:
        """The first of these files that exists."""
        for name in names:
            if (self._root / name).is_file():
                return self._root / name
        raise FileNotFoundError(f"no {' or '.join(names)} in {self._root}; expected {self.layout}")


class Flower(Published):
    """The paper's split: "train" is the official train and test (7,169 images), "test" the validation set (1,020).

    ``class_names`` is None without cat_to_name.json, which is not part of the official download.
    """

    layout = "flowers-102/ with jpg/image_00001.jpg …, imagelabels.mat, setid.mat and, optionally, cat_to_name.json"
    subfolder = "jpg"

    def _list(self, split: str) -> Listing:
        parts = ("trnid", "tstid") if split == "train" else ("valid",)
        ids = np.sort(np.concatenate([_read_mat(self._file("setid.mat"), part) for part in parts])).astype(np.int64)
        labels = _read_mat(self._file("imagelabels.mat"), "labels").astype(np.int64)
        if ids.max(initial=0) > len(labels):
            raise ValueError(
                f"{self._root}: setid.mat lists image {ids.max()}, imagelabels.mat has {len(labels)} labels"
            )
        class_names, titles = None, self._root / "cat_to_name.json"
        if titles.is_file():
            remedy = "get it again, or delete it: classes are then numbered"
            by_number = read_json(titles, {str: str}, remedy)
            with reading(titles, remedy):
                class_names = [by_number[str(number)] for number in range(1, len(by_number) + 1)]
        return [f"image_{number:05d}.jpg" for number in ids], labels[ids - 1] - 1, class_names


class Cars(Published):
    """The official split: "train" has 8,144 images, "test" 8,041."""

    layout = (
        "stanford_cars/ with cars_train/00001.jpg …, cars_test/00001.jpg …, devkit/cars_meta.mat, "
        "devkit/cars_train_annos.mat and cars_test_annos_withlabels.mat (there or in devkit/)"
    )

    def _list(self, split: str) -> Listing:
        # The devkit's own cars_test_annos.mat has no labels; they were published in a separate file.
        file = "cars_train_annos.mat" if split == "train" else "cars_test_annos_withlabels.mat"
        path = self._file(f"devkit/{file}", file)
        rows = _read_mat(path, "annotations")
        if not all(hasattr(row, "fname") and hasattr(row, "class") for row in rows):
            raise ValueError(f"{path}: expected annotations with the fields fname and class")
        labels = np.array([getattr(row, "class") for row in rows], dtype=np.int64) - 1
        class_names = _read_mat(self._file("devkit/cars_meta.mat"), "class_names")
        return [f"cars_{split}/{row.fname}" for row in rows], labels, [str(name) for name in class_names]


class CUB(Published):
    """The official split: "train" has 5,994 images, "test" 5,794. `part_names` names the rows of `parts`."""

    layout = (
        "CUB_200_2011/ with images/, images.txt, image_class_labels.txt, train_test_split.txt, classes.txt, "
        "bounding_boxes.txt, parts/parts.txt and parts/part_locs.txt"
    )
    subfolder = "images"

    def _list(self, split: str) -> Listing:
        files = ("images", "image_class_labels", "train_test_split", "bounding_boxes", "classes", "parts/parts")
        paths, labels, splits, boxes, classes, parts = (self._table(f"{name}.txt") for name in files)
        for name, table in zip(files[1:4], (labels, splits, boxes), strict=True):
            if absent := paths.keys() - table.keys():
                raise ValueError(f"{self._root / name}.txt has no line for image {min(absent)} of images.txt")
        self._boxes = {path: np.array(boxes[image].split(), np.float32) for image, path in paths.items()}
        self.part_names = list(parts.values())
        self._parts = dict(zip(paths.values(), self._part_places(len(paths), len(parts)), strict=True))
        ids = [image for image in paths if splits[image] == ("1" if split == "train" else "0")]
        titles = class_titles(list(classes.values()))
        return [paths[image] for image in ids], np.array([int(labels[image]) - 1 for image in ids]), titles

    def _table(self, name: str) -> dict[int, str]:
        """Lines of ``id value`` by id, in order."""
        file = self._file(name)
        with reading(file, _REMEDY):
            lines = file.read_text(encoding="utf-8").splitlines()
            rows = [line.split(maxsplit=1) for line in lines if line.strip()]
            return dict(sorted((int(number), value.strip()) for number, value in rows))

    def _part_places(self, images: int, parts: int) -> NDArray[np.float32]:
        """Lines of ``image part x y visible`` as (images, parts, 3)."""
        path = self._file("parts/part_locs.txt")
        with reading(path, _REMEDY):
            lines = np.loadtxt(path, ndmin=2)
        if lines.shape != (images * parts, 5):
            raise ValueError(f"{path}: expected 5 columns and a line for each part of each image; found {lines.shape}")
        lines = lines[np.lexsort((lines[:, 1], lines[:, 0]))]
        return lines[:, 2:].reshape(images, parts, 3).astype(np.float32)

    def parts(self, index: int) -> NDArray[np.float32]:
        """(15, 3): x, y and whether it is visible, for every part, in pixels of the stored image."""
        return np.array(self._parts[self.names[index]])

    def box(self, index: int) -> NDArray[np.float32]:
        """x, y, width and height of the bird in pixels of the stored image."""
        return np.array(self._boxes[self.names[index]])


class Folder(ImageFiles):
    """All images in a folder, sorted by name. Subfolders are classes; without subfolders there are no labels.

    Every subfolder is a class, even an empty one, so that the same folders give the same labels in every split.
    Hidden files and folders are ignored, other files left out with a warning. HEIC needs pillow-heif.
    """

    def __init__(self, path: StrPath, on_error: OnError = "raise") -> None:
        root = Path(path).expanduser()
        classes = _subfolders(root)
        endings = {ending for of_format in readable().values() for ending in of_format}
        others: Counter[str] = Counter()

        def is_image(entry: Path) -> bool:
            if entry.name.startswith(".") or not entry.is_file():
                return False
            ending = entry.suffix.lower()
            others.update([] if ending in endings else [ending])
            return ending in endings

        flat = sorted(entry.name for entry in root.iterdir() if is_image(entry))
        found = [[entry for entry in (root / name).rglob("*") if is_image(entry)] for name in classes]
        below = [sorted(entry.relative_to(root).as_posix() for entry in entries) for entries in found]
        in_classes = [name for names in below for name in names]
        if flat and in_classes:
            raise ValueError(
                f"{root} has {len(flat)} images of its own ({flat[0]}, …) and {len(in_classes)} in subfolders "
                f"({in_classes[0]}, …); expected either images or class folders"
            )
        left_out = _left_out(others)
        if not flat and not in_classes:
            known = f"no image in {root} or its subfolders; known endings: {' '.join(sorted(endings))}"
            raise FileNotFoundError(f"{known}{left_out and '; found '}{left_out}")
        if left_out:
            warnings.warn(
                f"left out of {visible(str(root))}, since they cannot be read as images: {left_out}", stacklevel=2
            )
        labels = None if flat else [label for label, names in enumerate(below) for _ in names]
        super().__init__(root, flat or in_classes, labels, None if flat else classes, on_error=on_error)


DATASETS: dict[str, type[Published]] = {"flower": Flower, "cars": Cars, "cub": CUB}
GENERATED: dict[str, type[Color] | type[Birds]] = {"color": Color, "birds": Birds}
_SPLIT_FOLDERS = {"train", "val", "valid", "validation", "test"}


def open_images(
    source: StrPath, data_root: StrPath | None = None, split: str = "train", on_error: OnError = "raise"
) -> ImageSet:
    """The images of "color" or "birds", of "flower", "cars" or "cub" in `data_root`, or of any folder, given its path.

    If a folder's subfolders are train, test and the like, `split` selects one of them; any other folder has only the
    split "train", which is all of it. Write ``./color`` for a folder that has the name of a dataset.
    """
    if isinstance(source, str) and source in GENERATED:
        return GENERATED[source](split)
    if isinstance(source, str) and source in DATASETS:
        if data_root is None:
            raise ValueError(f"{source}: data_root is needed, the folder that holds the dataset")
        return DATASETS[source](data_root, split, on_error)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"images: expected a dataset's name or a folder; found {type(source).__name__}")
    path = Path(source).expanduser()
    if not os.fspath(source) or not os.path.isdir(path):  # false, too, for names that no file can have
        what = f"no such file or folder, and not one of {', '.join([*GENERATED, *DATASETS])}"
        what = "is a file; expected a folder" if os.path.isfile(path) else what
        raise FileNotFoundError(f"{one_line(str(path) if os.fspath(source) else repr(source))}: {what}")
    subfolders = _subfolders(path)
    if subfolders and _SPLIT_FOLDERS.issuperset(subfolders):
        if split not in subfolders:
            raise ValueError(f"{path} has no split {split!r}; found {', '.join(subfolders)}")
        return Folder(path / split, on_error)
    if split != "train":
        raise ValueError(f"{path} has no split {split!r}; expected a subfolder of that name, or the folder to test on")
    return Folder(path, on_error)


def has_splits(source: object) -> bool:
    """Whether it is a dataset, or a folder with train/ or test/ in it."""
    name = str(source)
    return name in {*GENERATED, *DATASETS} or any(
        (Path(name).expanduser() / split).is_dir() for split in ("train", "test")
    )


def _subfolders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _left_out(endings: Counter[str]) -> str:
    """How many files, by their endings, most frequent first."""
    order = sorted(endings, key=lambda ending: (-endings[ending], ending or "~"))
    found = [f"{endings[ending]} {ending or 'without an ending'}" for ending in order]
    heif = " (pip install pillow-heif to read HEIC)" if endings[".heic"] or endings[".heif"] else ""
    return visible(", ".join(found)) + heif


def _read_mat(path: Path, key: str) -> NDArray[Any]:
    """One variable of a MATLAB file, as a list; structs become objects with attributes."""
    from scipy.io import loadmat

    with reading(path, _REMEDY):  # which raises nearly anything on damaged files
        return np.atleast_1d(loadmat(path, squeeze_me=True, struct_as_record=False, variable_names=[key])[key])
