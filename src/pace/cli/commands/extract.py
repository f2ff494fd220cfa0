"""`pace extract`."""

from __future__ import annotations

from typing import Any

import typer

from pace.cli import options
from pace.cli.images import ImageChoice
from pace.cli.models import device_of
from pace.cli.observing import observe_images, open_images_and_model
from pace.cli.output import say
from pace.cli.runs import running


def extract(
    ctx: typer.Context,
    *,
    images: options.RequiredImages,
    model: options.Model,
    how: options.LayerOptions,
    probe: options.Probe = False,
    pairs: options.Pairs = True,
    compute: options.Compute,
) -> dict[str, Any]:
    """Save a model's observations of images to disk.

    For sets that do not fit in memory, or that several fits use.

    \b
    Example:
      pace extract --images color --model color --limit 200 --out runs/color-observed
      pace fit --observations runs/color-observed --concepts 8

    If it is stopped, the same command with the same --out resumes it.
    """
    choice, device = ImageChoice.of(images), device_of(compute.device)
    opened, explained = open_images_and_model(choice, how.choice(model), device, probe, compute.batch_size)
    about = {"model": explained.record(), "images": choice.record(opened)}
    with running(ctx, choice.images, device=device, **about) as run:
        explained.save_head(run)
        views = observe_images(
            explained.backbone, opened, pairs=pairs, seed=images.seed, batch_size=compute.batch_size, store=run
        )
        seen = views.observations
        run.record["model"]["class_names"] = explained.names_for(seen.n_classes, opened)
        run.record["results"] = {
            "images": len(seen),
            "tokens": seen.n_tokens,
            "dim": seen.dim,
            "grid": seen.grid,
            "classes": seen.n_classes,
            "perturbed": views.perturbed is not None,
            "bytes": sum(file.stat().st_size for file in run.folder.rglob("*") if file.is_file()),
        }
    say(f"{seen}{' and their perturbed views' if views.perturbed is not None else ''}")
    say(f"{run.record['results']['bytes'] / 1e6:.1f} MB in {run.folder}")
    return run.record
