"""From ``--images``, ``--model`` and ``--device`` to images and a model; and those of a run again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pace.cli.errors import Problem, line_of
from pace.cli.options import Compute, HeadOptions, ImageOptions, LayerOptions
from pace.cli.output import busy, note
from pace.cli.runs import DATASETS, GENERATED, Run, located
from pace.files import HEAD

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pace.backbones import Backbone, ModelChoice
    from pace.images import ImageSet
    from pace.observations import Observations


def device_of(name: str) -> torch.device:
    with busy("starting"):  # importing torch takes seconds
        import torch

    if name == "auto":
        from pace.backbones import usual_device

        return usual_device()
    try:
        return torch.empty(1, device=name).device
    except Exception as error:
        expected = "auto, cpu, cuda (or cuda:1, …) or mps"
        raise Problem(f"--device {name} cannot be used; expected {expected}: {error}") from None


# Images.


def open_images(chosen: ImageOptions) -> ImageSet:
    from pace import images as library

    if chosen.images in DATASETS and chosen.images not in GENERATED and chosen.data_root is None:
        raise Problem(f"--images {chosen.images} needs --data-root, the folder that holds the dataset")
    allow(chosen.max_pixels)
    on_error: Any = "skip" if chosen.skip_unreadable else "raise"
    with busy("opening the images"):
        images = library.open_images(str(chosen.images), chosen.data_root, chosen.split or "train", on_error)
    if chosen.limit is None or chosen.limit >= len(images):
        return images
    # A random sample, since the first images are often all of one class.
    drawn = np.random.default_rng(chosen.seed).permutation(len(images))[: chosen.limit]
    return images.subset(np.sort(drawn).tolist())


def allow(max_pixels: int | None) -> None:
    if max_pixels is not None:
        from PIL import Image

        Image.MAX_IMAGE_PIXELS = max_pixels


def image_record(chosen: ImageOptions, images: ImageSet) -> dict[str, Any]:
    """For ``run.json``: enough to open the same images again, and to notice other ones."""
    found = {"count": len(images), "fingerprint": images.fingerprint()}
    return {**asdict(chosen), "images": located(chosen.images), "data_root": located(chosen.data_root), **found}


def images_of(run: Run) -> ImageOptions:
    return ImageOptions(**{field.name: run.record["images"][field.name] for field in fields(ImageOptions)})


def reopen_images(run: Run) -> ImageSet:
    if run.record["images"]["images"] is None:
        raise Problem(f"the images of {run.folder} were given in Python; they cannot be opened again")
    images = open_images(images_of(run))
    if images.fingerprint() != run.record["images"]["fingerprint"]:
        raise Problem(f"the images of {run.folder} have changed since; run `pace {run.record['command']}` again")
    return images


# Models.


def load_model(choice: ModelChoice) -> tuple[nn.Module, Sequence[str] | None]:
    """The model and the names of its classes, if they are known."""
    from pace.backbones import open_model

    with busy(f"loading {choice.name}"):
        return open_model(choice)


def say_how_it_is_used(choice: ModelChoice, model: Any) -> None:
    """How large images are, and what a file of weights is taken for if nobody tells: a wrong guess must be seen."""
    from pace.backbones.find import describe
    from pace.backbones.preprocessing import NORMALIZATIONS
    from pace.backbones.weight_files import FORMATS

    path, how = Path(choice.name), describe(model).preprocessing
    line = f"images are taken at {how.size[0]} x {how.size[1]} pixels"
    if choice.architecture is None and path.suffix in FORMATS and not (path.parent / "run.json").is_file():
        noted = getattr(model, "pretrained_cfg", None) or {}
        usual = next((name for name, values in NORMALIZATIONS.items() if values == (how.mean, how.std)), "its own")
        taken_for = noted.get("architecture", type(model).__name__)
        line = f"taken for {taken_for}; {line} and normalised as {usual} (--normalize says otherwise)"
    note(f"{path.name}: {line}")


def weights_of(model: Any) -> str:
    """For ``run.json``, before the block is chosen: changes with the weights and the architecture."""
    from pace.backbones.fingerprint import fingerprint

    return fingerprint(getattr(model, "model", model))


@dataclass(frozen=True)
class Job:
    """Images to observe and the model to do it, as the options ask for them."""

    options: ImageOptions
    images: ImageSet
    choice: ModelChoice
    model: nn.Module
    class_names: Sequence[str] | None
    head: HeadOptions
    device: torch.device
    batch_size: int

    def about(self) -> dict[str, Any]:
        """For ``run.json``: what the results depend on."""
        return {"images": image_record(self.options, self.images), "weights": weights_of(self.model)}


def open_job(
    images: ImageOptions, model: str, layer: LayerOptions, head: HeadOptions, compute: Compute, device: torch.device
) -> Job:
    from pace.backbones import ModelChoice

    opened, choice = open_images(images), ModelChoice(model, **asdict(layer))
    network, names = load_model(choice)
    say_how_it_is_used(choice, network)
    return Job(images, opened, choice, network, names, head, device, compute.batch_size)


@dataclass(frozen=True)
class OpenedModel:
    """A model at its layer, with the names of its classes if they are known."""

    backbone: Backbone
    choice: ModelChoice
    class_names: Sequence[str] | None

    def record(self) -> dict[str, Any]:
        """For ``run.json``: enough to open the same model again, and to notice another one."""
        from pace.model_explainer import model_record

        return model_record(self.backbone, self.choice) | {"class_names": self.class_names}

    def save_into(self, run: Run, observations: Observations, images: ImageSet) -> None:
        """The head, if one was added, and the names of the predicted classes."""
        from pace.backbones.heads import save_head
        from pace.showing.summary import class_names

        if self.backbone.head is not None:
            save_head(self.backbone.head, run.file(HEAD))  # type: ignore[arg-type]
        else:
            run.file(HEAD).unlink(missing_ok=True)  # of an attempt with other options
        own = self.class_names if len(self.class_names or ()) == observations.n_classes else None
        run.record["model"] = self.record()
        run.record["model"]["class_names"] = class_names(own, images, observations.n_classes) or None


def at_layer(
    choice: ModelChoice, model: nn.Module, class_names: Sequence[str] | None, device: torch.device, **options: Any
) -> OpenedModel:
    """`options` are those of `open_backbone`."""
    from pace.backbones import open_backbone

    backbone = open_backbone(model, choice, device, **options)
    name = str(located(str(choice.name)))
    found = replace(choice, name=name, layer=backbone.place, attention_layer=backbone.attention_layer)
    return OpenedModel(backbone, found, class_names)


def reopen_model(run: Run, device: torch.device, moved: str | nn.Module | None = None) -> OpenedModel:
    """The model of a run, which must still be the same: explanations of another one would be meaningless.

    `moved` says where it is now, or is the model itself.
    """
    from pace.backbones import Backbone, ModelChoice
    from pace.backbones.heads import load_head

    kept = run.record["model"]
    choice = ModelChoice(**{field.name: kept[field.name] for field in fields(ModelChoice)})
    try:
        head = load_head(run.file(HEAD)) if kept["head"] else None
        if not (choice.name or moved):
            raise Problem(
                f"{run.folder} was saved in Python; pace.load_run({str(run.folder)!r}, model=…) takes its model"
            )
        if moved is None or isinstance(moved, str):
            choice = replace(choice, name=moved or choice.name)
            model = at_layer(choice, *load_model(choice), device, head=head)
        else:
            at = choice.layer, head, choice.count_cls, choice.attention_layer
            model = OpenedModel(Backbone(moved, *at), replace(choice, name="this model"), None)  # type: ignore[arg-type]
    except FileNotFoundError as error:
        raise Problem(f"{line_of(error)}; if the model of {run.folder} has moved, say where with --model") from None
    if model.backbone.fingerprint() != kept["fingerprint"]:
        other = f"{model.choice.name} is not the model that {run.folder} was made with"
        raise Problem(f"{other}: its weights, settings or architecture differ")
    return replace(model, class_names=kept["class_names"])
