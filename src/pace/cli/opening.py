"""From ``--images``, ``--model`` and ``--device`` to images, a model and its observations; and those of a run again."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from pace.cli.errors import Problem, line_of
from pace.cli.options import FitOptions, ImageOptions, LayerOptions
from pace.cli.output import busy, say
from pace.cli.runs import DATASETS, GENERATED, Run, all_runs, located, open_run

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pace.backbones import Backbone, ModelChoice
    from pace.images import ImageSet
    from pace.model_explainer import ModelExplainer
    from pace.observations import Observations

    Views = tuple[Observations, Observations | None]  # the images as they are, and perturbed if that was asked for

CHECKPOINT = "model.safetensors"  # of a run of `pace finetune`
_ORIGINAL, _PERTURBED = "original", "perturbed"  # folders of a run of `pace extract`
_HELD_OUT = 5  # one image in five


def device_of(name: str) -> torch.device:
    with busy("starting"):  # importing torch takes seconds
        import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(1, device=name).device
    except Exception as error:
        raise Problem(f"--device {name} cannot be used; expected auto, cpu or cuda (or cuda:1, …): {error}") from None


def open_images(chosen: ImageOptions) -> ImageSet:
    from pace import images as library

    if chosen.images in DATASETS and chosen.images not in GENERATED and chosen.data_root is None:
        raise Problem(f"--images {chosen.images} needs --data-root, the folder that holds the dataset")
    on_error: Any = "skip" if chosen.skip_unreadable else "raise"
    with busy("opening the images"):
        images = library.open_images(str(chosen.images), chosen.data_root, chosen.split or "train", on_error)
    if chosen.limit is None or chosen.limit >= len(images):
        return images
    # A random sample, since the first images are often all of one class.
    drawn = np.random.default_rng(chosen.seed).permutation(len(images))[: chosen.limit]
    return images.subset(np.sort(drawn).tolist())


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
        """The probe, if there is one, and the names of the predicted classes."""
        from pace.backbones.heads import save_probe
        from pace.model_explainer import HEAD
        from pace.showing.summary import class_names

        if self.backbone.head is not None:
            save_probe(self.backbone.head, run.file(HEAD))  # type: ignore[arg-type]
        own = self.class_names if len(self.class_names or ()) == observations.n_classes else None
        run.record["model"]["class_names"] = class_names(own, images, observations.n_classes) or None


def load_model(choice: ModelChoice) -> tuple[nn.Module, Sequence[str] | None]:
    """The model and the names of its classes."""
    from pace.backbones import ModelChoice, load_finetuned, open_model

    path = Path(choice.name).expanduser()
    folder = path.parent if path.name == CHECKPOINT else path
    with busy(f"loading {choice.name}"):
        if not (folder / "run.json").is_file():
            return open_model(choice)
        if choice.normalize is not None:
            raise Problem(f"--normalize: {choice.name} was fine-tuned with its own normalisation; leave it out")
        run = open_run(str(folder), "finetune")
        base = ModelChoice(*(run.record["model"][name] for name in ("name", "architecture", "image_size")))
        if base.architecture and Path(base.name).suffix == ".safetensors":
            base = replace(base, name=base.architecture, architecture=None)  # the first weights may be gone by now
        model, _ = open_model(base, pretrained=False)
        found = load_finetuned(model, run.file(CHECKPOINT))
        return found.model, found.class_names


def _open_at_layer(choice: ModelChoice, device: torch.device, **options: Any) -> OpenedModel:
    """`options` are those of `open_backbone`."""
    from pace.backbones import open_backbone

    model, names = load_model(choice)
    backbone = open_backbone(model, choice, device, **options)
    name = str(located(str(choice.name)))
    opened = replace(choice, name=name, layer=backbone.layer, attention_layer=backbone.attention_layer)
    return OpenedModel(backbone, opened, names)


def open_images_and_model(
    images: ImageOptions, model: str, how: LayerOptions, probe: bool, device: torch.device, batch_size: int
) -> tuple[ImageSet, OpenedModel]:
    """Images first: they open quickly, so a misspelt name is found before a large model is loaded."""
    from pace.backbones import ModelChoice, choose_layer

    opened = open_images(images)
    choose = partial(choose_layer, images=opened, seed=images.seed, batch_size=batch_size, report=say)
    explained = _open_at_layer(ModelChoice(model, **asdict(how)), device, choose_layer=choose)
    if probe:
        from pace.backbones.heads import fit_probe

        explained.backbone.head = fit_probe(explained.backbone, opened, batch_size)
        explained = replace(explained, class_names=opened.class_names)
    return opened, explained


def reopen_model(run: Run, device: torch.device, moved: str | nn.Module | None = None) -> OpenedModel:
    """The model of a run, which must still be the same: explanations of another one would be meaningless.

    `moved` says where it is now, or is the model itself.
    """
    from pace.backbones import Backbone, ModelChoice
    from pace.backbones.heads import load_probe

    kept = run.record["model"]
    choice = ModelChoice(**{field.name: kept[field.name] for field in fields(ModelChoice)})
    try:
        head = load_probe(run.file(kept["head"])) if kept["head"] else None
        if not (choice.name or moved):
            raise Problem(
                f"{run.folder} was saved in Python; pace.load_run({str(run.folder)!r}, model=…) takes its model"
            )
        if moved is None or isinstance(moved, str):
            model = _open_at_layer(replace(choice, name=moved or choice.name), device, head=head)
        else:
            at = choice.layer, head, choice.count_cls, choice.attention_layer
            model = OpenedModel(Backbone(moved, *at), replace(choice, name="this model"), None)  # type: ignore[arg-type]
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
            "this model has no classifier, so there are no predictions to explain; "
            "--probe fits one on the labels, `pace finetune` trains one",
            stacklevel=3,
        )
    return observations, perturbed


@dataclass(frozen=True)
class FitRun:
    """A run of `pace fit`, and what it learned."""

    run: Run
    device: torch.device
    fitted: ModelExplainer

    @property
    def in_use(self) -> str:
        """How many concepts are in use, and in which run."""
        concepts = self.fitted.concepts
        total, empty = len(concepts.means_), len(concepts.empty_concepts_)
        return f"{total - empty} of {total} concepts in use of {self.run.folder}"

    def other_images(self, given: ImageOptions) -> ImageOptions:
        """The images given, or those of the fit; by default their test split, if they have splits."""
        from pace.images.datasets import has_splits

        own = images_of(self.run)
        if given.images is None:
            given = replace(given, images=own.images, data_root=given.data_root or own.data_root)
        split = given.split or ("test" if has_splits(given.images) else None)
        return replace(given, split=split, skip_unreadable=given.skip_unreadable or own.skip_unreadable)

    def test_images(self, choice: ImageOptions) -> tuple[ImageSet, list[int] | None]:
        """Images to score on, and which of the fit's own are left to train the regressions on (None: all).

        A folder without splits has no unseen images, so a fifth of it is held out of the regressions.
        """
        from pace.images.datasets import has_splits

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
    return FitRun(run, device, _explainer_of(run, device, options.moved))


def _explainer_of(run: Run, device: torch.device, model: str | nn.Module | None) -> ModelExplainer:
    from pace.explainer import PACE
    from pace.metrics import Scores
    from pace.model_explainer import CONCEPTS, GALLERY, ModelExplainer

    concepts = PACE.load(run.file(CONCEPTS), device=str(device))
    opened, gallery = reopen_model(run, device, model), json.loads(run.file(GALLERY).read_bytes())["images"]
    images = partial(reopen_images, run) if run.record["images"]["images"] else None
    scored = evaluations_of(run, all_runs("evaluate", run.folder.parent))
    scores = Scores.from_dict(scored[-1].record["results"]) if scored else None
    return ModelExplainer(opened.backbone, concepts, opened.class_names, gallery, images, scores, opened.choice)


def load_run(folder: str | PathLike[str], model: Any = None, device: str = "auto") -> ModelExplainer:
    """What `pace fit` or `ModelExplainer.save` wrote: model, block, head, preprocessing, concepts, class names and scores.

    `model` is where the model is, if it has moved, or the model itself, which a fit in Python needs unless it was named.
    """
    given = str(model) if isinstance(model, PathLike) else model
    return _explainer_of(open_run(str(folder), "fit"), device_of(device), given)


def evaluations_of(run: Run, runs: Sequence[Run]) -> list[Run]:
    """Those of some runs of `pace evaluate` that scored this fit, oldest first."""
    ours = str(run.folder.resolve())
    return [one for one in runs if one.record["configuration"]["fit_run"] == ours and one.record["results"]]
