"""From ``--images``, ``--model`` and ``--device`` to images, a model and its observations; and those of a run again."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from pace.cli.errors import Problem, line_of
from pace.cli.options import FitOptions, HeadOptions, ImageOptions, LayerOptions
from pace.cli.output import busy, say
from pace.cli.runs import DATASETS, GENERATED, Run, all_runs, located, open_run
from pace.files import DamagedFile, read_json

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pace.backbones import Backbone, ModelChoice
    from pace.explainer import PACE
    from pace.images import ImageSet
    from pace.observations import Observations

    Views = tuple[Observations, Observations | None]  # the images as they are, and perturbed if that was asked for

CONCEPTS, GALLERY = "concepts.safetensors", "gallery.json"  # of a run of `pace fit`
_HEAD = "head.safetensors"
_ORIGINAL, _PERTURBED = "original", "perturbed"  # folders of a run of `pace extract`
_HELD_OUT = 5  # one image in five


def device_of(name: str) -> torch.device:
    with busy("starting"):  # importing torch takes seconds
        import torch

    if name == "auto":
        return torch.device(
            "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        )
    try:
        return torch.empty(1, device=name).device
    except Exception as error:
        expected = "auto, cpu, cuda (or cuda:1, …) or mps"
        raise Problem(f"--device {name} cannot be used; expected {expected}: {error}") from None


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


def has_splits(images: str | None) -> bool:
    """Whether it is a dataset, or a folder with train/ or test/ in it."""
    folder = Path(str(images)).expanduser()
    return images in DATASETS or any((folder / split).is_dir() for split in ("train", "test"))


def image_record(chosen: ImageOptions, images: ImageSet) -> dict[str, Any]:
    """For ``run.json``: enough to open the same images again, and to notice other ones."""
    found = {"count": len(images), "fingerprint": images.fingerprint()}
    return {**asdict(chosen), "images": located(chosen.images), "data_root": located(chosen.data_root), **found}


def images_of(run: Run) -> ImageOptions:
    return ImageOptions(**{field.name: run.record["images"][field.name] for field in fields(ImageOptions)})


def reopen_images(run: Run) -> ImageSet:
    images = open_images(images_of(run))
    if images.fingerprint() != run.record["images"]["fingerprint"]:
        raise Problem(f"the images of {run.folder} have changed since; run `pace {run.record['command']}` again")
    return images


@dataclass(frozen=True)
class OpenedModel:
    """A model at its layer, with the names of its classes if they are known."""

    backbone: Backbone
    choice: ModelChoice
    class_names: Sequence[str] | None

    def record(self) -> dict[str, Any]:
        """For ``run.json``: enough to open the same model again, and to notice another one."""
        return {
            **asdict(self.choice),
            "head": None if self.backbone.head is None else _HEAD,
            "fingerprint": self.backbone.fingerprint(),
            "preprocessing": asdict(self.backbone.preprocessing),
            "class_names": self.class_names,
        }

    def save_into(self, run: Run, observations: Observations, images: ImageSet) -> None:
        """The head, if one was added, and the names of the predicted classes."""
        from pace.backbones.heads import save_head
        from pace.showing.summary import class_names

        if self.backbone.head is not None:
            save_head(self.backbone.head, run.file(_HEAD))  # type: ignore[arg-type]
        else:
            run.file(_HEAD).unlink(missing_ok=True)  # of an attempt with other options
        own = self.class_names if len(self.class_names or ()) == observations.n_classes else None
        run.record["model"]["class_names"] = class_names(own, images, observations.n_classes) or None


def load_model(choice: ModelChoice) -> tuple[nn.Module, Sequence[str] | None]:
    """The model and the names of its classes."""
    from pace.backbones import open_model

    with busy(f"loading {choice.name}"):
        return open_model(choice)


def say_what_was_recognised(choice: ModelChoice, model: Any) -> None:
    """What a file of weights is taken for, if the command does not tell: a wrong guess must be seen."""
    from pace.backbones.checkpoints import FORMATS
    from pace.backbones.libraries import describe
    from pace.backbones.preprocessing import NORMALIZATIONS

    path = Path(choice.name)
    if choice.architecture is None and path.suffix in FORMATS and not (path.parent / "run.json").is_file():
        how, noted = describe(model).preprocessing, getattr(model, "pretrained_cfg", None) or {}
        usual = next((name for name, values in NORMALIZATIONS.items() if values == (how.mean, how.std)), "its own")
        taken_for = noted.get("architecture", type(model).__name__)
        say(
            f"{path.name}: taken for {taken_for}, {how.size[0]} pixels, normalised as {usual} (--normalize says otherwise)"
        )


def _open_at_layer(choice: ModelChoice, device: torch.device, **options: Any) -> OpenedModel:
    """`options` are those of `open_backbone`."""
    from pace.backbones import open_backbone

    model, names = load_model(choice)
    backbone = open_backbone(model, choice, device, **options)
    name = str(located(str(choice.name)))
    opened = replace(choice, name=name, layer=backbone.layer, attention_layer=backbone.attention_layer)
    return OpenedModel(backbone, opened, names)


def open_images_and_model(
    images: ImageOptions, model: str, how: LayerOptions, head: HeadOptions, device: torch.device, batch_size: int
) -> tuple[ImageSet, OpenedModel]:
    """Images first: they open quickly, so a misspelt name is found before a large model is loaded."""
    from pace.backbones import ModelChoice, choose_layer

    opened = open_images(images)
    choose = partial(choose_layer, images=opened, seed=images.seed, batch_size=batch_size, report=say)
    explained = _open_at_layer(ModelChoice(model, **asdict(how)), device, choose_layer=choose)
    say_what_was_recognised(explained.choice, explained.backbone.model)
    return opened, _with_head(explained, opened, head, batch_size)


def _with_head(opened: OpenedModel, images: ImageSet, how: HeadOptions, batch_size: int) -> OpenedModel:
    from pace.backbones.heads import HEADS, fit_head, pooled_features, zero_shot_from_names

    backbone, names = opened.backbone, images.class_names
    if how.head is not None and how.classes is not None:
        raise Problem("--head and --classes each make the predictions; leave one out")
    if how.classes is not None:
        lines = Path(how.classes).expanduser().read_text(encoding="utf-8").splitlines()
        names = [line.strip() for line in lines if line.strip()]
        head = zero_shot_from_names(backbone.model, names)
    elif how.head is not None:
        if how.head not in HEADS:
            raise Problem(f"--head {how.head}: expected {', '.join(HEADS)}")
        if how.head != "clusters" and images.labels is None:  # before the images go through the model
            raise Problem(f"--head {how.head}: needs labels; expected a dataset or a folder of class folders")
        head = fit_head(how.head, pooled_features(backbone, images, batch_size), images.labels)
        if how.head == "clusters":
            names = [f"cluster {number}" for number in range(1, len(head.bias) + 1)]  # type: ignore[arg-type]
            say(f"predictions are {len(names)} clusters of the model's own features, not classes of yours")
    else:
        return opened
    backbone.head = head.to(backbone.device)
    return replace(opened, class_names=names)


def reopen_model(run: Run, device: torch.device, moved: str | None = None) -> OpenedModel:
    """The model of a run, which must still be the same: explanations of another one would be meaningless."""
    from pace.backbones import ModelChoice
    from pace.backbones.heads import load_head

    kept = run.record["model"]
    choice = ModelChoice(**{field.name: kept[field.name] for field in fields(ModelChoice)})
    try:
        head = load_head(run.file(_HEAD)) if kept["head"] else None
        model = _open_at_layer(replace(choice, name=moved or choice.name), device, head=head)
    except FileNotFoundError as error:
        raise Problem(f"{line_of(error)}; if the model of {run.folder} has moved, say where with --model") from None
    if model.backbone.fingerprint() != kept["fingerprint"]:
        other = f"{model.choice.name} is not the model that {run.folder} was made with"
        raise Problem(f"{other}: its weights, settings or architecture differ")
    return replace(model, class_names=kept["class_names"])


def observe_images(
    backbone: Backbone, images: ImageSet, pairs: bool, seed: int, batch_size: int, store: Run | None = None
) -> Views:
    """In memory, or in the folder of a run."""
    from pace.observing.extract import observe, observe_pair

    if pairs:
        folder = None if store is None else store.folder
        return _checked(*observe_pair(backbone, images, seed=seed, batch_size=batch_size, store=folder))
    folder = None if store is None else store.file(_ORIGINAL)
    return _checked(observe(backbone, images, batch_size=batch_size, store=folder))


def stream_images(backbone: Backbone, images: ImageSet, pairs: bool, seed: int, batch_size: int, keep: bool) -> Views:
    """Computed when they are needed, and again each time unless `keep`."""
    from pace.observing.streaming import stream, stream_pair

    if pairs:
        return _checked(*stream_pair(backbone, images, seed=seed, batch_size=batch_size, keep=keep))
    return _checked(stream(backbone, images, batch_size=batch_size, keep=keep))


def read_extracted(run: Run, pairs: bool) -> Views:
    """Those of a `pace extract`."""
    from pace.observing.store import ObservationStore

    stores = [ObservationStore.open(run.file(name)) for name in (_ORIGINAL, _PERTURBED) if run.file(name).is_dir()]
    if not stores or not all(store.complete for store in stores):
        again = f"pace extract --config {run.folder / 'run.json'} --out {run.folder}"
        raise Problem(f"{run.folder} is not complete; `{again}` resumes it")
    return _checked(*(store.observations() for store in (stores if pairs else stores[:1])))


def _checked(observations: Observations, perturbed: Observations | None = None) -> Views:
    if not observations.n_classes:
        warnings.warn(
            "this model has no classifier, so there are no predictions to explain; --head probe or knn makes them from "
            "labels, --head clusters from the model's own features, `pace finetune` trains a classifier",
            stacklevel=3,
        )
    return observations, perturbed


def read_gallery(run: Run, concepts: int) -> list[list[str]]:
    """For every concept the names of the images that show it best."""
    file, remedy = run.file(GALLERY), "run `pace fit` again, in another folder"
    names: list[list[str]] = read_json(file, {"images": [[str]]}, remedy)["images"]
    if len(names) != concepts or not all(names):
        raise DamagedFile(f"{file} cannot be used: it is of other concepts; {remedy}")
    return names


@dataclass(frozen=True)
class FitRun:
    run: Run
    device: torch.device
    concepts: PACE
    model: OpenedModel

    @property
    def in_use(self) -> str:
        """How many concepts are in use, and in which run."""
        total, empty = len(self.concepts.means_), len(self.concepts.empty_concepts_)
        return f"{total - empty} of {total} concepts in use of {self.run.folder}"

    def gallery(self) -> list[list[str]]:
        """For every concept the names of the images that show it best."""
        return read_gallery(self.run, len(self.concepts.means_))

    def fingerprint(self) -> str:
        """Of the concepts: scores are of these, and of no others that a folder may hold later."""
        return blake2b(self.run.file(CONCEPTS).read_bytes(), digest_size=8).hexdigest()

    def other_images(self, given: ImageOptions) -> ImageOptions:
        """The images given, or those of the fit; by default their test split, if they have splits."""
        own = images_of(self.run)
        if given.images is None:
            given = replace(given, images=own.images, data_root=given.data_root or own.data_root)
        split = given.split or ("test" if has_splits(given.images) else None)
        return replace(given, split=split, skip_unreadable=given.skip_unreadable or own.skip_unreadable)

    def test_images(self, choice: ImageOptions) -> tuple[ImageSet, list[int] | None]:
        """Images to score on, and which of the fit's own are left to train the regressions on (None: all).

        A folder without splits has no unseen images, so a fifth of it is held out of the regressions.
        """
        if choice.images != images_of(self.run).images or has_splits(choice.images):
            return open_images(choice), None
        seen = reopen_images(self.run)
        order = np.random.default_rng(choice.seed).permutation(len(seen))
        held = max(1, len(seen) // _HELD_OUT)
        warnings.warn(
            f"{choice.images} has no split 'test': {held} of its {len(seen)} images are held out of the regressions, "
            "but the concepts have seen them; --images names others",
            stacklevel=2,
        )
        chosen = np.sort(order[:held])[: choice.limit]
        return seen.subset(chosen.tolist()), np.sort(order[held:]).tolist()


def open_fit(ctx: typer.Context, options: FitOptions) -> FitRun:
    """The run that the options name, or the latest one; the record of this command then names it too."""
    device = device_of(options.device)
    from pace import PACE
    from pace.backbones.backbone import without_apple

    runs = all_runs("fit") if options.fit_run is None else [open_run(options.fit_run, "fit")]
    if not runs:
        raise Problem("no run in runs/; make one with `pace fit`, or name one with --run")
    run = runs[-1]
    results, status = run.record["results"], run.record["status"]
    if not results:
        raise Problem(f"{run.folder} has no concepts: its status is {status!r}")
    if status == "interrupted":
        warnings.warn(f"{run.folder} was stopped after {results['epochs']} epochs, before it converged", stacklevel=2)
    ctx.params["fit_run"] = str(run.folder.resolve())
    concepts = PACE.load(run.file(CONCEPTS), device=str(without_apple(device)))
    return FitRun(run, device, concepts, reopen_model(run, device, options.moved))
