"""`pace finetune`."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from pace.cli import options
from pace.cli.models import CHECKPOINT, ModelChoice, device_of, load_model, located
from pace.cli.output import busy, say, table
from pace.cli.pictures import ImageChoice
from pace.cli.runs import running


def finetune(
    ctx: typer.Context,
    images: options.Images,
    model: options.Model,
    data_root: options.DataRoot = None,
    split: options.Split = "train",
    limit: options.Limit = None,
    skip_unreadable: options.SkipUnreadable = False,
    architecture: options.Architecture = None,
    image_size: options.ImageSize = None,
    normalize: options.Normalize = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the images.")] = 12,
    lr: Annotated[float, typer.Option(help="Learning rate at its peak.")] = 1e-4,
    layer_decay: options.LayerDecay = 1.0,
    validation: Annotated[float, typer.Option(help="Share of every class that decides which epoch is best.")] = 0.1,
    perturbed: Annotated[
        bool,
        typer.Option(
            "--perturbed",
            help="Show it images perturbed as the paper does, so that its predictions withstand that; else gentler crops.",
        ),
    ] = False,
    seed: options.Seed = 0,
    batch_size: options.BatchSize = 64,
    device: options.Device = "auto",
    out: options.Out = None,
    config: options.Config = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> dict[str, Any]:
    """Train a model to tell classes of images apart.

    The paper explains models that were fine-tuned on the images at hand.

    \b
    Example:
      pace finetune --images flower --data-root data --model vit_base_patch16_224 --out runs/vit-flower
      pace fit --images flower --data-root data --model runs/vit-flower

    A run that was stopped goes on from its last finished epoch when it is started again with the same --out.
    """
    where = device_of(device)
    from pace.backbones import finetune as train
    from pace.images import AUGMENT_SEED, Perturbation

    choice = ImageChoice(images, data_root, split, limit, seed, skip_unreadable)
    with busy("opening the images"):
        opened = choice.open()
    base = ModelChoice(model, architecture, image_size, normalize=normalize)
    network, _ = load_model(base)
    about = {"model": asdict(replace(base, name=located(model))), "images": choice.record(opened)}
    with running(ctx, images, out=out, device=where, **about) as run:
        found = train(
            network,
            opened,
            epochs=epochs,
            lr=lr,
            layer_decay=layer_decay,
            validation=validation,
            batch_size=batch_size,
            augment=Perturbation(seed + AUGMENT_SEED) if perturbed else True,
            seed=seed,
            device=where,
            checkpoint=run.file(CHECKPOINT),
        )
        run.record["results"] = {
            "accuracy": found.accuracy,
            "best_epoch": found.epoch + 1,
            "history": [epoch._asdict() for epoch in found.history],
            "class_names": found.class_names,
            "checkpoint": CHECKPOINT,
        }
    rows = [
        [str(number), f"{epoch.train_loss:.3f}", f"{epoch.loss:.3f}", f"{100 * epoch.accuracy:.1f} %"]
        for number, epoch in enumerate(found.history, start=1)
    ]
    table(["epoch", "training loss", "held-out loss", "held-out accuracy"], rows)
    say(f"epoch {found.epoch + 1} is kept: {100 * found.accuracy:.1f} % of the held-out images right")
    say(f"use it with --model {run.folder}")
    return run.record
