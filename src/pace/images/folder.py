"""Any folder of images."""

from __future__ import annotations

from pathlib import Path

from pace.images.decoding import EXTENSIONS
from pace.images.imageset import ImageFiles, OnError
from pace.images.layout import StrPath


class Folder(ImageFiles):
    """All images in a folder, sorted by name. Subfolders are classes; without subfolders there are no labels.

    Every subfolder is a class, even an empty one, so that the same folders give the same labels in every split.
    Hidden files and folders are ignored.
    """

    def __init__(self, path: StrPath, on_error: OnError = "raise") -> None:
        root = Path(path).expanduser()
        if not root.is_dir():
            raise FileNotFoundError(f"{root} is not a folder; expected a folder of images or of class folders")
        classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        flat = sorted(entry.name for entry in root.iterdir() if _is_image(entry))
        found = [[entry for entry in (root / name).rglob("*") if _is_image(entry)] for name in classes]
        below = [sorted(entry.relative_to(root).as_posix() for entry in entries) for entries in found]
        in_classes = [name for names in below for name in names]
        if flat and in_classes:
            raise ValueError(
                f"{root} has {len(flat)} images of its own ({flat[0]}, …) and {len(in_classes)} in subfolders "
                f"({in_classes[0]}, …); expected either images or class folders"
            )
        if not flat and not in_classes:
            endings = " ".join(sorted(EXTENSIONS))
            raise FileNotFoundError(f"no image in {root} or its subfolders; known endings: {endings}")
        if flat:
            super().__init__(root, flat, on_error=on_error)
        else:
            labels = [label for label, names in enumerate(below) for _ in names]
            super().__init__(root, in_classes, labels, classes, on_error=on_error)


def _is_image(entry: Path) -> bool:
    return entry.suffix.lower() in EXTENSIONS and not entry.name.startswith(".") and entry.is_file()
