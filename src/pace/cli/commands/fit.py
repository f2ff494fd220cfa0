"""`pace fit`."""

from __future__ import annotations

import json as json_format
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pace.atomic import write_atomically
from pace.cli import options
from pace.cli.errors import Problem
from pace.cli.fitted import CONCEPTS, GALLERY, GALLERY_SIZE
from pace.cli.models import ModelChoice, device_of, keep_head, reopen_subject
from pace.cli.observing import look, open_both, stored
from pace.cli.output import busy, plain, say, table
from pace.cli.pictures import ImageChoice
from pace.cli.runs import Run, open_run, running

if TYPE_CHECKING:
    from pace.explainer import PACE
    from pace.images import ImageSet
    from pace.observations import Observations

_SHOWN = 10  # concepts in the table


def fit(
    ctx: typer.Context,
    images: options.MaybeImages = None,
    model: options.MaybeModel = None,
    observations: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="A run of `pace extract`, instead of --images and --model."),
    ] = None,
    concepts: Annotated[int, typer.Option("--concepts", "-k", min=1, help="How many concepts to look for.")] = 100,
    covariance: Annotated[options.Covariance, typer.Option(help="The shape of a concept.")] = options.Covariance.tied,
    updates: Annotated[
        options.Updates, typer.Option(help="Coordinate ascent, or the rules as the paper prints them.")
    ] = options.Updates.exact,
    alpha: options.Alpha = "learn",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the images at most.")] = 100,
    refine: Annotated[
        int,
        typer.Option(
            min=0, help="Steps in which faithfulness and stability shape the concepts; needs tied covariances."
        ),
    ] = 0,
    starts: Annotated[int, typer.Option(min=1, help="Starting points that are compared.")] = 4,
    data_root: options.DataRoot = None,
    split: options.Split = "train",
    limit: options.Limit = None,
    skip_unreadable: options.SkipUnreadable = False,
    pairs: options.Pairs = True,
    architecture: options.Architecture = None,
    image_size: options.ImageSize = None,
    layer: options.MaybeLayer = None,
    cls: options.CountCls = True,
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

    Ctrl-C keeps what was learned up to the last full pass.
    """
    if observations is not None and (images is not None or model is not None):
        raise Problem("--observations already says which images and model; leave --images and --model out")
    if observations is None and (images is None or model is None):
        raise Problem("pace fit needs --images and --model, or --observations (see pace fit --help)")
    where = device_of(device)
    from pace import PACE

    earlier: Run | None = None
    if observations is not None:
        earlier = open_run(observations, "extract")
        views = stored(earlier)
        choice = ImageChoice.from_record(earlier.record["images"])
        subject, opened = reopen_subject(earlier, where), choice.open()
        if opened.fingerprint() != earlier.record["images"]["fingerprint"]:
            raise Problem(f"the images of {observations} have changed since; extract them again")
    else:
        assert images is not None  # as was checked
        assert model is not None
        choice = ImageChoice(images, data_root, split, limit, seed, skip_unreadable)
        asked = ModelChoice(model, architecture, image_size, layer, cls)
        subject, opened = open_both(choice, asked, where, probe, batch_size)
    about = {"model": subject.record(), "images": choice.record(opened)}
    with running(ctx, choice.source, out=out, device=where, **about) as run:
        run.record["observations"] = None if earlier is None else str(earlier.folder.resolve())
        keep_head(subject.backbone, run)
        if earlier is None:
            views = look(subject, opened, pairs=pairs, seed=seed, batch_size=batch_size)
        run.record["model"]["class_names"] = subject.names_for(views.observations.n_classes, opened)
        learned = PACE(
            concepts,
            covariance=covariance.value,
            updates=updates.value,
            alpha=_alpha(alpha),
            max_iter=epochs,
            n_init=starts,
            refine=refine,
            seed=seed,
            device=where.type if where.index is None else str(where),
        ).fit(views.observations, perturbed=views.perturbed)
        if learned.interrupted_ and not learned.n_iter_:
            raise KeyboardInterrupt("before the first epoch was done; nothing was learned")
        with busy("saving"):
            learned.save(run.file(CONCEPTS))
            _keep_gallery(run, learned, views.observations, opened)
        run.record["results"] = _results(learned, views.observations)
        if learned.interrupted_:
            raise KeyboardInterrupt(f"after {learned.n_iter_} epochs; what was learned is in {run.folder}")
    _show(run)
    return run.record


def _alpha(text: str) -> float | str:
    if text == "learn":
        return text
    try:
        return float(text)
    except ValueError:
        raise Problem(f"--alpha {text}: expected a number or learn") from None


def _keep_gallery(run: Run, learned: PACE, observations: Observations, images: ImageSet) -> None:
    """The images whose patches lie nearest to every concept, by name: what explanations of other pictures show it by."""
    from pace.report.summary import nearest

    near = nearest(learned, observations, min(GALLERY_SIZE, len(images)))
    names = [[images.names[image] for image in row] for row in near.images.tolist()]
    content = {"images": names, "patches": plain(near.patches), "grid": observations.grid}
    write_atomically(run.file(GALLERY), json_format.dumps(content).encode())


def _results(learned: PACE, observations: Observations) -> dict[str, Any]:
    weights = learned.concept_weights_
    shares = weights / weights.sum()
    return {
        "images": len(observations),
        "concepts": learned.n_concepts,
        "empty_concepts": learned.empty_concepts_,
        "shares": shares,
        "epochs": learned.n_iter_,
        "converged": learned.converged_,
        "interrupted": learned.interrupted_,
        "bound": [bound._asdict() for bound in learned.lower_bounds_],
        "file": CONCEPTS,
    }


def _show(run: Run) -> None:
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
