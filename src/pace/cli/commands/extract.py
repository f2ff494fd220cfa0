"""`pace extract`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer

from pace.cli import options
from pace.cli.opening import device_of, image_record, kept_bytes, load_model, observe_once, open_images, weights_of
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

    What `pace fit` does first, without the fit.

    \b
    Example:
      pace extract --images color --model color --limit 200 --out runs/color-observed
      pace fit --observations runs/color-observed --concepts 8

    If it is stopped, the same command with the same --out resumes it.
    """
    device = device_of(compute.device)
    from pace.backbones import ModelChoice

    opened, choice = open_images(images), ModelChoice(model, **asdict(how))
    loaded, record = load_model(choice), image_record(images, opened)
    facts = {"images": record, "weights": weights_of(loaded[0])}
    with running(ctx, images.images, device=device, **facts) as run:
        about = images, opened, choice, loaded, head, pairs, device, compute.batch_size
        explained, (seen, perturbed) = observe_once(run, *about)
        explained.save_into(run, seen, opened)
        size = kept_bytes(run)
        run.record["results"] = {"images": len(seen), "bytes": size}
    say(f"{seen}{'' if perturbed is None else ' and their perturbed views'}")
    say(f"{size / 1e6:.1f} MB in {run.folder}")
    return run.record
