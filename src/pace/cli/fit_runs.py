"""Open a run of `pace fit` again: concepts, model and images together."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pace.cli.errors import Problem
from pace.cli.images import ImageChoice
from pace.cli.models import OpenedModel, reopen_model
from pace.cli.options import ImageOptions
from pace.cli.runs import Run, latest, open_run

if TYPE_CHECKING:
    import torch

    from pace.explainer import PACE
    from pace.images import ImageSet

CONCEPTS, GALLERY = "concepts.safetensors", "gallery.json"
_HELD_OUT = 5  # one image in five


@dataclass(frozen=True)
class FitRun:
    """`images` are those the concepts were learned from."""

    run: Run
    concepts: PACE
    model: OpenedModel
    images: ImageChoice

    @property
    def in_use(self) -> str:
        """How many concepts are in use, and in which run."""
        total = len(self.concepts.means_)
        used = total - len(self.concepts.empty_concepts_)
        return f"the {used if used == total else f'{used} of {total}'} concepts in use of {self.run.folder}"

    @property
    def record(self) -> dict[str, Any]:
        """What a later run keeps of the fit it uses."""
        kept = {name: self.run.record[name] for name in ("configuration", "model", "images")}
        return {"fit": {"folder": str(self.run.folder.resolve()), **kept}}

    def gallery(self) -> list[list[str]]:
        """For every concept the names of the images that show it best."""
        names: list[list[str]] = json.loads(self.run.file(GALLERY).read_bytes())["images"]
        return names

    def class_name(self, number: int) -> str:
        return f"class {number}" if self.model.class_names is None else self.model.class_names[number]

    def open_images(self) -> ImageSet:
        problem = f"the images that {self.run.folder} was fitted on have changed since; fit again"
        return self.images.reopen(self.run.record["images"], problem)

    def examples(self, concepts: list[int], each: int) -> ImageSet:
        """The images of the fit that show these concepts best."""
        gallery, images = self.gallery(), self.open_images()
        place = {name: number for number, name in enumerate(images.names)}
        names = dict.fromkeys(name for concept in concepts for name in gallery[concept][:each])
        return images.subset(place[name] for name in names)

    def other_images(self, options: ImageOptions) -> ImageChoice:
        """The images given, or those of the fit; by default their test split."""
        given = options
        if given.images is None:
            given = replace(given, images=self.images.images, data_root=given.data_root or self.images.data_root)
        given = replace(given, skip_unreadable=given.skip_unreadable or self.images.skip_unreadable)
        choice = ImageChoice.of(given, "test")
        if options.images is not None and options.split is None and not choice.has_splits:
            return replace(choice, split="train")  # all of the folder
        return choice

    def test_images(self, choice: ImageChoice) -> tuple[ImageSet, list[int] | None]:
        """Images to score on, and which of the fit's own are left to train the regressions on (None: all).

        A folder without splits has no unseen images, so a fifth of it is held out of the regressions.
        """
        try:
            return choice.open(), None
        except ValueError:
            if choice.images != self.images.images or choice.has_splits:
                raise
        seen = self.open_images()
        if len(seen) < 2:
            raise Problem(f"{choice.images} has only one image; name others with --images")
        order = np.random.default_rng(choice.seed).permutation(len(seen))
        held = max(1, len(seen) // _HELD_OUT)
        warnings.warn(
            f"{choice.images} has no split {choice.split!r}: {held} of its {len(seen)} images are held out of the "
            "regressions, but the concepts have seen them; --images names others",
            stacklevel=2,
        )
        chosen = np.sort(order[:held])[: choice.limit]
        return seen.subset(chosen.tolist()), np.sort(order[held:]).tolist()


def open_fit(path: str | None, device: torch.device, moved: str | None) -> FitRun:
    """The run in this folder, or the latest one; `moved` is where its model is now."""
    from pace import PACE

    run = latest("fit") if path is None else open_run(path, "fit")
    if not run.record["results"]:
        raise Problem(f"{run.folder} has no concepts: its status is {run.record['status']!r}")
    if run.record["status"] == "interrupted":
        epochs = run.record["results"]["epochs"]
        warnings.warn(f"{run.folder} was stopped after {epochs} epochs, before it converged", stacklevel=2)
    concepts = PACE.load(run.file(CONCEPTS), device=str(device))
    return FitRun(run, concepts, reopen_model(run, device, moved), ImageChoice.from_record(run.record["images"]))
