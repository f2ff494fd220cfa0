"""`pace evaluate`."""

from __future__ import annotations

from functools import partial
from typing import Any

import typer

from pace.cli import options
from pace.cli.fit_runs import open_fit
from pace.cli.models import device_of
from pace.cli.observing import observe_images, read_extracted
from pace.cli.output import say, show_scores
from pace.cli.runs import open_run, running


def evaluate(
    ctx: typer.Context,
    *,
    fit_run: options.FitFolder = None,
    images: options.ImageOptions,
    bootstrap: options.Bootstrap = 200,
    moved: options.MovedModel = None,
    compute: options.Compute,
) -> dict[str, Any]:
    """Score a fit, and warn where scores mislead.

    \b
    Example:
      pace fit --images color --model color --concepts 8
      pace evaluate

    Uses the test split of the fit's images, unless --images names others.
    """
    device = device_of(compute.device)
    from pace.metrics import evaluate as score
    from pace.metrics.ground_truth import known_truth

    fit = open_fit(fit_run, device, moved)
    backbone = fit.model.backbone
    observe = partial(observe_images, backbone, seed=images.seed, batch_size=compute.batch_size)
    choice = fit.other_images(images)
    test, rest = fit.test_images(choice)
    with running(ctx, choice.images, device=device, **fit.record) as run:
        run.record["configuration"]["fit_run"] = str(fit.run.folder.resolve())
        run.record["images"] = choice.record(test)
        extracted = fit.run.record["observations"]
        if extracted is not None:
            train = read_extracted(open_run(extracted, "extract"), pairs=False).observations
        else:
            train = observe(fit.open_images(), pairs=False).observations
        views = observe(test, pairs=True)
        grid = views.observations.grid
        scores = score(
            fit.concepts,
            train if rest is None else train[rest],
            views.observations,
            views.perturbed,
            bootstrap=bootstrap,
            seed=images.seed,
            **({} if grid is None else known_truth(test, backbone.preprocessing, grid)),
        )
        run.record["results"] = {"images": len(test), **scores.as_dict()}
    show_scores(scores)
    say(f"{len(test)} images, {fit.in_use}")
    say(f"written to {run.folder}")
    return run.record
