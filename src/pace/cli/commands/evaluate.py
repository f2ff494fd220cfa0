"""`pace evaluate`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pace.cli import options
from pace.cli.fitted import fit_record, open_fitted
from pace.cli.models import device_of
from pace.cli.observing import look, stored
from pace.cli.output import say, show_scores
from pace.cli.runs import open_run, running


def evaluate(
    ctx: typer.Context,
    fit_run: options.FitRun = None,
    images: options.MaybeImages = None,
    data_root: options.DataRoot = None,
    split: options.TestSplit = None,
    limit: options.Limit = None,
    skip_unreadable: options.SkipUnreadable = False,
    bootstrap: Annotated[int, typer.Option(min=0, help="Draws behind the intervals.")] = 200,
    moved: options.MovedModel = None,
    seed: options.Seed = 0,
    batch_size: options.BatchSize = 64,
    device: options.Device = "auto",
    out: options.Out = None,
    config: options.Config = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> dict[str, Any]:
    """Score a fit, and say where scores mislead.

    \b
    Example:
      pace fit --images color --model color --concepts 8
      pace evaluate

    Images are those of the fit's dataset in another split, unless --images names others.
    """
    where = device_of(device)
    from pace.metrics import evaluate as score
    from pace.metrics.ground_truth import known_truth

    fitted = open_fitted(fit_run, where, moved)
    asked = fitted.other_images(images, data_root, split, limit, seed, skip_unreadable)
    test, rest = fitted.test_images(asked)
    with running(ctx, asked.source, out=out, device=where, **fit_record(fitted)) as run:
        run.record["configuration"]["fit_run"] = str(fitted.run.folder.resolve())
        run.record["images"] = asked.record(test)
        extracted = fitted.run.record["observations"]
        if extracted is not None:
            train = stored(open_run(extracted, "extract")).observations
        else:
            opened = fitted.open_images()
            train = look(fitted.subject, opened, pairs=False, seed=seed, batch_size=batch_size).observations
        views = look(fitted.subject, test, pairs=True, seed=seed, batch_size=batch_size)
        grid = views.observations.grid
        scores = score(
            fitted.concepts,
            train if rest is None else train[rest],
            views.observations,
            views.perturbed,
            bootstrap=bootstrap,
            seed=seed,
            **({} if grid is None else known_truth(test, fitted.subject.backbone.preprocessing, grid)),
        )
        run.record["results"] = {"images": len(test), **scores.as_dict()}
    show_scores(scores)
    say(f"{len(test)} images, by {fitted.in_use}")
    say(f"written to {run.folder}")
    return run.record
