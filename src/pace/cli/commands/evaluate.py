"""`pace evaluate`."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import typer

from pace.cli import options
from pace.cli.opening import image_record, observe_images, open_fit, read_extracted, reopen_images
from pace.cli.output import say, show_scores
from pace.cli.runs import open_run, running


def evaluate(
    ctx: typer.Context,
    *,
    fit: options.FitOptions,
    images: options.ImageOptions,
    bootstrap: options.Bootstrap = 200,
    every: Annotated[bool, typer.Option("--all", help="Print all scores, not only the main ones.")] = False,
    hidden_images: options.HiddenImages = 32,
) -> dict[str, Any]:
    """Score a fit, warn where scores mislead, and say what to believe.

    \b
    Example:
      pace fit --images color --model color --concepts 8
      pace evaluate

    Uses the test split of the fit's images, unless --images names others.
    """
    found = open_fit(ctx, fit)
    from pace.metrics import evaluate as score
    from pace.metrics import hide
    from pace.metrics.ground_truth import known_truth

    backbone, how = found.fitted.backbone, (images.seed, fit.batch_size)
    choice = found.other_images(images)
    test, rest = found.test_images(choice)
    with running(ctx, choice.images, device=found.device, images=image_record(choice, test)) as run:
        if extracted := found.run.record["configuration"]["observations"]:
            train, _ = read_extracted(open_run(extracted, "extract"), pairs=False)
        else:
            train, _ = observe_images(backbone, reopen_images(found.run), False, *how)
        seen, perturbed = observe_images(backbone, test, True, *how)
        truth = known_truth(test, backbone.preprocessing, seen.grid) if seen.grid else {}
        train = train if rest is None else train[rest]
        hiding = None
        if hidden_images and seen.n_classes:
            order = np.random.default_rng(images.seed).permutation(len(test))
            hiding = hide(backbone, test, np.sort(order[:hidden_images]))
        more: dict[str, Any] = {"hiding": hiding, "bootstrap": bootstrap, "seed": images.seed, **truth}
        scores = score(found.fitted.concepts, train, seen, perturbed, **more)
        run.record["results"] = {"images": len(test), **scores.as_dict()}
    show_scores(scores, every)
    say(f"{len(test)} images, {found.in_use}")
    say(f"written to {run.folder}")
    say(scores.verdict, style="bold")
    return run.record
