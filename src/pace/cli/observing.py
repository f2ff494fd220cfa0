"""What commands do before their own work: open images and model, and let the one look at the other."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pace.cli.errors import Problem
from pace.cli.models import ModelChoice, Subject, fit_probe, open_subject
from pace.cli.output import busy, say
from pace.cli.pictures import ImageChoice
from pace.cli.runs import Run

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pace.images import ImageSet
    from pace.observations import Observations

ORIGINAL, PERTURBED = "original", "perturbed"  # folders of a run of `pace extract`


@dataclass(frozen=True)
class Views:
    """A set of images as a model sees it, and perturbed if that was asked for."""

    observations: Observations
    perturbed: Observations | None


def open_both(
    images: ImageChoice, model: ModelChoice, device: torch.device, probe: bool, batch_size: int
) -> tuple[Subject, ImageSet]:
    """Images first: they are quick to open, so a misspelt name is found before a large model is loaded."""
    with busy("opening the images"):
        opened = images.open()

    why: list[str] = []

    def choose(network: nn.Module) -> int:
        from pace.backbones import Backbone, choose_layer

        if len(opened) < 2:
            last = Backbone(network).layer
            why.append(f"block {last}: a single image, nothing to compare")
            return last
        return choose_layer(network, opened, seed=images.seed, batch_size=batch_size, report=why.append)

    subject = open_subject(model, device, choose)
    if model.layer == "auto" or subject.backbone.layer < subject.backbone.layers - 1:  # that it is the last is no news
        for line in why:
            say(line)
    if probe:
        subject.backbone.head = fit_probe(subject.backbone, opened, batch_size)
        subject = replace(subject, class_names=tuple(opened.class_names or ()) or None)
    return subject, opened


def look(
    subject: Subject, images: ImageSet, *, pairs: bool, seed: int, batch_size: int, store: Run | None = None
) -> Views:
    """Observe the images, in memory or in the folder of a run."""
    from pace.observing.extract import observe, observe_pair

    if pairs:
        folder = None if store is None else store.folder
        views = Views(*observe_pair(subject.backbone, images, seed=seed, batch_size=batch_size, store=folder))
    else:
        folder = None if store is None else store.file(ORIGINAL)
        views = Views(observe(subject.backbone, images, batch_size=batch_size, store=folder), None)
    return _with_predictions(views)


def look_later(subject: Subject, images: ImageSet, *, pairs: bool, seed: int, batch_size: int, keep: bool) -> Views:
    """Observe the images when they are needed, again and again unless `keep` keeps what was seen."""
    from pace.observing.streaming import stream, stream_pair

    if pairs:
        views = Views(*stream_pair(subject.backbone, images, seed=seed, batch_size=batch_size, keep=keep))
    else:
        views = Views(stream(subject.backbone, images, batch_size=batch_size, keep=keep), None)
    return _with_predictions(views)


def _with_predictions(views: Views) -> Views:
    if not views.observations.n_classes:
        warnings.warn(
            "this model has no classifier, so there are no predictions to be faithful to; "
            "--probe fits one on the labels, `pace finetune` trains one",
            stacklevel=3,
        )
    return views


def stored(run: Run) -> Views:
    """The observations that `pace extract` kept."""
    from pace.observing.store import ObservationStore

    stores = [ObservationStore.open(run.file(name)) for name in (ORIGINAL, PERTURBED) if run.file(name).is_dir()]
    if not stores or not all(store.complete for store in stores):
        again = f"pace extract --config {run.folder / 'run.json'} --out {run.folder}"
        raise Problem(f"{run.folder} is not extracted to the end; `{again}` goes on with it")
    observations = [store.observations() for store in stores]
    return Views(observations[0], observations[1] if len(observations) == 2 else None)
