"""`pace report`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pace.cli import options
from pace.cli.errors import Problem
from pace.cli.fit_runs import FitRun, open_fit
from pace.cli.models import device_of
from pace.cli.observing import observe_images
from pace.cli.output import busy, say
from pace.cli.runs import all_runs, open_run, running

if TYPE_CHECKING:
    from pace.images import ImageSet, PreprocessingLike
    from pace.metrics import Scores

_BATCH = 32  # images perturbed at once
_IMAGES = options.ImageOptions(limit=200)


def report(
    ctx: typer.Context,
    *,
    fit_run: options.FitFolder = None,
    images: options.ImageOptions = _IMAGES,
    evaluation: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of a `pace evaluate`, whose scores are shown.",
            show_default="the latest of this fit, if any",
        ),
    ] = None,
    pairs: options.Pairs = True,
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    moved: options.MovedModel = None,
    compute: options.Compute,
) -> dict[str, Any]:
    """Write an interactive report as one HTML file.

    It shows concepts, images and classes, and how far to trust them.

    \b
    Example:
      pace fit --images color --model color --concepts 8
      pace evaluate
      pace report

    The page opens from disk, without a network.
    """
    device = device_of(compute.device)
    from pace.showing.report import write_report

    fit = open_fit(fit_run, device, moved)
    choice = fit.other_images(images)
    if images.split is None and not choice.has_splits:
        choice = replace(choice, split="train")  # the whole folder: nothing is scored, so nothing is held out
    with busy("opening the images"):
        shown = choice.open()
    scores, scored_in = _scores(fit, evaluation)
    with running(ctx, choice.images, device=device, **fit.record) as run:
        run.record["configuration"] |= {"fit_run": str(fit.run.folder.resolve()), "evaluation": scored_in}
        run.record["images"] = choice.record(shown)
        backbone = fit.model.backbone
        views = observe_images(backbone, shown, pairs=pairs, seed=images.seed, batch_size=compute.batch_size)
        with busy("writing the report"):
            file = write_report(
                run.file("report.html"),
                fit.concepts,
                shown,
                views.observations,
                perturbed=views.perturbed,
                perturbed_images=_perturbed(shown, backbone.preprocessing, images.seed) if pairs else None,
                scores=scores,
                class_names=fit.model.class_names,
                preprocessing=backbone.preprocessing,
                title=title or f"What the transformer sees in {Path(choice.images).name}",
            )
        address = file.resolve().as_uri()
        size = file.stat().st_size
        run.record["results"] = {"file": file.name, "address": address, "bytes": size, "images": len(shown)}
    if scores is None:
        say("the report has no scores; `pace evaluate` computes them")
    say(f"{len(shown)} images, {size / 1e6:.1f} MB")
    say(address)
    return run.record


def _scores(fit: FitRun, evaluation: str | None) -> tuple[Scores | None, str | None]:
    """The scores of this fit, and the run they are from."""
    from pace.metrics import Scores

    ours = str(fit.run.folder.resolve())
    if evaluation is None:
        runs = [run for run in all_runs("evaluate") if run.record["fit"]["folder"] == ours]
        if not runs:
            return None, None
        run = runs[-1]
    else:
        run = open_run(evaluation, "evaluate")
        if run.record["fit"]["folder"] != ours:
            raise Problem(f"{evaluation} has the scores of {run.record['fit']['folder']}, not of {fit.run.folder}")
    with suppress(KeyError, TypeError):
        return Scores.from_dict(run.record["results"]), str(run.folder.resolve())
    raise Problem(f"{run.folder} has no scores: its status is {run.record['status']!r}")


def _perturbed(images: ImageSet, preprocessing: PreprocessingLike, seed: int) -> Any:
    """The pixels of the perturbed views that were observed: the same seed gives the same views."""
    import torch

    from pace.images import Perturbation, prepare

    perturb = Perturbation(seed)
    views = []
    for start in range(0, len(images), _BATCH):
        numbers = torch.arange(start, min(start + _BATCH, len(images)))
        batch = torch.stack([prepare(images[int(number)], preprocessing) for number in numbers])
        views.append((perturb(batch, numbers) * 255).round().to(torch.uint8))
    return torch.cat(views)
