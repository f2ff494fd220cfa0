"""A run of `pace fit` opened again: for the commands that come after it, and for `pace.load_run`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from pace import files
from pace.cli.errors import Problem
from pace.cli.observing import observe_what_is_new, source_of
from pace.cli.opening import device_of, images_of, open_images, reopen_images, reopen_model
from pace.cli.options import FitOptions, ImageOptions
from pace.cli.runs import Run, all_runs, open_run
from pace.editing import Edits, merges_in, read_changes
from pace.files import CONCEPTS, GALLERY, DamagedFile, read_json, reading

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pace.cli.observing import Views
    from pace.images import ImageSet
    from pace.model_explainer import ModelExplainer

_HELD_OUT = 5  # one image in five


@dataclass(frozen=True)
class FitRun:
    """A run of `pace fit`, and what it learned."""

    run: Run
    device: torch.device
    fitted: ModelExplainer

    @property
    def in_use(self) -> str:
        """How many concepts are in use, and in which run."""
        concepts = self.fitted.concepts
        total, empty = len(concepts.means_), len(concepts.empty_concepts_)
        hidden = sum(name.hidden for name in concepts.names_)
        return f"{total - empty} of {total} concepts in use of {self.run.folder}" + f", {hidden} hidden" * bool(hidden)

    def observe(
        self,
        images: ImageSet,
        pairs: bool,
        run: Run,
        seed: int = 0,
        batch_size: int = 64,
        others: Sequence[Run] = (),
        near: bool = False,
    ) -> Views:
        """Observations of the images, as far as this fit or the `others` kept them; the rest is observed, into `run`.

        They are in main memory, or with `near` on the GPU if there is one with room.
        """
        kept_by, where = [source_of(self.run), *others], self.device if near else None
        how: Any = {"kept_by": kept_by, "seed": seed, "batch_size": batch_size, "near": where}
        return observe_what_is_new(self.fitted.backbone, images, pairs, run, **how)

    def evaluations(self, given: str | None = None) -> list[Run]:
        """The runs of `pace evaluate` of this fit in runs/, or the one given if it is of this fit."""
        runs = all_runs("evaluate") if given is None else [open_run(given, "evaluate")]
        return evaluations_of(self.run, runs)

    def fingerprint(self) -> str:
        return fingerprint_of(self.run)

    def other_images(self, given: ImageOptions) -> ImageOptions:
        """The images given, or those of the fit; by default their test split, if they have splits."""
        from pace.images.datasets import has_splits

        own = images_of(self.run)
        if given.images is None:
            given = replace(given, images=own.images, data_root=given.data_root or own.data_root)
        split = given.split or ("test" if has_splits(given.images) else None)
        return replace(given, split=split, skip_unreadable=given.skip_unreadable or own.skip_unreadable)

    def test_images(self, choice: ImageOptions) -> tuple[ImageSet, list[int] | None]:
        """Images to score on, and which of the fit's own are left to train the regressions on (None: all).

        A folder without splits has no unseen images, so a fifth of it is held out of the regressions.
        """
        from pace.images.datasets import has_splits

        if choice.images != images_of(self.run).images or has_splits(choice.images):
            return open_images(choice), None
        seen = reopen_images(self.run)
        order = np.random.default_rng(choice.seed).permutation(len(seen))
        held = max(1, len(seen) // _HELD_OUT)
        warnings.warn(
            f"{choice.images} has no split 'test': {held} of its {len(seen)} images are held out of the regressions, "
            "but the concepts have seen them; --images names others",
            stacklevel=2,
        )
        chosen = np.sort(order[:held])[: choice.limit]
        return seen.subset(chosen.tolist()), np.sort(order[held:]).tolist()


def chosen_run(given: str | None) -> Run:
    """The run of `pace fit` with this folder, or the latest one."""
    runs = all_runs("fit") if given is None else [open_run(given, "fit")]
    if not runs:
        raise Problem("no run in runs/; make one with `pace fit`, or name one with --run")
    return runs[-1]


def open_fit(ctx: typer.Context, options: FitOptions) -> FitRun:
    """The run that the options name, or the latest one; the record of this command then names it too."""
    device = device_of(options.device)
    run = chosen_run(options.fit_run)
    results, status = run.record["results"], run.record["status"]
    if not results:
        raise Problem(f"{run.folder} has no concepts: its status is {status!r}")
    if status == "interrupted":
        warnings.warn(f"{run.folder} was stopped after {results['epochs']} epochs, before it converged", stacklevel=2)
    ctx.params["fit_run"] = str(run.folder.resolve())
    return FitRun(run, device, _explainer_of(run, device, options.moved))


def load_run(folder: str | PathLike[str], model: Any = None, device: str = "auto") -> ModelExplainer:
    """What `pace fit` or `ModelExplainer.save` wrote: model, block, head, preprocessing, concepts, class names and scores.

    `model` is where the model is, if it has moved, or the model itself, which a fit in Python needs unless it was named.
    """
    given = str(model) if isinstance(model, PathLike) else model
    return _explainer_of(open_run(str(folder), "fit"), device_of(device), given)


def _explainer_of(run: Run, device: torch.device, model: str | nn.Module | None) -> ModelExplainer:
    from pace.backbones.backbone import without_apple
    from pace.explainer import PACE
    from pace.metrics import Scores
    from pace.model_explainer import ModelExplainer

    concepts = PACE.load(run.file(CONCEPTS), device=str(without_apple(device)))
    edits = Edits(concepts.names_, run.folder)
    opened, gallery = reopen_model(run, device, model), read_gallery(run, len(concepts.means_))
    images = partial(reopen_images, run) if run.record["images"]["images"] else None
    scores = None
    if (scored := scored_by(run, evaluations_of(run, all_runs("evaluate", run.folder.parent)))) is not None:
        with reading(scored.folder / "run.json", "run `pace evaluate` again"):
            scores = Scores.from_dict(scored.record["results"])
    known = opened.class_names, gallery, images, scores, opened.choice
    return ModelExplainer(opened.backbone, concepts, *known, edits=edits)


def read_gallery(run: Run, concepts: int) -> list[list[str]]:
    """For every concept the names of the images that show it best."""
    file, remedy = run.file(GALLERY), "run `pace fit` again, in another folder"
    names: list[list[str]] = read_json(file, {"images": [[str]]}, remedy)["images"]
    if len(names) != concepts or not all(names):
        raise DamagedFile(f"{file} cannot be used: it is of other concepts; {remedy}")
    return names


def fingerprint_of(run: Run) -> str:
    """Of the concepts and what was merged: scores are of these, and of no others that a folder may hold later."""
    own, merges = files.fingerprint_of(run.file(CONCEPTS)), merges_in(read_changes(run.folder))
    return blake2b(f"{own} {merges}".encode(), digest_size=8).hexdigest() if merges else own


def evaluations_of(run: Run, runs: Sequence[Run]) -> list[Run]:
    """Those of some runs of `pace evaluate` that scored the fit in this folder, oldest first."""
    ours = str(run.folder.resolve())
    return [one for one in runs if one.record["configuration"].get("fit_run") == ours and one.record["results"]]


def scored_by(run: Run, evaluations: Sequence[Run]) -> Run | None:
    """The latest of the evaluations that scored the concepts the fit holds now, if there is one."""
    latest = [one for one in evaluations if one.record.get("fit") == fingerprint_of(run)][-1:]
    return latest[0] if latest else None
