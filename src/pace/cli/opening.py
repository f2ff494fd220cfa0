"""From ``--images``, ``--model`` and ``--device`` to images, a model and its observations; and those of a run again."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from pace import files
from pace.atomic import write_atomically
from pace.cli.errors import Problem, line_of
from pace.cli.options import FitOptions, HeadOptions, ImageOptions
from pace.cli.output import busy, note, say
from pace.cli.runs import DATASETS, GENERATED, Run, all_runs, located, open_run
from pace.editing import Edits, merges_in, read_changes
from pace.files import CONCEPTS, GALLERY, HEAD, DamagedFile, read_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from pace.backbones import Backbone, ModelChoice
    from pace.images import ByName, ImageSet
    from pace.model_explainer import ModelExplainer
    from pace.observations import Observations
    from pace.observing import ObservationStore

    Loaded = tuple[nn.Module, Sequence[str] | None]  # a model and the names of its classes
    Views = tuple[Observations, Observations | None]  # the images as they are, and perturbed if that was asked for

_SEEN = "seen.json"  # which images a run kept observations of
_ROOM = 16 << 30  # bytes of observations in main memory
_HELD_OUT = 5  # one image in five


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


def weights_of(model: Any) -> str:
    """For ``run.json``, before the block is chosen: changes with the weights and the architecture."""
    from pace.backbones.fingerprint import fingerprint

    return fingerprint(getattr(model, "model", model))


def load_model(choice: ModelChoice) -> Loaded:
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


def _open_at_layer(
    choice: ModelChoice, device: torch.device, loaded: Loaded | None = None, **options: Any
) -> OpenedModel:
    """`options` are those of `open_backbone`."""
    from pace.backbones import open_backbone
    from pace.backbones.libraries import describe

    model, names = load_model(choice) if loaded is None else loaded
    height, width = describe(model).preprocessing.size
    note(f"{Path(choice.name).name}: images are taken at {height} x {width} pixels")
    backbone = open_backbone(model, choice, device, **options)
    name = str(located(str(choice.name)))
    opened = replace(choice, name=name, layer=backbone.layer, attention_layer=backbone.attention_layer)
    return OpenedModel(backbone, opened, names)


def _known_head(how: HeadOptions, images: ImageSet, model: nn.Module) -> tuple[nn.Module | None, Sequence[str]] | None:
    """The head that needs no features, or none, and the names of the classes that were given.

    Says what cannot be, before the images go through the model.
    """
    from pace.backbones.heads import HEADS, zero_shot_from_names
    from pace.backbones.libraries import describe

    if how.head is not None and how.classes is not None:
        raise Problem("--head and --classes each make the predictions; leave one out")
    if how.head is not None and how.head not in HEADS:
        raise Problem(f"--head {how.head}: expected {', '.join(HEADS)}")
    if how.head not in (None, "clusters") and images.labels is None:
        raise Problem(f"--head {how.head}: needs labels; expected a dataset or a folder of class folders")
    if how.classes is None:
        return None
    lines = Path(how.classes).expanduser().read_text(encoding="utf-8").splitlines()
    names = [line.strip() for line in lines if line.strip()]
    if not (own := getattr(describe(model), "classifiers", ())):
        return zero_shot_from_names(model, names), names
    if (expected := getattr(own[-1], "out_features", len(names))) != len(names):
        raise Problem(f"--classes {how.classes}: the model predicts {expected} classes; found {len(names)} names")
    return None, names


def _fitted_head(how: HeadOptions, images: ImageSet, features: Tensor) -> tuple[nn.Module, Sequence[str] | None]:
    from pace.backbones.heads import fit_head

    with busy("fitting the head"):
        head = fit_head(str(how.head), features, images.labels)
    if how.head != "clusters":
        return head, images.class_names
    names = [f"cluster {number}" for number in range(1, len(head.bias) + 1)]  # type: ignore[arg-type]
    say(f"predictions are {len(names)} clusters of the model's own features, not classes of yours")
    return head, names


def _with_head(opened: OpenedModel, found: tuple[nn.Module | None, Sequence[str] | None]) -> OpenedModel:
    if found[0] is not None:
        opened.backbone.head = found[0].to(opened.backbone.device)
    return replace(opened, class_names=found[1])


def open_streamed(
    images: ImageOptions,
    opened: ImageSet,
    choice: ModelChoice,
    loaded: Loaded,
    how: HeadOptions,
    device: torch.device,
    batch_size: int,
) -> OpenedModel:
    """For sets that are not kept: the block is chosen and the head fitted in passes of their own."""
    from pace.backbones import choose_layer
    from pace.backbones.heads import pooled_features

    head: tuple[nn.Module | None, Sequence[str] | None] | None = _known_head(how, opened, loaded[0])
    choose = partial(choose_layer, images=opened, seed=images.seed, batch_size=batch_size, report=note)
    explained = _open_at_layer(choice, device, loaded, choose_layer=choose)
    say_what_was_recognised(explained.choice, explained.backbone.model)
    if how.head is not None:
        head = _fitted_head(how, opened, pooled_features(explained.backbone, opened, batch_size))
    return explained if head is None else _with_head(explained, head)


def observe_once(
    run: Run,
    images: ImageOptions,
    opened: ImageSet,
    choice: ModelChoice,
    loaded: Loaded,
    how: HeadOptions,
    pairs: bool,
    device: torch.device,
    batch_size: int,
) -> tuple[OpenedModel, Views]:
    """Decode every image once and run the model once on it and its perturbed view, into the run's folder.

    The block is chosen and the head is fitted by what is seen in that one pass.
    """
    import torch

    from pace.backbones.backbone import without_apple
    from pace.backbones.heads import save_head
    from pace.backbones.layers import Blocks, look_for_layer
    from pace.observing.extract import observe_into

    named, pooled = _known_head(how, opened, loaded[0]), how.head is not None
    known = None

    def choose(model: nn.Module) -> int:
        nonlocal known
        head = None if named is None or named[0] is None else named[0].to(device)
        told: Any = {"report": note, "count_cls": choice.count_cls, "head": head, "pooled": pooled}
        layer, known = look_for_layer(model, opened, images.seed, batch_size, **told)
        return layer

    explained = _open_at_layer(choice, device, loaded, choose_layer=choose)
    say_what_was_recognised(explained.choice, explained.backbone.model)
    explained = explained if named is None else _with_head(explained, named)
    backbone = explained.backbone
    watched: Any = Blocks(backbone, pooled=True) if pooled else backbone
    perturb = _perturbation(images.seed, opened) if pairs else None
    seen, *_ = observe_into(run.folder, watched, opened, perturb, batch_size, known)
    write_atomically(run.file(_SEEN), json.dumps(opened.keys()).encode())
    if pooled:
        features = torch.from_numpy(np.asarray(seen.predictions)).to(without_apple(device))
        explained = _with_head(explained, _fitted_head(how, opened, features))
        save_head(backbone.head, run.file(HEAD))  # type: ignore[arg-type]
    run.record["model"] = explained.record()
    run.save()  # further fits may use it, whatever becomes of this one
    return explained, kept_views(run, pairs)


def _perturbation(seed: int, images: ImageSet) -> ByName:
    from pace.images import ByName, Perturbation

    return ByName(Perturbation(seed), images.names)


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


def stream_images(backbone: Backbone, images: ImageSet, pairs: bool, seed: int, batch_size: int, keep: bool) -> Views:
    """Computed when they are needed, and again each time unless `keep`."""
    from pace.observing.streaming import stream, stream_pair

    if pairs:
        perturb = _perturbation(seed, images)
        return _checked(*stream_pair(backbone, images, perturb=perturb, batch_size=batch_size, keep=keep))
    return _checked(stream(backbone, images, batch_size=batch_size, keep=keep))


def source_of(run: Run) -> Run:
    """The run that observed the images a fit learned from: itself, or the one named with --observations."""
    given = run.record["configuration"].get("observations")
    return run if given is None else source_of(open_run(given, "fit", "extract"))


def _stores(run: Run) -> list[ObservationStore]:
    """Of the images as they are and perturbed, as far as they were kept."""
    from pace.observing.extract import ORIGINAL, PERTURBED
    from pace.observing.store import ObservationStore

    return [ObservationStore.open(run.file(name)) for name in (ORIGINAL, PERTURBED) if run.file(name).is_dir()]


def kept_views(run: Run, pairs: bool) -> Views:
    """The observations that a run kept."""
    from pace.backbones.heads import load_head

    stores = _stores(run)
    if not stores or not all(store.complete for store in stores):
        again = f"pace {run.record['command']} --config {run.folder / 'run.json'} --out {run.folder}"
        raise Problem(f"{run.folder} has no complete observations; `{again}` makes them")
    head = load_head(run.file(HEAD)) if run.file(HEAD).is_file() else None
    return _checked(*(store.observations(head) for store in (stores if pairs else stores[:1])))


def _seen(run: Run) -> list[str]:
    keys: list[str] = read_json(run.file(_SEEN), [str], "delete it, and the images are observed again")
    return keys


def has_kept(run: Run) -> bool:
    return run.file(_SEEN).is_file()


def kept_bytes(run: Run) -> int:
    from pace.observing.extract import ORIGINAL, PERTURBED

    return sum(file.stat().st_size for name in (ORIGINAL, PERTURBED) for file in run.file(name).glob("*"))


def discard(run: Run) -> None:
    """Delete the observations that a run kept."""
    from pace.observing.extract import ORIGINAL, PERTURBED

    run.file(_SEEN).unlink(missing_ok=True)
    for name in (ORIGINAL, PERTURBED):
        shutil.rmtree(run.file(name), ignore_errors=True)


def in_memory(views: Views, device: torch.device) -> Views:
    """On a GPU if it has room for them, else in main memory, else on disk as they are."""
    from pace.observing.extract import gathered

    where = _with_room_for([view for view in views if view is not None], device)
    if where is None:
        return views
    first, second = (None if view is None else gathered([(slice(None), view)], where) for view in views)
    assert first is not None
    return first, second


def _with_room_for(seen: Sequence[Observations], device: torch.device) -> str | torch.device | None:
    """The GPU, main memory or neither."""
    import torch

    from pace.model.feeding import bytes_per_image

    size = sum(len(some) * bytes_per_image(some) for some in seen)
    if device.type == "cuda" and size < torch.cuda.mem_get_info(device)[0] / 2:
        return device
    return "cpu" if 2 * size < _ROOM else None  # in float32


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


def _same_views(run: Run, seed: int, pairs: bool) -> bool:
    """Whether a run's images were perturbed as they would be now, if that matters."""
    from pace.images import ByName, Perturbation

    wanted = ByName(Perturbation(seed), ()).fingerprint()
    return not pairs or any(store.fingerprint["perturbation"] == wanted for store in _stores(run))


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
        hidden = sum(name.hidden for name in concepts.names_)
        return f"{total - empty} of {total} concepts in use of {self.run.folder}" + (
            f", {hidden} hidden" if hidden else ""
        )

    def observe(
        self,
        images: ImageSet,
        pairs: bool,
        run: Run,
        seed: int = 0,
        batch_size: int = 64,
        others: Sequence[Run] = (),
        near: bool = False,
    ) -> Views:
        """Observations of the images: what this fit or the other runs kept is read, the rest is observed, into `run`.

        They are in main memory, or with `near` on the GPU if there is one with room.
        """
        from pace.observing.extract import gathered, observe_into

        keys = images.keys()
        left = dict(zip(keys, range(len(images)), strict=True))
        parts: list[tuple[list[int], Sequence[Any]]] = []
        for other in (source_of(self.run), *others):
            if not has_kept(other) or not _same_views(other, seed, pairs):
                continue
            rows = {key: row for row, key in enumerate(_seen(other)) if key in left}
            if rows:
                views = kept_views(other, pairs)
                parts.append(([left.pop(key) for key in rows], [view and view[list(rows.values())] for view in views]))
        if left:
            unseen = images.subset(left.values())
            perturb = _perturbation(seed, unseen) if pairs else None
            fresh = observe_into(run.folder, self.fitted.backbone, unseen, perturb, batch_size)
            parts.append((list(left.values()), fresh))
            write_atomically(run.file(_SEEN), json.dumps(list(left)).encode())
        if len(left) < len(images):
            note(f"{len(images) - len(left)} of {len(images)} images were seen before")
        where = (
            _with_room_for([view for _, views in parts for view in views if view is not None], self.device)
            if near
            else None
        )
        return _checked(*(gathered([(rows, views[n]) for rows, views in parts], where) for n in range(1 + pairs)))

    def evaluations(self, given: str | None = None) -> list[Run]:
        """The runs of `pace evaluate` of this fit in runs/, or the one given if it is of this fit."""
        runs = all_runs("evaluate") if given is None else [open_run(given, "evaluate")]
        return evaluations_of(self.run, runs)

    def fingerprint(self) -> str:
        return fingerprint_of(self.run)

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


def chosen_run(given: str | None) -> Run:
    """The run of `pace fit` with this folder, or the latest one."""
    runs = all_runs("fit") if given is None else [open_run(given, "fit")]
    if not runs:
        raise Problem("no run in runs/; make one with `pace fit`, or name one with --run")
    return runs[-1]


def open_fit(ctx: typer.Context, options: FitOptions) -> FitRun:
    """The run that the options name, or the latest one; the record of this command then names it too."""
    device = device_of(options.device)
    run = chosen_run(options.fit_run)
    results, status = run.record["results"], run.record["status"]
    if not results:
        raise Problem(f"{run.folder} has no concepts: its status is {status!r}")
    if status == "interrupted":
        warnings.warn(f"{run.folder} was stopped after {results['epochs']} epochs, before it converged", stacklevel=2)
    ctx.params["fit_run"] = str(run.folder.resolve())
    return FitRun(run, device, _explainer_of(run, device, options.moved))


def _explainer_of(run: Run, device: torch.device, model: str | nn.Module | None) -> ModelExplainer:
    from pace.backbones.backbone import without_apple
    from pace.explainer import PACE
    from pace.metrics import Scores
    from pace.model_explainer import ModelExplainer

    concepts = PACE.load(run.file(CONCEPTS), device=str(without_apple(device)))
    edits = Edits(concepts.names_, run.folder)
    opened, gallery = reopen_model(run, device, model), read_gallery(run, len(concepts.means_))
    images = partial(reopen_images, run) if run.record["images"]["images"] else None
    ours = fingerprint_of(run)
    scored = [one for one in evaluations_of(run, all_runs("evaluate", run.folder.parent)) if one.record["fit"] == ours]
    scores = Scores.from_dict(scored[-1].record["results"]) if scored else None
    known = opened.class_names, gallery, images, scores, opened.choice
    return ModelExplainer(opened.backbone, concepts, *known, edits=edits)


def load_run(folder: str | PathLike[str], model: Any = None, device: str = "auto") -> ModelExplainer:
    """What `pace fit` or `ModelExplainer.save` wrote: model, block, head, preprocessing, concepts, class names and scores.

    `model` is where the model is, if it has moved, or the model itself, which a fit in Python needs unless it was named.
    """
    given = str(model) if isinstance(model, PathLike) else model
    return _explainer_of(open_run(str(folder), "fit"), device_of(device), given)


def fingerprint_of(run: Run) -> str:
    """Of the concepts and what was merged: scores are of these, and of no others that a folder may hold later."""
    own, merges = files.fingerprint_of(run.file(CONCEPTS)), merges_in(read_changes(run.folder))
    return blake2b(f"{own} {merges}".encode(), digest_size=8).hexdigest() if merges else own


def evaluations_of(run: Run, runs: Sequence[Run]) -> list[Run]:
    """Those of some runs of `pace evaluate` that scored the fit in this folder, oldest first."""
    ours = str(run.folder.resolve())
    return [one for one in runs if one.record["configuration"]["fit_run"] == ours and one.record["results"]]
