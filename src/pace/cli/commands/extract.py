"""`pace extract`."""

from __future__ import annotations

from typing import Any

import typer

from pace.cli import options
from pace.cli.models import ModelChoice, device_of, keep_head
from pace.cli.observing import look, open_both
from pace.cli.output import say
from pace.cli.pictures import ImageChoice
from pace.cli.runs import running


def extract(
    ctx: typer.Context,
    images: options.Images,
    model: options.Model,
    data_root: options.DataRoot = None,
    split: options.Split = "train",
    limit: options.Limit = None,
    skip_unreadable: options.SkipUnreadable = False,
    pairs: options.Pairs = True,
    architecture: options.Architecture = None,
    image_size: options.ImageSize = None,
    normalize: options.Normalize = None,
    layer: options.Layer = None,
    cls: options.CountCls = False,
    probe: options.Probe = False,
    seed: options.Seed = 0,
    batch_size: options.BatchSize = 64,
    device: options.Device = "auto",
    out: options.Out = None,
    config: options.Config = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> dict[str, Any]:
    """Keep what a model sees in images on disk.

    For sets that do not fit in memory, or are used again.

    \b
    Example:
      pace extract --images color --model color --limit 200 --out runs/color-seen
      pace fit --observations runs/color-seen --concepts 8

    A run that was stopped goes on when it is started again with the same --out.
    """
    choice = ImageChoice(images, data_root, split, limit, seed, skip_unreadable)
    where = device_of(device)
    subject, opened = open_both(
        choice, ModelChoice(model, architecture, image_size, layer, cls, normalize=normalize), where, probe, batch_size
    )
    about = {"model": subject.record(), "images": choice.record(opened)}
    with running(ctx, images, out=out, device=where, **about) as run:
        keep_head(subject.backbone, run)
        views = look(subject, opened, pairs=pairs, seed=seed, batch_size=batch_size, store=run)
        seen = views.observations
        run.record["model"]["class_names"] = subject.names_for(seen.n_classes, opened)
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
