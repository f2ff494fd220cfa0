"""What a model saw: observed once into a run's folder, kept there, and read again by later commands."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pace.atomic import write_atomically
from pace.cli.errors import Problem
from pace.cli.opening import Job, OpenedModel, at_layer
from pace.cli.output import busy, note, say
from pace.cli.runs import Run, open_run
from pace.files import HEAD, read_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from pace.backbones import Backbone
    from pace.images import ByName, ImageSet
    from pace.observations import Observations
    from pace.observing import ObservationStore

    Views = tuple[Observations, Observations | None]  # the images as they are, and perturbed if that was asked for
    Head = tuple[nn.Module | None, Sequence[str] | None]  # one to add, or none, and the names of its classes

_SEEN = "seen.json"  # which images a run kept observations of
_ROOM = 16 << 30  # bytes of observations in main memory


def observe_once(run: Run, job: Job, pairs: bool) -> tuple[OpenedModel, Views]:
    """Decode every image once and run the model once on it and its perturbed view, into the run's folder.

    The block is chosen and the head is fitted by what is seen in that one pass.
    """
    import torch

    from pace.backbones.backbone import without_apple
    from pace.backbones.heads import save_head
    from pace.backbones.layers import Blocks, look_for_layer
    from pace.observing.extract import observe_into

    named, pooled = _head_by_names(job), job.head.head is not None
    seed, known = job.options.seed, None

    def choose(model: nn.Module) -> int | tuple[int, int]:
        nonlocal known
        head = None if named is None or named[0] is None else named[0].to(job.device)
        told: Any = {"report": note, "count_cls": job.choice.count_cls, "head": head, "pooled": pooled}
        layer, known = look_for_layer(model, job.images, seed, job.batch_size, **told)
        return layer

    explained = at_layer(job.choice, job.model, job.class_names, job.device, choose_layer=choose)
    explained = explained if named is None else _with_head(explained, named)
    backbone = explained.backbone
    watched: Any = Blocks(backbone, pooled=True) if pooled else backbone
    perturb = _perturbation(seed, job.images) if pairs else None
    seen, *_ = observe_into(run.folder, watched, job.images, perturb, job.batch_size, known)
    write_atomically(run.file(_SEEN), json.dumps(job.images.keys()).encode())
    if pooled:
        features = torch.from_numpy(np.asarray(seen.predictions)).to(without_apple(job.device))
        explained = _with_head(explained, _fitted_head(job, features))
        save_head(backbone.head, run.file(HEAD))  # type: ignore[arg-type]
    run.record["model"] = explained.record()
    run.save()  # further fits may use it, whatever becomes of this one
    return explained, kept_views(run, pairs)


def _perturbation(seed: int, images: ImageSet) -> ByName:
    from pace.images import ByName, Perturbation

    return ByName(Perturbation(seed), images.names)


# Of sets that are not kept.


def open_streamed(job: Job) -> OpenedModel:
    """The block is chosen and the head fitted in passes of their own."""
    from pace.backbones import choose_layer
    from pace.backbones.heads import pooled_features

    head = _head_by_names(job)
    choose = partial(choose_layer, images=job.images, seed=job.options.seed, batch_size=job.batch_size, report=note)
    explained = at_layer(job.choice, job.model, job.class_names, job.device, choose_layer=choose)
    if job.head.head is not None:
        head = _fitted_head(job, pooled_features(explained.backbone, job.images, job.batch_size))
    return explained if head is None else _with_head(explained, head)


def stream_images(backbone: Backbone, images: ImageSet, pairs: bool, seed: int, batch_size: int, keep: bool) -> Views:
    """Computed when they are needed, and again each time unless `keep`."""
    from pace.observing.streaming import stream, stream_pair

    if pairs:
        perturb = _perturbation(seed, images)
        return _checked(*stream_pair(backbone, images, perturb=perturb, batch_size=batch_size, keep=keep))
    return _checked(stream(backbone, images, batch_size=batch_size, keep=keep))


# Predictions: --head and --classes.


def _head_by_names(job: Job) -> Head | None:
    """What --classes asks for; says what cannot be, before the images go through the model."""
    from pace.backbones.find import describe
    from pace.backbones.heads import HEADS, zero_shot_from_names

    how = job.head
    if how.head is not None and how.classes is not None:
        raise Problem("--head and --classes each make the predictions; leave one out")
    if how.head is not None and how.head not in HEADS:
        raise Problem(f"--head {how.head}: expected {', '.join(HEADS)}")
    if how.head not in (None, "clusters") and job.images.labels is None:
        raise Problem(f"--head {how.head}: needs labels; expected a dataset or a folder of class folders")
    if how.classes is None:
        return None
    try:
        lines = Path(how.classes).expanduser().read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise Problem(f"--classes {how.classes}: expected a text in UTF-8, a name in each line") from None
    names = [line.strip() for line in lines if line.strip()]
    if not (own := getattr(describe(job.model), "classifiers", ())):
        return zero_shot_from_names(job.model, names), names
    if (expected := getattr(own[-1], "out_features", len(names))) != len(names):
        raise Problem(f"--classes {how.classes}: the model predicts {expected} classes; found {len(names)} names")
    return None, names


def _fitted_head(job: Job, features: Tensor) -> Head:
    from pace.backbones.heads import fit_head, named_by

    kind = str(job.head.head)
    with busy("fitting the head"):
        head = fit_head(kind, features, job.images.labels)
    names = named_by(kind, head, job.images.class_names)
    if kind == "clusters":
        say(f"predictions are {len(names or ())} clusters of the model's own features, not classes of yours")
    return head, names


def _with_head(opened: OpenedModel, found: Head) -> OpenedModel:
    if found[0] is not None:
        opened.backbone.head = found[0].to(opened.backbone.device)
    return replace(opened, class_names=found[1])


# What a run kept.


def source_of(run: Run) -> Run:
    """The run that observed the images a fit learned from: itself, or the one named with --observations."""
    given = run.record["configuration"].get("observations")
    return run if given is None else source_of(open_run(given, "fit", "extract"))


def has_kept(run: Run) -> bool:
    return run.file(_SEEN).is_file()


def kept_views(run: Run, pairs: bool) -> Views:
    """The observations that a run kept."""
    from pace.backbones.heads import load_head

    stores = _stores(run)
    if not stores or not all(store.complete for store in stores):
        again = f"pace {run.record['command']} --config {run.folder / 'run.json'} --out {run.folder}"
        raise Problem(f"{run.folder} has no complete observations; `{again}` makes them")
    head = load_head(run.file(HEAD)) if run.file(HEAD).is_file() else None
    return _checked(*(store.observations(head) for store in (stores if pairs else stores[:1])))


def kept_bytes(run: Run) -> int:
    return sum(file.stat().st_size for folder in _folders(run) for file in folder.glob("*"))


def discard(run: Run) -> None:
    """Delete the observations that a run kept."""
    run.file(_SEEN).unlink(missing_ok=True)
    for folder in _folders(run):
        shutil.rmtree(folder, ignore_errors=True)


def _folders(run: Run) -> list[Path]:
    """Of the images as they are and perturbed, as far as they were kept."""
    from pace.observing.extract import ORIGINAL, PERTURBED

    return [run.file(name) for name in (ORIGINAL, PERTURBED) if run.file(name).is_dir()]


def _stores(run: Run) -> list[ObservationStore]:
    from pace.observing.store import ObservationStore

    return [ObservationStore.open(folder) for folder in _folders(run)]


def observe_what_is_new(
    backbone: Backbone,
    images: ImageSet,
    pairs: bool,
    run: Run,
    *,
    kept_by: Sequence[Run],
    seed: int,
    batch_size: int,
    near: torch.device | None = None,
) -> Views:
    """Observations of the images: what other runs kept is read, the rest is observed, into `run`.

    They are in main memory, or on the device `near` if that is a GPU with room.
    """
    from pace.observing.extract import gathered, observe_into

    left = dict(zip(images.keys(), range(len(images)), strict=True))
    parts: list[tuple[list[int], Sequence[Any]]] = []
    for other in kept_by:
        if not has_kept(other) or not _same_views(other, seed, pairs):
            continue
        keys: list[str] = read_json(other.file(_SEEN), [str], "delete it, and the images are observed again")
        rows = {key: row for row, key in enumerate(keys) if key in left}
        if rows:
            views = kept_views(other, pairs)
            parts.append(([left.pop(key) for key in rows], [view and view[list(rows.values())] for view in views]))
    if left:
        unseen = images.subset(left.values())
        perturb = _perturbation(seed, unseen) if pairs else None
        fresh = observe_into(run.folder, backbone, unseen, perturb, batch_size)
        parts.append((list(left.values()), fresh))
        write_atomically(run.file(_SEEN), json.dumps(list(left)).encode())
    if len(left) < len(images):
        note(f"{len(images) - len(left)} of {len(images)} images were seen before")
    where = near and _with_room_for([view for _, views in parts for view in views if view is not None], near)
    return _checked(*(gathered([(rows, views[n]) for rows, views in parts], where) for n in range(1 + pairs)))


def _same_views(run: Run, seed: int, pairs: bool) -> bool:
    """Whether a run's images were perturbed as they would be now, if that matters."""
    from pace.images import ByName, Perturbation

    wanted = ByName(Perturbation(seed), ()).fingerprint()
    return not pairs or any(store.fingerprint.get("perturbation") == wanted for store in _stores(run))


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
