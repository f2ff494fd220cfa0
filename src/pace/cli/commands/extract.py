"""`pace extract`."""

from __future__ import annotations

from typing import Any

import typer

from pace.cli import options
from pace.cli.observing import kept_bytes, observe_once
from pace.cli.opening import device_of, open_job
from pace.cli.output import say
from pace.cli.runs import running


def extract(
    ctx: typer.Context,
    *,
    images: options.RequiredImages,
    model: options.Model,
    how: options.LayerOptions,
    head: options.HeadOptions,
    pairs: options.Pairs = True,
    compute: options.Compute,
) -> dict[str, Any]:
    """Run a model over images and keep what it saw.

    Several fits can then start from it. `pace fit` does the same first, and keeps it too.

    \b
    Example:
      pace extract --images color --model color --limit 200 --out runs/color-observed
      pace fit --observations runs/color-observed --concepts 8

    If it is stopped, the same command with the same --out resumes it.
    """
    job = open_job(images, model, how, head, compute, device_of(compute.device))
    with running(ctx, images.images, device=job.device, **job.about()) as run:
        explained, (seen, perturbed) = observe_once(run, job, pairs)
        explained.save_into(run, seen, job.images)
        size = kept_bytes(run)
        run.record["results"] = {"images": len(seen), "bytes": size}
    say(f"{seen}{'' if perturbed is None else ' and their perturbed views'}")
    say(f"{size / 1e6:.1f} MB in {run.folder}")
    return run.record
