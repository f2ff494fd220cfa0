"""`pace fit`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from pace.atomic import write_atomically
from pace.cli import options
from pace.cli.errors import Problem
from pace.cli.fit_runs import CONCEPTS, GALLERY
from pace.cli.images import ImageChoice
from pace.cli.models import OpenedModel, reopen_model
from pace.cli.observing import Views, observe_images, open_images_and_model, read_extracted, stream_images
from pace.cli.output import busy, plain, say, table
from pace.cli.processes import Process, joined_processes
from pace.cli.runs import Run, open_run, running

if TYPE_CHECKING:
    from pace.explainer import PACE
    from pace.images import ImageSet
    from pace.model.selecting import Selection
    from pace.observations import Observations

_SHOWN = 10  # concepts in the table
_CHECKPOINT = "checkpoint"  # folder in an unfinished run
_GALLERY_SIZE = 6  # images per concept
_GALLERY_SAMPLE = 4096  # images to choose them from, if these have to be observed again


def fit(
    ctx: typer.Context,
    *,
    images: options.ImageOptions,
    model: options.MaybeModel = None,
    how: options.LayerOptions,
    probe: options.Probe = False,
    pairs: options.Pairs = True,
    observations: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Folder of a `pace extract`, instead of --images and --model."),
    ] = None,
    estimator: options.EstimatorOptions,
    compute: options.Compute,
    checkpoint_every: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="How often to save progress, with --out; the same command resumes from there.",
        ),
    ] = 60.0,
) -> dict[str, Any]:
    """Learn the concepts that a model uses for images.

    \b
    Example:
      pace fit --images color --model color --concepts 8
      pace explain photo.jpg

    Ctrl-C keeps what was learned up to the last full pass. If a run with --out is stopped, the same command resumes it.

    On several processes: torchrun --nproc-per-node 4 -m pace fit …
    """
    if observations is not None:
        _refuse_with_observations(images, model, how, probe)
    elif images.images is None or model is None:
        raise Problem("pace fit needs --images and --model, or --observations (see pace fit --help)")
    if estimator.max_concepts is not None and estimator.n_concepts != "auto":
        raise Problem("--max-concepts is for --concepts auto")
    with joined_processes(compute.device) as process:
        learner = _estimator(estimator, images.seed, process)
        source = _open_source(images, model, how, probe, observations, process, compute.batch_size)
        out = None if ctx.params["out"] is None else Path(ctx.params["out"]).expanduser()

        def learn() -> Observations:
            views = _observe(source, learner, pairs, images.seed, compute.batch_size, process)
            _learn(learner, views, None if out is None else out / _CHECKPOINT, checkpoint_every)
            return views.observations

        if not process.leads:  # the first process saves and prints
            learn()
            return {}
        about = {"model": source.model.record(), "images": source.choice.record(source.images)}
        with running(ctx, source.choice.images, device=process.device, **about) as run:
            run.record["observations"] = None if source.extracted is None else str(source.extracted.folder.resolve())
            source.model.save_head(run)
            _save(run, learner, learn(), source, images.seed)
            if learner.interrupted_:
                unit = "minibatches" if learner.n_steps_ else "epochs"
                raise KeyboardInterrupt(f"after {learner.n_iter_} {unit}; what was learned is in {run.folder}")
    from pace.fitting.checkpoints import remove

    remove(run.file(_CHECKPOINT))
    _show(run, learner.selection_)
    return run.record


@dataclass(frozen=True)
class _Source:
    """What to learn from. `extracted` is the run of `pace extract` that has the observations, if there is one."""

    choice: ImageChoice
    images: ImageSet
    model: OpenedModel
    extracted: Run | None


def _refuse_with_observations(
    images: options.ImageOptions, model: str | None, how: options.LayerOptions, probe: bool
) -> None:
    """--observations stands for images and model, so options about them would have no effect."""
    given = {**asdict(images), **asdict(how), "model": model, "probe": probe, "seed": None}
    names = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None and value is not False]
    if names:
        raise Problem(f"--observations already determines images and model; leave {', '.join(names)} out")


def _estimator(given: Any, seed: int, process: Process) -> PACE:
    from pace.explainer import PACE
    from pace.fitting.arguments import check_arguments

    parameters = {name: value for name, value in asdict(given).items() if value is not None}
    device = process.device.type if process.device.index is None else str(process.device)
    estimator = PACE(**parameters, distributed=process.several, seed=seed, device=device)
    check_arguments(estimator)  # before spending minutes on the images
    return estimator


def _open_source(
    images: options.ImageOptions,
    model: str | None,
    how: options.LayerOptions,
    probe: bool,
    observations: str | None,
    process: Process,
    batch_size: int,
) -> _Source:
    if observations is None:
        choice = ImageChoice.of(images)
        opened, explained = open_images_and_model(choice, how.choice(str(model)), process.device, probe, batch_size)
        return _Source(choice, opened, explained, None)
    run = open_run(observations, "extract")
    choice = ImageChoice.from_record(run.record["images"])
    problem = f"the images of {observations} have changed since; extract them again"
    return _Source(choice, choice.reopen(run.record["images"], problem), reopen_model(run, process.device), run)


def _observe(source: _Source, estimator: PACE, pairs: bool, seed: int, batch_size: int, process: Process) -> Views:
    if source.extracted is not None:
        return read_extracted(source.extracted, pairs)
    backbone, online = source.model.backbone, estimator.minibatch is not None
    if online or process.several:
        return stream_images(backbone, source.images, pairs=pairs, seed=seed, batch_size=batch_size, keep=not online)
    return observe_images(backbone, source.images, pairs=pairs, seed=seed, batch_size=batch_size)


def _learn(estimator: PACE, views: Views, checkpoint: Path | None, every: float) -> None:
    from pace.fitting.checkpoints import how_far

    found = None if checkpoint is None else how_far(checkpoint)
    if found is not None:
        per_epoch = _minibatches(estimator, views.observations)
        unit, most = ("minibatches", estimator.max_iter * per_epoch) if per_epoch else ("epochs", estimator.max_iter)
        refined = f" and {found.refined} refining steps" if found.refined else ""
        say(f"resuming after {found.done} of at most {most} {unit}{refined} ({checkpoint})")
    estimator.fit(
        views.observations,
        perturbed=views.perturbed,
        checkpoint=checkpoint,
        checkpoint_every=every,
        keep_checkpoint=True,  # until the concepts are saved
    )


def _minibatches(estimator: PACE, observations: Observations) -> int | None:
    """In an epoch."""
    return None if estimator.minibatch is None else -(-len(observations) // estimator.minibatch)


def _save(run: Run, estimator: PACE, observations: Observations, source: _Source, seed: int) -> None:
    if estimator.interrupted_ and not estimator.n_iter_:
        raise KeyboardInterrupt("before the first epoch was done; nothing was learned")
    run.record["model"]["class_names"] = source.model.names_for(observations.n_classes, source.images)
    with busy("saving"):
        estimator.save(run.file(CONCEPTS))
        _save_gallery(run, estimator, observations, source.images, seed)
    per_epoch, selection = _minibatches(estimator, observations), estimator.selection_
    run.record["results"] = {
        "images": len(observations),
        "concepts": len(estimator.concept_weights_),
        "selection": None if selection is None else _search_record(selection),
        "empty_concepts": estimator.empty_concepts_,
        "shares": estimator.concept_weights_ / estimator.concept_weights_.sum(),
        "epochs": estimator.n_steps_ // per_epoch if per_epoch else estimator.n_iter_,  # full passes
        "minibatches": estimator.n_steps_ or None,
        "converged": estimator.converged_,
        "interrupted": estimator.interrupted_,
        "bound": [bound._asdict() for bound in estimator.lower_bounds_],
        "file": CONCEPTS,
    }


def _save_gallery(run: Run, estimator: PACE, observations: Observations, images: ImageSet, seed: int) -> None:
    """The names of the images with the patches nearest to every concept, which `pace explain` shows as examples."""
    from pace.observations import Lazy
    from pace.showing.summary import typical_patches

    numbers = np.arange(len(images))
    if isinstance(observations, Lazy) and len(images) > _GALLERY_SAMPLE:
        numbers = np.sort(np.random.default_rng(seed).choice(len(images), _GALLERY_SAMPLE, replace=False))
        observations = observations[numbers]
    near = typical_patches(estimator.means_, observations, min(_GALLERY_SIZE, len(numbers)))
    names = [[images.names[numbers[image]] for image in row] for row in near[..., 0]]
    content = {"images": names, "patches": plain(near[..., 1]), "grid": observations.grid}
    write_atomically(run.file(GALLERY), json.dumps(content).encode())


def _search_record(selection: Selection) -> dict[str, Any]:
    """How the number of concepts was found."""
    return {
        "images": selection.images,
        "numbers": selection.numbers,
        "bounds": selection.bounds,
        "evidence": selection.evidence,
    }


def _show(run: Run, selection: Selection | None) -> None:
    results = plain(run.record["results"])
    concepts, shares = results["concepts"], results["shares"]
    if selection is not None:
        say(f"found {selection.n_concepts} concepts in {selection.images} images")
        if selection.n_concepts < concepts:
            say(f"the other {concepts - selection.n_concepts} of {concepts} stay empty; --no-prune uses all")
        say()
    order = sorted(range(concepts), key=lambda k: -(shares[k] or 0))[:_SHOWN]
    examples = json.loads(run.file(GALLERY).read_bytes())["images"]
    table(
        ["concept", "share of the images", "nearest patch in"],
        [[str(k), f"{100 * (shares[k] or 0):.1f} %", examples[k][0]] for k in order],
        words=(0, 2),
    )
    say(f"{concepts - len(results['empty_concepts'])} of {concepts} concepts in use after {results['epochs']} epochs")
    say(f"written to {run.folder}")
    say(f"next: pace explain PICTURE --run {run.folder}")
