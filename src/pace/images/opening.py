"""`open_images`: from the name of a dataset or a folder to an `ImageSet`."""

from __future__ import annotations

from pathlib import Path

from pace.images.cars import Cars
from pace.images.color import Color
from pace.images.cub import CUB
from pace.images.flower import Flower
from pace.images.folder import Folder
from pace.images.imageset import ImageFiles, ImageSet, OnError
from pace.images.layout import StrPath

DATASETS: dict[str, type[Flower] | type[Cars] | type[CUB]] = {"flower": Flower, "cars": Cars, "cub": CUB}
_SPLIT_FOLDERS = {"train", "val", "valid", "validation", "test"}


def open_images(
    source: StrPath, data_root: StrPath | None = None, split: str = "train", on_error: OnError = "raise"
) -> ImageSet:
    """The images of "color", of "flower", "cars" or "cub" in `data_root`, or of any folder, given its path.

    If a folder's subfolders are train, test and the like, `split` selects one of them; any other folder has only the
    split "train", which is all of it. Write ``./color`` for a folder that has the name of a dataset.
    """
    if source == "color":
        return Color(split)
    if isinstance(source, str) and source in DATASETS:
        if data_root is None:
            raise ValueError(f"{source}: data_root is needed, the folder that holds the dataset")
        return DATASETS[source](data_root, split, on_error)
    return _open_folder(Path(source).expanduser(), split, on_error)


def _open_folder(path: Path, split: str, on_error: OnError) -> ImageFiles:
    if not path.is_dir():
        raise FileNotFoundError(f"{str(path)!r} is neither a folder nor one of color, {', '.join(DATASETS)}")
    subfolders = {entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    if subfolders and subfolders <= _SPLIT_FOLDERS:
        if split not in subfolders:
            raise ValueError(f"{path} has no split {split!r}; found {', '.join(sorted(subfolders))}")
        return Folder(path / split, on_error)
    if split != "train":
        raise ValueError(f"{path} has no split {split!r}; expected a subfolder of that name, or the folder to test on")
    return Folder(path, on_error)
