"""`pace extract`."""

from __future__ import annotations

from typing import Any

import typer

from pace.cli import options
from pace.cli.opening import device_of, image_record, observe_images, open_images_and_model
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
    """Save a model's observations of images to disk.

    For sets that do not fit in memory, or that several fits use.

    \b
    Example:
      pace extract --images color --model color --limit 200 --out runs/color-observed
      pace fit --observations runs/color-observed --concepts 8

    If it is stopped, the same command with the same --out resumes it.
    """
    device = device_of(compute.device)
    opened, explained = open_images_and_model(images, model, how, head, device, compute.batch_size)
    about = {"model": explained.record(), "images": image_record(images, opened)}
    with running(ctx, images.images, device=device, **about) as run:
        seen, perturbed = observe_images(explained.backbone, opened, pairs, images.seed, compute.batch_size, run)
        explained.save_into(run, seen, opened)
        size = sum(file.stat().st_size for file in run.folder.rglob("*") if file.is_file())
        run.record["results"] = {"images": len(seen), "bytes": size}
    say(f"{seen}{'' if perturbed is None else ' and their perturbed views'}")
    say(f"{size / 1e6:.1f} MB in {run.folder}")
    return run.record
