"""A run of `pace fit`, opened again: concepts, model and images together."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pace.cli.errors import Problem
from pace.cli.models import Subject, reopen_subject
from pace.cli.pictures import ImageChoice
from pace.cli.runs import DATASETS, Run, latest, open_run

if TYPE_CHECKING:
    import torch

    from pace.explainer import PACE
    from pace.images import ImageSet

CONCEPTS, GALLERY = "concepts.safetensors", "gallery.json"
GALLERY_SIZE = 6  # images of a concept
_SPLITS = ("train", "test")
_HELD_OUT = 5  # one image in so many


@dataclass(frozen=True)
class Fitted:
    """`images` is the choice the concepts were learned from."""

    run: Run
    concepts: PACE
    subject: Subject
    images: ImageChoice

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self.subject.class_names

    @property
    def in_use(self) -> str:
        """How many concepts, and of which run."""
        total = len(self.concepts.means_)
        used = total - len(self.concepts.empty_concepts_)
        return f"the {used if used == total else f'{used} of {total}'} concepts in use of {self.run.folder}"

    def open_images(self) -> ImageSet:
        """The images the concepts were learned from, if they are still there and the same."""
        opened = self.images.open()
        if opened.fingerprint() != self.run.record["images"]["fingerprint"]:
            raise Problem(f"the images that {self.run.folder} was fitted on have changed since; fit again")
        return opened

    def examples(self, concepts: list[int], each: int) -> ImageSet:
        """Images of the fit that show these concepts best."""
        gallery = json.loads(self.run.file(GALLERY).read_bytes())
        images = self.open_images()
        place = {name: number for number, name in enumerate(images.names)}
        names = dict.fromkeys(name for concept in concepts for name in gallery["images"][concept][:each])
        return images.subset(place[name] for name in names)

    def other_images(
        self,
        source: str | None,
        data_root: str | None,
        split: str | None,
        limit: int | None,
        seed: int,
        skip_unreadable: bool,
    ) -> ImageChoice:
        """The images named, or those of the fit, in the split asked for: "test" unless a folder has no splits."""
        if source is None:
            source, data_root = self.images.source, data_root or self.images.data_root
        elif split is None and not has_splits(source):
            split = "train"  # a folder of its own, which is all of it
        skip_unreadable |= self.images.skip_unreadable
        return ImageChoice(source, data_root, split or "test", limit, seed, skip_unreadable)

    def test_images(self, asked: ImageChoice) -> tuple[ImageSet, list[int] | None]:
        """Images to judge by, and which of the fit's own are left to learn from (None: all of them).

        A folder without a split has no images that the fit has not seen; then a fifth of them is held out.
        """
        try:
            return asked.open(), None
        except ValueError:
            if asked.source != self.images.source or has_splits(asked.source):
                raise
        seen = self.open_images()
        order = np.random.default_rng(asked.seed).permutation(len(seen))
        held = max(1, len(seen) // _HELD_OUT)
        if len(seen) < 2:
            raise Problem(f"{asked.source} has one image alone; name others with --images")
        warnings.warn(
            f"{asked.source} has no split {asked.split!r}: {held} of its {len(seen)} images are held out of the regressions, "
            "but the concepts have seen them; --images names others",
            stacklevel=2,
        )
        chosen = np.sort(order[:held])[: asked.limit]
        return seen.subset(chosen.tolist()), np.sort(order[held:]).tolist()


def open_fitted(path: str | None, device: torch.device, moved: str | None) -> Fitted:
    """The run asked for, or the latest."""
    from pace import PACE

    run = latest("fit") if path is None else open_run(path, "fit")
    if not run.record["results"]:
        raise Problem(f"{run.folder} has no concepts: its status is {run.record['status']!r}")
    if run.record["status"] == "interrupted":
        epochs = run.record["results"]["epochs"]
        warnings.warn(f"{run.folder} was stopped after {epochs} epochs, before its concepts settled", stacklevel=2)
    concepts = PACE.load(run.file(CONCEPTS), device=str(device))
    subject = reopen_subject(run, device, moved)
    if subject.backbone.dim != concepts.means_.shape[1]:
        raise Problem(
            f"{run.file(CONCEPTS)} has concepts of {concepts.means_.shape[1]} dimensions, but the tokens of "
            f"{subject.choice.name} have {subject.backbone.dim}"
        )
    return Fitted(run, concepts, subject, ImageChoice.from_record(run.record["images"]))


def has_splits(source: str) -> bool:
    """A dataset, or a folder with train/ or test/ in it."""
    return source in DATASETS or any((Path(source).expanduser() / name).is_dir() for name in _SPLITS)


def name_of(class_names: tuple[str, ...] | None, number: int) -> str:
    return f"class {number}" if class_names is None else class_names[number]


def fit_record(fitted: Fitted) -> dict[str, Any]:
    """What a later run keeps of the fit it rests on."""
    return {
        "fit": {
            "folder": str(fitted.run.folder.resolve()),
            "configuration": fitted.run.record["configuration"],
            "model": fitted.run.record["model"],
            "images": fitted.run.record["images"],
        }
    }
