"""``--images`` and the pictures named on the command line: from what was typed to an `ImageSet`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pace.cli.errors import Problem
from pace.cli.options import ImageOptions
from pace.cli.runs import DATASETS

if TYPE_CHECKING:
    from torch import Tensor

    from pace.images import ImageSet

_SPLITS = ("train", "test")


class ImageChoice(ImageOptions):
    """A set of images as the options name it."""

    images: str

    @classmethod
    def of(cls, options: ImageOptions, default_split: str = "train") -> ImageChoice:
        return cls(**{**asdict(options), "split": options.split or default_split})

    @classmethod
    def from_record(cls, kept: dict[str, Any]) -> ImageChoice:
        return cls(**{field.name: kept[field.name] for field in fields(cls)})

    @property
    def has_splits(self) -> bool:
        """Whether it is a dataset, or a folder with train/ or test/ in it."""
        folder = Path(self.images).expanduser()
        return self.images in DATASETS or any((folder / name).is_dir() for name in _SPLITS)

    def open(self) -> ImageSet:
        from pace.images import open_images

        if self.images in DATASETS and self.images != "color" and self.data_root is None:
            raise Problem(f"--images {self.images} needs --data-root, the folder that holds the dataset")
        images = open_images(
            self.images, self.data_root, self.split or "train", "skip" if self.skip_unreadable else "raise"
        )
        if self.limit is None or self.limit >= len(images):
            return images
        # A random sample, since the first images are often all of one class.
        drawn = np.random.default_rng(self.seed).permutation(len(images))[: self.limit]
        return images.subset(np.sort(drawn).tolist())

    def reopen(self, kept: dict[str, Any], problem: str) -> ImageSet:
        """The images of a record, which must be the same as then."""
        images = self.open()
        if images.fingerprint() != kept["fingerprint"]:
            raise Problem(problem)
        return images

    def record(self, images: ImageSet) -> dict[str, Any]:
        located = self if self.images in DATASETS else replace(self, images=_absolute(self.images))
        if self.data_root is not None:
            located = replace(located, data_root=_absolute(self.data_root))
        found = {"count": len(images), "fingerprint": images.fingerprint()}
        return {**asdict(located), **found}


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def open_pictures(paths: Sequence[str], skip_unreadable: bool) -> ImageSet:
    """Files in the order given, and the images in folders; each once."""
    from pace.images import Folder, ImageFiles

    files: dict[str, None] = {}
    for text in paths:
        path = Path(text).expanduser()
        if path.is_dir():
            folder = Folder(path)
            files |= dict.fromkeys(str(folder.path(name)) for name in folder.names)
        elif path.is_file():
            files[str(path)] = None
        else:
            raise Problem(f"{text}: no such picture or folder")
    return ImageFiles(Path(), list(files), on_error="skip" if skip_unreadable else "raise")


def joined(first: ImageSet, second: ImageSet) -> ImageSet:
    """Both sets as one, without labels."""
    from pace.images import ImageSet

    class Joined(ImageSet):
        def __getitem__(self, index: int) -> Tensor:
            return first[index] if index < len(first) else second[index - len(first)]

        def fingerprint(self) -> str:
            return f"{first.fingerprint()}+{second.fingerprint()}"

    known = set(first.names)
    names = [*first.names, *(f"{name} (example)" if name in known else name for name in second.names)]
    return Joined(names, None, None)
