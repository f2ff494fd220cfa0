"""`pace report`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pace.cli import options
from pace.cli.errors import Problem
from pace.cli.fits import FitRun, open_fit
from pace.cli.observing import discard
from pace.cli.opening import image_record, open_images
from pace.cli.output import busy, say
from pace.cli.runs import Run, running
from pace.files import reading

if TYPE_CHECKING:
    from torch import Tensor

    from pace.images import ImageSet, PreprocessingLike

_BATCH = 32  # images perturbed at once
_IMAGES = options.ImageOptions(limit=200)
_EVALUATION = typer.Option(metavar="FOLDER", help="Folder of a `pace evaluate`.", show_default="the latest of this fit")


def report(
    ctx: typer.Context,
    *,
    fit: options.FitOptions,
    images: options.ImageOptions = _IMAGES,
    evaluation: Annotated[str | None, _EVALUATION] = None,
    pairs: options.Pairs = True,
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
) -> dict[str, Any]:
    """Write an interactive report as one HTML file.

    It shows concepts, images and classes, and how far to trust them.

    \b
    Example:
      pace fit --images color --model color --concepts 8
      pace evaluate
      pace report

    The page opens from disk, without a network.
    """
    found = open_fit(ctx, fit)
    from pace.metrics import Scores
    from pace.showing.report import write_report

    choice = found.other_images(images)
    shown = open_images(choice)
    scored = _evaluation(found, evaluation)
    ctx.params["evaluation"] = None if scored is None else str(scored.folder.resolve())
    scores = None
    if scored is not None:
        with reading(scored.folder, "run `pace evaluate` again"):
            scores = Scores.from_dict(scored.record["results"])
    backbone = found.fitted.backbone
    about = {"images": image_record(choice, shown), "fit": found.fingerprint()}
    with running(ctx, choice.images, device=found.device, **about) as run:
        others = [] if scored is None else [scored]
        seen, perturbed = found.observe(shown, pairs, run, images.seed, fit.batch_size, others)
        discard(run)
        with busy("writing the report"):
            file = write_report(
                run.file("report.html"),
                found.fitted.concepts,
                shown,
                seen,
                perturbed=perturbed,
                perturbed_images=_perturbed(shown, backbone.preprocessing, images.seed) if pairs else None,
                scores=scores,
                class_names=found.fitted.class_names,
                preprocessing=backbone.preprocessing,
                title=title or f"What the transformer sees in {Path(str(choice.images)).name}",
            )
        address, size = file.resolve().as_uri(), file.stat().st_size
        run.record["results"] = {"file": file.name, "address": address, "bytes": size, "images": len(shown)}
    if scores is None:
        say("the report has no scores; `pace evaluate` computes them")
    say(f"{len(shown)} images, {size / 1e6:.1f} MB")
    say(address)
    return run.record


def _evaluation(fit: FitRun, given: str | None) -> Run | None:
    """The run of `pace evaluate` that was given, or the latest one of this fit, if any."""
    found = fit.evaluations(given)
    if given is not None and not found:
        raise Problem(f"--evaluation {given} has no scores of {fit.run.folder}")
    if not found or found[-1].record.get("fit") == fit.fingerprint():
        return found[-1] if found else None
    line = f"the scores in {found[-1].folder} are of other concepts than {fit.run.folder} holds now"
    if given is not None:
        raise Problem(f"{line}; run `pace evaluate` again")
    warnings.warn(f"{line}, and are left out; `pace evaluate` computes new ones", stacklevel=2)
    return None


def _perturbed(images: ImageSet, preprocessing: PreprocessingLike, seed: int) -> Tensor:
    """The pixels of the perturbed views that were observed: the same seed gives the same views."""
    import torch

    from pace.images import ByName, Perturbation
    from pace.metrics.ground_truth import sample_images

    perturb, numbers = ByName(Perturbation(seed), images.names), torch.split(torch.arange(len(images)), _BATCH)
    return torch.cat([perturb(sample_images(images, rows.numpy(), preprocessing), rows) for rows in numbers])
