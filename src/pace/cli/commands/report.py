"""`pace report`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pace.cli import options
from pace.cli.errors import Problem
from pace.cli.fitted import Fitted, fit_record, has_splits, open_fitted
from pace.cli.models import device_of
from pace.cli.observing import look
from pace.cli.output import busy, say
from pace.cli.runs import all_runs, open_run, running

if TYPE_CHECKING:
    from pace.images import ImageSet, PreprocessingLike
    from pace.metrics import Scores

_BATCH = 32  # images perturbed at once


def report(
    ctx: typer.Context,
    fit_run: options.FitRun = None,
    evaluation: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="A run of `pace evaluate`, whose scores are shown.",
            show_default="the latest of this fit, if any",
        ),
    ] = None,
    images: options.MaybeImages = None,
    data_root: options.DataRoot = None,
    split: options.TestSplit = None,
    limit: options.Limit = 200,
    skip_unreadable: options.SkipUnreadable = False,
    pairs: options.Pairs = True,
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    moved: options.MovedModel = None,
    seed: options.Seed = 0,
    batch_size: options.BatchSize = 64,
    device: options.Device = "auto",
    out: options.Out = None,
    config: options.Config = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> dict[str, Any]:
    """Write a report to click through, as one HTML file.

    It shows concepts, images and classes, and how far to trust them.

    \b
    Example:
      pace fit --images color --model color --concepts 8
      pace evaluate
      pace report

    The page opens from disk, without a network.
    """
    where = device_of(device)
    from pace.showing.report import write_report

    fitted = open_fitted(fit_run, where, moved)
    asked = fitted.other_images(images, data_root, split, limit, seed, skip_unreadable)
    if split is None and not has_splits(asked.source):
        asked = replace(asked, split="train")  # all of the folder: nothing is judged here, so nothing is held out
    with busy("opening the images"):
        shown = asked.open()
    scores, judged = _scores(fitted, evaluation)
    with running(ctx, asked.source, out=out, device=where, **fit_record(fitted)) as run:
        run.record["configuration"] |= {"fit_run": str(fitted.run.folder.resolve()), "evaluation": judged}
        run.record["images"] = asked.record(shown)
        views = look(fitted.subject, shown, pairs=pairs, seed=seed, batch_size=batch_size)
        preprocessing = fitted.subject.backbone.preprocessing
        with busy("writing the report"):
            file = write_report(
                run.file("report.html"),
                fitted.concepts,
                shown,
                views.observations,
                perturbed=views.perturbed,
                perturbed_images=_perturbed(shown, preprocessing, seed) if pairs else None,
                scores=scores,
                class_names=fitted.class_names,
                preprocessing=preprocessing,
                title=title or f"What the transformer sees in {Path(asked.source).name}",
            )
        address = file.resolve().as_uri()
        size = file.stat().st_size
        run.record["results"] = {"file": file.name, "address": address, "bytes": size, "images": len(shown)}
    if scores is None:
        say("no scores are shown: run `pace evaluate` first to have them in the report")
    say(f"{len(shown)} images, {size / 1e6:.1f} MB")
    say(address)
    return run.record


def _scores(fitted: Fitted, evaluation: str | None) -> tuple[Scores | None, str | None]:
    """The scores of this fit, and the run they are from."""
    from pace.metrics import Scores

    ours = str(fitted.run.folder.resolve())
    if evaluation is None:
        runs = [run for run in all_runs("evaluate") if run.record["fit"]["folder"] == ours]
        if not runs:
            return None, None
        run = runs[-1]
    else:
        run = open_run(evaluation, "evaluate")
        if run.record["fit"]["folder"] != ours:
            raise Problem(f"{evaluation} has the scores of {run.record['fit']['folder']}, not of {fitted.run.folder}")
    with suppress(KeyError, TypeError):
        return Scores.from_dict(run.record["results"]), str(run.folder.resolve())
    raise Problem(f"{run.folder} has no scores: its status is {run.record['status']!r}")


def _perturbed(images: ImageSet, preprocessing: PreprocessingLike, seed: int) -> Any:
    """The pixels behind the perturbed observations: the same seed and numbers give the same views."""
    import torch

    from pace.images import Perturbation, prepare

    perturb = Perturbation(seed)
    views = []
    for start in range(0, len(images), _BATCH):
        numbers = torch.arange(start, min(start + _BATCH, len(images)))
        batch = torch.stack([prepare(images[int(number)], preprocessing) for number in numbers])
        views.append((perturb(batch, numbers) * 255).round().to(torch.uint8))
    return torch.cat(views)
