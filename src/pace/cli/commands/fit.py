"""`pace fit`."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from pace.atomic import write_atomically
from pace.cli import options
from pace.cli.errors import Problem
from pace.cli.fitted import CONCEPTS, GALLERY, GALLERY_SIZE
from pace.cli.models import ModelChoice, keep_head, reopen_subject
from pace.cli.observing import Views, look, look_later, open_both, stored
from pace.cli.output import busy, plain, say, table
from pace.cli.pictures import ImageChoice
from pace.cli.runs import Run, open_run, running
from pace.cli.teams import team

if TYPE_CHECKING:
    from pace.explainer import PACE
    from pace.images import ImageSet
    from pace.model.selecting import Selection
    from pace.observations import Observations

_SHOWN = 10  # concepts in the table
_CHECKPOINT = "checkpoint"  # folder in a run that is under way
_GALLERY_SAMPLE = 4096


def fit(
    ctx: typer.Context,
    images: options.MaybeImages = None,
    model: options.MaybeModel = None,
    observations: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="A run of `pace extract`, instead of --images and --model."),
    ] = None,
    concepts: options.Concepts = 100,
    max_concepts: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="NUMBER",
            help="Concepts at most that --concepts auto looks for.",
            show_default="300",
        ),
    ] = None,
    covariance: Annotated[options.Covariance, typer.Option(help="The shape of a concept.")] = options.Covariance.tied,
    updates: Annotated[
        options.Updates, typer.Option(help="Coordinate ascent, or the rules as the paper prints them.")
    ] = options.Updates.exact,
    alpha: options.Alpha = "learn",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the images at most.")] = 100,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune/--no-prune",
            help="Leave concepts empty where less than half of them say the prediction.",
        ),
    ] = True,
    refine: Annotated[
        str,
        typer.Option(
            metavar="STEPS|auto", help="In which faithfulness and stability shape the concepts; needs tied covariances."
        ),
    ] = "auto",
    starts: Annotated[int, typer.Option(min=1, help="Starting points that are compared.")] = 4,
    minibatch: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="IMAGES",
            help="Learn online, from so many images at a time: memory does not grow with their number.",
            rich_help_panel=options.SCALE,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Budget on the device, such as 8GB.",
            show_default="most of a GPU's",
            rich_help_panel=options.SCALE,
        ),
    ] = None,
    checkpoint_every: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="How often to write down how far it is, with --out; the same command goes on from there.",
            rich_help_panel=options.SCALE,
        ),
    ] = 60.0,
    data_root: options.DataRoot = None,
    split: options.Split = "train",
    limit: options.Limit = None,
    skip_unreadable: options.SkipUnreadable = False,
    pairs: options.Pairs = True,
    architecture: options.Architecture = None,
    image_size: options.ImageSize = None,
    normalize: options.Normalize = None,
    layer: options.Layer = None,
    cls: options.CountCls = False,
    probe: options.Probe = False,
    seed: options.Seed = 0,
    batch_size: options.BatchSize = 64,
    device: options.Device = "auto",
    out: options.Out = None,
    config: options.Config = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> dict[str, Any]:
    """Learn the concepts by which a model sees images.

    \b
    Example:
      pace fit --images color --model color --concepts 8
      pace explain photo.jpg

    Ctrl-C keeps what was learned up to the last full pass. A run with --out that was stopped goes on when it is started again.

    On several processes: torchrun --nproc-per-node 4 -m pace fit …
    """
    if observations is not None and (images is not None or model is not None):
        raise Problem("--observations already says which images and model; leave --images and --model out")
    if observations is not None:
        said = {"architecture": architecture, "image-size": image_size, "normalize": normalize, "layer": layer,
                "cls": cls, "probe": probe, "data-root": data_root, "split": split != "train", "limit": limit,
                "skip-unreadable": skip_unreadable}  # fmt: skip
        again = [f"--{name}" for name, value in said.items() if value is not None and value is not False]
        if again:
            raise Problem(f"--observations says what its images and model are; leave {', '.join(again)} out")
    if observations is None and (images is None or model is None):
        raise Problem("pace fit needs --images and --model, or --observations (see pace fit --help)")
    if max_concepts is not None and concepts != "auto":
        raise Problem(f"--max-concepts is for --concepts auto; found --concepts {concepts}")
    with team(device) as (where, several, leads):
        from pace.explainer import PACE
        from pace.fitting.arguments import check_arguments

        explainer = PACE(
            concepts,
            covariance=covariance.value,
            updates=updates.value,
            alpha=_alpha(alpha),
            max_iter=epochs,
            n_init=starts,
            prune="auto" if prune else False,
            refine=_steps(refine),
            minibatch=minibatch,
            memory=memory,
            distributed=several,
            seed=seed,
            device=where.type if where.index is None else str(where),
        )
        if max_concepts is not None:
            explainer.set_params(max_concepts=max_concepts)
        check_arguments(explainer)  # before minutes go into looking at images
        earlier: Run | None = None
        if observations is not None:
            earlier = open_run(observations, "extract")
            choice = ImageChoice.from_record(earlier.record["images"])
            subject, opened = reopen_subject(earlier, where), choice.open()
            if opened.fingerprint() != earlier.record["images"]["fingerprint"]:
                raise Problem(f"the images of {observations} have changed since; extract them again")
        else:
            assert images is not None  # as was checked
            assert model is not None
            choice = ImageChoice(images, data_root, split, limit, seed, skip_unreadable)
            asked = ModelChoice(model, architecture, image_size, layer, cls, normalize=normalize)
            subject, opened = open_both(choice, asked, where, probe, batch_size)

        def learn(folder: Path | None) -> tuple[PACE, Views]:
            if earlier is not None:
                views = stored(earlier) if pairs else Views(stored(earlier).observations, None)
            elif minibatch is not None or several:
                views = look_later(
                    subject, opened, pairs=pairs, seed=seed, batch_size=batch_size, keep=minibatch is None
                )
            else:
                views = look(subject, opened, pairs=pairs, seed=seed, batch_size=batch_size)
            checkpoint = None if folder is None else folder / _CHECKPOINT
            if checkpoint is not None:
                _say_how_far(checkpoint, epochs, None if minibatch is None else -(-len(opened) // minibatch))
            learned = explainer.fit(
                views.observations,
                perturbed=views.perturbed,
                checkpoint=checkpoint,
                checkpoint_every=checkpoint_every,
                keep_checkpoint=True,  # until what was learned is on the disk
            )
            return learned, views

        if not leads:  # the first process does what is left
            learn(None if out is None else Path(out).expanduser())
            return {}
        about = {"model": subject.record(), "images": choice.record(opened)}
        with running(ctx, choice.source, out=out, device=where, **about) as run:
            run.record["observations"] = None if earlier is None else str(earlier.folder.resolve())
            keep_head(subject.backbone, run)
            learned, views = learn(None if out is None else run.folder)
            run.record["model"]["class_names"] = subject.names_for(views.observations.n_classes, opened)
            if learned.interrupted_ and not learned.n_iter_:
                raise KeyboardInterrupt("before the first epoch was done; nothing was learned")
            with busy("saving"):
                learned.save(run.file(CONCEPTS))
                _keep_gallery(run, learned, views.observations, opened, seed)
            run.record["results"] = _results(learned, views.observations)
            if learned.interrupted_:
                unit = "minibatches" if learned.n_steps_ else "epochs"
                raise KeyboardInterrupt(f"after {learned.n_iter_} {unit}; what was learned is in {run.folder}")
    from pace.fitting.checkpoints import remove

    remove(run.file(_CHECKPOINT))
    _show(run, learned.selection_)
    return run.record


def _say_how_far(checkpoint: Path, epochs: int, minibatches: int | None) -> None:
    """One line where there is something to go on from; `minibatches` in an epoch."""
    from pace.fitting.checkpoints import how_far

    found = how_far(checkpoint)
    if found is None:
        return
    unit, most = ("epochs", epochs) if minibatches is None else ("minibatches", epochs * minibatches)
    refined = f" and {found.refined} steps of refining" if found.refined else ""
    say(f"going on after {found.done} of at most {most} {unit}{refined} ({checkpoint})")


def _alpha(text: str) -> float | str:
    if text == "learn":
        return text
    try:
        return float(text)
    except ValueError:
        raise Problem(f"--alpha {text}: expected a number or learn") from None


def _steps(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal():
        raise Problem(f"--refine {text}: expected a whole number of steps or auto")
    return int(text)


def _keep_gallery(run: Run, learned: PACE, observations: Observations, images: ImageSet, seed: int) -> None:
    """The images whose patches lie nearest to every concept, by name: what explanations of other pictures show it by.

    Images that would have to be looked at again are represented by a sample.
    """
    from pace.observations import Lazy
    from pace.showing.summary import typical_patches

    numbers = np.arange(len(images))
    if isinstance(observations, Lazy) and len(images) > _GALLERY_SAMPLE:
        numbers = np.sort(np.random.default_rng(seed).choice(len(images), _GALLERY_SAMPLE, replace=False))
        observations = observations[numbers]
    near = typical_patches(learned.means_, observations, min(GALLERY_SIZE, len(numbers)))
    names = [[images.names[numbers[image]] for image in row] for row in near.images.tolist()]
    content = {"images": names, "patches": plain(near.patches), "grid": observations.grid}
    write_atomically(run.file(GALLERY), json_format.dumps(content).encode())


def _results(learned: PACE, observations: Observations) -> dict[str, Any]:
    minibatches = None if learned.minibatch is None else -(-len(observations) // learned.minibatch)  # in an epoch
    weights = learned.concept_weights_
    shares = weights / weights.sum()
    return {
        "images": len(observations),
        "concepts": len(weights),
        "selection": None if learned.selection_ is None else _course_of(learned.selection_),
        "empty_concepts": learned.empty_concepts_,
        "shares": shares,
        "epochs": learned.n_iter_ if minibatches is None else learned.n_steps_ // minibatches,  # full passes
        "minibatches": learned.n_steps_ or None,
        "converged": learned.converged_,
        "interrupted": learned.interrupted_,
        "bound": [bound._asdict() for bound in learned.lower_bounds_],
        "file": CONCEPTS,
    }


def _course_of(selection: Selection) -> dict[str, Any]:
    """How the number of concepts was found, and how sure it is."""
    return {
        "images": selection.images,
        "moves": [move._asdict() for move in selection.moves],
        "numbers": selection.numbers,
        "bounds": selection.bounds,
        "posterior": selection.posterior,
        "evidence": selection.evidence,
    }


def _show(run: Run, selection: Selection | None) -> None:
    if selection is not None:
        for line in str(selection).splitlines():
            say(line)
        say("the probabilities take patches for independent Gaussians: on real embeddings they are far too sure")
        concepts = plain(run.record["results"])["concepts"]
        if selection.n_concepts < concepts:
            say(f"the other {concepts - selection.n_concepts} of {concepts} concepts stay empty; --no-prune uses all")
        elif selection.n_concepts == selection.numbers.max():
            say("larger numbers were not tried: raise --max-concepts, or set --concepts by hand", style="yellow")
        say()
    results = plain(run.record["results"])
    shares = results["shares"]
    order = sorted(range(len(shares)), key=lambda k: -(shares[k] or 0))[:_SHOWN]
    gallery = json_format.loads(run.file(GALLERY).read_bytes())
    table(
        ["concept", "share of the images", "nearest patch in"],
        [[str(k), f"{100 * (shares[k] or 0):.1f} %", gallery["images"][k][0]] for k in order],
        words=(0, 2),
    )
    empty = len(results["empty_concepts"])
    say(f"{results['concepts'] - empty} of {results['concepts']} concepts in use after {results['epochs']} epochs")
    say(f"written to {run.folder}")
    say(f"next: pace explain PICTURE --run {run.folder}")
