"""`pace fit`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pace.cli import opening, options
from pace.cli.errors import Problem
from pace.cli.opening import source_of
from pace.cli.output import busy, first_process, say, several_processes, table
from pace.cli.runs import Run, earlier_results, open_run, running
from pace.naming import use_of

if TYPE_CHECKING:
    import torch

    from pace.explainer import PACE
    from pace.images import ImageSet
    from pace.observations import Observations

_SHOWN = 10  # concepts in the table
_CHECKPOINT = "checkpoint"  # folder in an unfinished run
_OBSERVATIONS = typer.Option(
    metavar="FOLDER", help="Folder of a `pace fit` or `pace extract`, instead of --images and --model."
)
_EVERY = typer.Option(min=0, metavar="SECONDS", help="How often to save progress, with --out.")


def fit(
    ctx: typer.Context,
    *,
    images: options.ImageOptions,
    model: options.MaybeModel = None,
    how: options.LayerOptions,
    head: options.HeadOptions,
    pairs: options.Pairs = True,
    keep: options.Keep = True,
    observations: Annotated[str | None, _OBSERVATIONS] = None,
    estimator: options.EstimatorOptions,
    compute: options.Compute,
    checkpoint_every: Annotated[float, _EVERY] = 60.0,
) -> dict[str, Any]:
    """Learn the concepts that a model uses for images.

    \b
    Example:
      pace fit --images color --model color --concepts 8
      pace explain photo.jpg

    Ctrl-C keeps what was learned up to the last full pass. If a run with --out is stopped, the same command resumes it.

    On several processes: torchrun --nproc-per-node 4 -m pace fit …
    """
    from pace.observations import Lazy

    if observations is not None:
        _refuse({**asdict(images), **asdict(how), **asdict(head), "model": model, "seed": None}, ctx.obj.options)
    elif images.images is None or model is None:
        raise Problem("pace fit needs --images and --model, or --observations (see pace fit --help)")
    if estimator.max_concepts is not None and estimator.n_concepts != "auto":
        raise Problem("--max-concepts is for --concepts auto")
    with _joined_processes(compute.device) as device:
        learner = _estimator(estimator, images.seed, device)
        explained = views = None
        if observations is not None:
            source = source_of(open_run(observations, "fit", "extract"))
            views = opening.kept_views(source, pairs)
            opened, explained = opening.reopen_images(source), opening.reopen_model(source, device)
            record, weights = source.record["images"], opening.weights_of(explained.backbone)
        else:
            from pace.backbones import ModelChoice

            opened, choice = opening.open_images(images), ModelChoice(str(model), **asdict(how))
            record, loaded = opening.image_record(images, opened), opening.load_model(choice)
            weights = opening.weights_of(loaded[0])
            asked = images, opened, choice, loaded, head
            if learner.minibatch is not None or learner.distributed:
                explained = opening.open_streamed(*asked, device, compute.batch_size)
                once = learner.minibatch is None  # each process computes its own share once
                shape = pairs, learner.seed, compute.batch_size, once
                views = opening.stream_images(explained.backbone, opened, *shape)
        about = {"images": record, "weights": weights}
        if not first_process() and ctx.params["out"]:
            earlier_results(ctx, Path(ctx.params["out"]).expanduser(), about)  # refuses what the first process refuses
        recorded: Any = running(ctx, record["images"], device=device, **about)
        with recorded if first_process() else nullcontext() as run:
            if explained is None or views is None:
                assert run is not None  # several processes stream
                explained, views = opening.observe_once(run, *asked, pairs, device, compute.batch_size)
            if not isinstance(views[0], Lazy) and not learner.distributed:
                views = opening.in_memory(views, device)
            _learn(learner, *views, ctx.params["out"], checkpoint_every)
            if run is None:  # the first process saves and prints
                return {}
            if learner.interrupted_ and not learner.n_iter_:
                raise KeyboardInterrupt("before the first epoch was done; nothing was learned")
            explained.save_into(run, views[0], opened)
            run.record["results"] = _save(run, explained, learner, views[0], opened)
            if not keep:
                opening.discard(run)
            if learner.interrupted_:
                unit = "minibatches" if learner.n_steps_ else "epochs"
                raise KeyboardInterrupt(f"after {learner.n_iter_} {unit}; what was learned is in {run.folder}")
            from pace.fitting.checkpoints import remove

            run.save()  # the concepts count from now on
            remove(run.file(_CHECKPOINT))
    _show(run, learner)
    return dict(run.record)


def _refuse(given: dict[str, Any], options: dict[str, str]) -> None:
    """--observations stands for images and model, so options about them would have no effect."""
    names = [options[name] for name, value in given.items() if value is not None and value is not False]
    if names:
        raise Problem(f"--observations already determines images and model; leave {', '.join(names)} out")


@contextmanager
def _joined_processes(name: str) -> Iterator[torch.device]:
    """Join the other processes of torchrun, if there are any, each on a GPU of its own. Only the first one prints."""
    with ExitStack() as stack:
        if not first_process():
            nowhere = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        device = opening.device_of(name)
        if several_processes():
            from pace.fitting.distributed import processes

            device = stack.enter_context(processes(device))
        yield device


def _estimator(given: Any, seed: int, device: torch.device) -> PACE:
    from pace.backbones.backbone import without_apple
    from pace.explainer import PACE
    from pace.fitting.arguments import check_arguments

    parameters = {name: value for name, value in asdict(given).items() if value is not None}
    estimator = PACE(**parameters, distributed=several_processes(), seed=seed, device=str(without_apple(device)))
    check_arguments(estimator)  # before spending minutes on the images
    return estimator


def _learn(learner: PACE, seen: Observations, perturbed: Observations | None, out: str | None, every: float) -> None:
    from pace.fitting.checkpoints import how_far

    folder = None if out is None else Path(out).expanduser() / _CHECKPOINT
    if folder is not None and how_far(folder) is not None:
        say(f"resuming from {folder}")
    # The checkpoint is kept until the concepts are saved.
    learner.fit(seen, perturbed=perturbed, checkpoint=folder, checkpoint_every=every, keep_checkpoint=True)


def _save(
    run: Run, model: opening.OpenedModel, learner: PACE, observations: Observations, images: ImageSet
) -> dict[str, Any]:
    """Write the concepts and their gallery; returns the results for the record."""
    from pace.model_explainer import ModelExplainer, typical_images

    with busy("saving"):
        gallery = typical_images(learner, observations, images)
        results = ModelExplainer(model.backbone, learner, gallery=gallery).write_into(run.folder)
    if learner.minibatch is not None:
        results["epochs"] //= -(-len(observations) // learner.minibatch)  # full passes
    return {"images": len(observations), **results, "minibatches": learner.n_steps_ or None}


def _show(run: Run, learner: PACE) -> None:
    if learner.n_concepts == "auto" and (found := learner.selection_) is not None:
        say(f"found {found.n_concepts} concept{'s' * (found.n_concepts > 1)} in {found.images} images")
    use = use_of(learner.concept_weights_)
    examples = opening.read_gallery(run, len(learner.means_))
    names = learner.names_
    rows = [[names[k].label, f"{100 * use.shares[k]:.1f} %", examples[k][0]] for k in use.order[:_SHOWN]]
    table(["concept", "share of the images", "nearest patch in"], rows, words=(0, 2))
    epochs = run.record["results"]["epochs"]
    kinds = "" if learner.part_of_ is None else f", kinds of {learner.n_parts_} parts,"
    say(f"{len(use.order)} of {len(use.shares)} concepts{kinds} in use after {epochs} epochs")
    say(f"written to {run.folder}")
    if opening.has_kept(run):
        say(
            f"{opening.kept_bytes(run) / 1e6:.0f} MB of it are what the model saw, for later commands; --no-keep deletes them"
        )
    say(f"next: pace explain PICTURE --run {run.folder}")
