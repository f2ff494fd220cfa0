"""Open images and model, and observe the images with the model."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pace.cli.errors import Problem
from pace.cli.images import ImageChoice
from pace.cli.models import OpenedModel, open_model_at_layer
from pace.cli.output import busy, say
from pace.cli.runs import Run

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pace.backbones import Backbone, ModelChoice
    from pace.images import ImageSet
    from pace.observations import Observations

ORIGINAL, PERTURBED = "original", "perturbed"  # folders of a run of `pace extract`


@dataclass(frozen=True)
class Views:
    """Observations of images, and of their perturbed views if these were asked for."""

    observations: Observations
    perturbed: Observations | None

    def __post_init__(self) -> None:
        if not self.observations.n_classes:
            warnings.warn(
                "this model has no classifier, so there are no predictions to explain; "
                "--probe fits one on the labels, `pace finetune` trains one",
                stacklevel=3,
            )


def open_images_and_model(
    images: ImageChoice, model: ModelChoice, device: torch.device, probe: bool, batch_size: int
) -> tuple[ImageSet, OpenedModel]:
    """Images first: they open quickly, so a misspelt name is found before a large model is loaded."""
    with busy("opening the images"):
        opened = images.open()
    reasons: list[str] = []

    def choose(network: nn.Module) -> int:
        from pace.backbones import Backbone, choose_layer

        if len(opened) < 2:
            last = Backbone(network).layer
            reasons.append(f"block {last}: with a single image there is nothing to compare")
            return last
        return choose_layer(network, opened, seed=images.seed, batch_size=batch_size, report=reasons.append)

    explained = open_model_at_layer(model, device, choose)
    backbone = explained.backbone
    if model.layer == "auto" or backbone.layer < backbone.layers - 1:  # the last block by default needs no reason
        for line in reasons:
            say(line)
    if probe:
        from pace.backbones.heads import fit_probe

        backbone.head = fit_probe(backbone, opened, batch_size)
        explained = replace(explained, class_names=tuple(opened.class_names or ()) or None)
    return opened, explained


def observe_images(
    backbone: Backbone, images: ImageSet, *, pairs: bool, seed: int, batch_size: int, store: Run | None = None
) -> Views:
    """Observations in memory, or in the folder of a run."""
    from pace.observing.extract import observe, observe_pair

    if pairs:
        folder = None if store is None else store.folder
        return Views(*observe_pair(backbone, images, seed=seed, batch_size=batch_size, store=folder))
    folder = None if store is None else store.file(ORIGINAL)
    return Views(observe(backbone, images, batch_size=batch_size, store=folder), None)


def stream_images(
    backbone: Backbone, images: ImageSet, *, pairs: bool, seed: int, batch_size: int, keep: bool
) -> Views:
    """Observations computed when they are needed, and again each time unless `keep`."""
    from pace.observing.streaming import stream, stream_pair

    if pairs:
        return Views(*stream_pair(backbone, images, seed=seed, batch_size=batch_size, keep=keep))
    return Views(stream(backbone, images, batch_size=batch_size, keep=keep), None)


def read_extracted(run: Run, pairs: bool) -> Views:
    """The observations of a `pace extract`."""
    from pace.observing.store import ObservationStore

    stores = [ObservationStore.open(run.file(name)) for name in (ORIGINAL, PERTURBED) if run.file(name).is_dir()]
    if not stores or not all(store.complete for store in stores):
        again = f"pace extract --config {run.folder / 'run.json'} --out {run.folder}"
        raise Problem(f"{run.folder} is not complete; `{again}` resumes it")
    original, *perturbed = [store.observations() for store in stores]
    return Views(original, perturbed[0] if perturbed and pairs else None)
