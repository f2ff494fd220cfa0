"""`pace finetune`."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from pace.cli import options
from pace.cli.opening import device_of, image_record, load_model, open_images, say_how_it_is_used
from pace.cli.output import say, table
from pace.cli.runs import located, running

_PERTURBED_HELP = "Augment with the paper's perturbation instead of gentle crops, for steady predictions."


def finetune(
    ctx: typer.Context,
    *,
    images: options.RequiredImages,
    model: options.Model,
    how: options.LoadOptions,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the images.")] = 12,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-4,
    layer_decay: options.LayerDecay = 1.0,
    validation: Annotated[float, typer.Option(help="Share of every class held out to choose the best epoch.")] = 0.1,
    perturbed: Annotated[bool, typer.Option("--perturbed", help=_PERTURBED_HELP)] = False,
    compute: options.Compute,
) -> dict[str, Any]:
    """Train a model to classify images.

    The paper explains models that were fine-tuned on the images at hand.

    \b
    Example:
      pace finetune --images flower --data-root data --model vit_base_patch16_224 --out runs/vit-flower
      pace fit --images flower --data-root data --model runs/vit-flower

    If it is stopped, the same command with the same --out resumes it after the last finished epoch.
    """
    device = device_of(compute.device)
    from pace.backbones import ModelChoice
    from pace.backbones import finetune as train
    from pace.backbones.loading import CHECKPOINT
    from pace.images import AUGMENT_SEED, Perturbation

    opened, base = open_images(images), ModelChoice(model, **asdict(how))
    network, _ = load_model(base)
    say_how_it_is_used(base, network)
    about = {"model": asdict(replace(base, name=located(model))), "images": image_record(images, opened)}
    with running(ctx, images.images, device=device, **about) as run:
        found = train(
            network,
            opened,
            epochs=epochs,
            lr=lr,
            layer_decay=layer_decay,
            validation=validation,
            batch_size=compute.batch_size,
            augment=Perturbation(images.seed + AUGMENT_SEED) if perturbed else True,
            seed=images.seed,
            device=device,
            checkpoint=run.file(CHECKPOINT),
        )
        run.record["results"] = {
            "accuracy": found.accuracy,
            "best_epoch": found.epoch + 1,
            "history": [epoch._asdict() for epoch in found.history],
            "class_names": found.class_names,
        }
    rows = [
        [str(number), f"{epoch.train_loss:.3f}", f"{epoch.loss:.3f}", f"{100 * epoch.accuracy:.1f} %"]
        for number, epoch in enumerate(found.history, start=1)
    ]
    table(["epoch", "training loss", "held-out loss", "held-out accuracy"], rows)
    say(f"kept epoch {found.epoch + 1}, with {100 * found.accuracy:.1f} % accuracy on the held-out images")
    say(f"use it with --model {run.folder}")
    return run.record
