"""``--images`` and the pictures named on the command line: from what was typed to an `ImageSet`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pace.cli.errors import Problem
from pace.cli.runs import DATASETS

if TYPE_CHECKING:
    from torch import Tensor

    from pace.images import ImageSet


@dataclass(frozen=True)
class ImageChoice:
    """A set of images as the options name it."""

    source: str
    data_root: str | None = None
    split: str = "train"
    limit: int | None = None
    seed: int = 0
    skip_unreadable: bool = False

    @property
    def is_dataset(self) -> bool:
        return self.source in DATASETS

    def open(self) -> ImageSet:
        from pace.images import open_images

        if self.is_dataset and self.source != "color" and self.data_root is None:
            raise Problem(f"--images {self.source} needs --data-root, the folder that holds the dataset")
        images = open_images(self.source, self.data_root, self.split, "skip" if self.skip_unreadable else "raise")
        if self.limit is None or self.limit >= len(images):
            return images
        # Drawn rather than taken from the front, where most sets have one class alone.
        drawn = np.random.default_rng(self.seed).permutation(len(images))[: self.limit]
        return images.subset(np.sort(drawn).tolist())

    def record(self, images: ImageSet) -> dict[str, Any]:
        located = {} if self.is_dataset else {"source": str(Path(self.source).expanduser().resolve())}
        rooted = {} if self.data_root is None else {"data_root": str(Path(self.data_root).expanduser().resolve())}
        return {
            **asdict(self),
            **located,
            **rooted,
            "count": len(images),
            "fingerprint": images.fingerprint(),
        }

    @classmethod
    def from_record(cls, kept: dict[str, Any]) -> ImageChoice:
        return cls(**{name: kept[name] for name in cls.__dataclass_fields__})


def open_pictures(paths: Sequence[str], skip_unreadable: bool) -> ImageSet:
    """Files in the order given; a folder stands for the images in it."""
    from pace.images import Folder, ImageFiles

    files: dict[str, None] = {}  # in order, each once
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
    """Both sets as one, the first in front, without labels."""
    from pace.images import ImageSet

    class Joined(ImageSet):
        def __getitem__(self, index: int) -> Tensor:
            return first[index] if index < len(first) else second[index - len(first)]

        def fingerprint(self) -> str:
            return f"{first.fingerprint()}+{second.fingerprint()}"

    known = set(first.names)
    return Joined(
        [*first.names, *(f"{name} (example)" if name in known else name for name in second.names)], None, None
    )
