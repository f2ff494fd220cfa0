"""Any folder of images."""

from __future__ import annotations

from pathlib import Path

from pace.images.decoding import EXTENSIONS
from pace.images.imageset import ImageFiles, OnError
from pace.images.layout import StrPath


class Folder(ImageFiles):
    """All images in a folder, sorted by name. Subfolders are classes; without subfolders there are no labels.

    Every subfolder is a class, even an empty one, so that the same folders give the same labels in every split.
    Hidden files and folders are passed over.
    """

    def __init__(self, path: StrPath, on_error: OnError = "raise") -> None:
        root = Path(path).expanduser()
        if not root.is_dir():
            raise FileNotFoundError(f"{root} is not a folder; expected a folder of images or of class folders")
        classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not _hidden(entry))
        flat = sorted(entry.name for entry in root.iterdir() if _is_image(entry))
        names = {name: _images_below(root / name, root) for name in classes}
        in_classes = [image for name in classes for image in names[name]]
        if flat and in_classes:
            raise ValueError(
                f"{root} has {len(flat)} images of its own ({flat[0]}, …) and {len(in_classes)} in subfolders "
                f"({in_classes[0]}, …); expected either images or class folders"
            )
        if not flat and not in_classes:
            raise FileNotFoundError(
                f"no image in {root} or its subfolders; known endings: {' '.join(sorted(EXTENSIONS))}"
            )
        if flat:
            super().__init__(root, flat, on_error=on_error)
        else:
            labels = [label for label, name in enumerate(classes) for _ in names[name]]
            super().__init__(root, in_classes, labels, classes, on_error=on_error)


def _images_below(folder: Path, root: Path) -> list[str]:
    return sorted(entry.relative_to(root).as_posix() for entry in folder.rglob("*") if _is_image(entry))


def _is_image(entry: Path) -> bool:
    return entry.suffix.lower() in EXTENSIONS and not _hidden(entry) and entry.is_file()


def _hidden(entry: Path) -> bool:
    return entry.name.startswith(".")
