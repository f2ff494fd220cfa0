"""`pace explain`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pace.cli import options
from pace.cli.errors import Problem, line_of
from pace.cli.fit_runs import FitRun, open_fit
from pace.cli.images import joined, open_pictures
from pace.cli.models import device_of
from pace.cli.output import busy, say, table
from pace.cli.runs import Run, running

if TYPE_CHECKING:
    from pace.explanation import Explanation
    from pace.images import ImageSet
    from pace.observations import Observations

_PREDICTIONS = 5  # most probable classes recorded
_PRINTED = 20  # pictures; the rest is in the files
_DRAWN = 3  # pictures in the figure
_REPORTED = 400  # pictures in the report
_EXAMPLES = 3  # images of the fit per concept
_DIGITS = 6


def explain(
    ctx: typer.Context,
    *,
    pictures: Annotated[list[str], typer.Argument(help="Image files, or folders of them.", show_default=False)],
    fit_run: options.FitFolder = None,
    top: Annotated[int, typer.Option(min=1, help="Concepts to show for each picture.")] = 5,
    level: Annotated[float, typer.Option(help="Probability of the credible intervals.")] = 0.9,
    skip_unreadable: options.SkipUnreadable = False,
    moved: options.MovedModel = None,
    compute: options.Compute,
) -> dict[str, Any]:
    """Explain your own pictures with the concepts of a fit.

    Prints each picture's concepts, how certain they are, and how they support the prediction; writes a report that
    shows where in the picture they are.

    \b
    Example:
      pace fit --images color --model color --concepts 8
      pace explain photo.jpg
      pace explain photo.jpg holiday/ --run runs/fit-color-20250101-120000 --json
    """
    if not 0 < level < 1:
        raise Problem(f"--level {level}: expected a probability between 0 and 1")
    device = device_of(compute.device)
    from pace.observing.extract import observe

    images = open_pictures(pictures, skip_unreadable)
    fit = open_fit(fit_run, device, moved)
    with running(ctx, Path(pictures[0]).stem or "pictures", device=device, **fit.record) as run:
        run.record["configuration"]["fit_run"] = str(fit.run.folder.resolve())
        observed = observe(fit.model.backbone, images, batch_size=compute.batch_size)
        explanation = fit.concepts.explain(observed)
        found = _findings(fit, images, observed, explanation, top, level)
        run.record["results"] = {"level": level, "images": found}
        shown = images.subset(range(min(len(images), _REPORTED)))
        if len(shown) < len(images):
            warnings.warn(f"the report shows the first {len(shown)} of {len(images)} pictures", stacklevel=2)
        concepts = list(dict.fromkeys(k["concept"] for picture in found[: len(shown)] for k in picture["top_concepts"]))
        files = _write(run, fit, shown, observed[: len(shown)], concepts, compute.batch_size, level)
        run.record["results"]["files"] = files
    _show(run, fit, level)
    return run.record


def _findings(
    fit: FitRun, images: ImageSet, observed: Observations, explanation: Explanation, top: int, level: float
) -> list[dict[str, Any]]:
    """For every picture, predictions and concepts as ``run.json`` has them."""
    low, high = explanation.interval(level)
    gallery, evidence = fit.gallery(), fit.concepts.label_head_
    found = []
    for number, name in enumerate(images.names):
        predicted = _predictions(fit, observed, number)
        favoured = predicted[0]["class"] if predicted and evidence.shape[1] else None
        concepts = [
            {
                "concept": int(k),
                "theta": round(float(explanation.theta[number, k]), _DIGITS),
                "low": round(float(low[number, k]), _DIGITS),
                "high": round(float(high[number, k]), _DIGITS),
                "eta": None if favoured is None else round(float(evidence[k, favoured]), _DIGITS),
                "examples": gallery[k][:_EXAMPLES],
            }
            for k in explanation.shown_concepts(number, top)
        ]
        assert explanation.phi is not None
        patches = explanation.phi[number, explanation.prefix_tokens :]
        found.append(
            {
                "picture": name,
                "predictions": predicted,
                "top_concepts": concepts,
                "theta": explanation.theta[number].astype(float).round(_DIGITS),
                "low": low[number].round(_DIGITS),
                "high": high[number].round(_DIGITS),
                "grid": explanation.grid,
                "patch_concepts": patches.argmax(1).reshape(explanation.grid or (-1,)),
            }
        )
    return found


def _predictions(fit: FitRun, observed: Observations, number: int) -> list[dict[str, Any]]:
    """The most probable classes of a picture; none without a classifier."""
    predictions = observed.batch(slice(number, number + 1)).predictions
    if predictions is None:
        return []
    values, classes = predictions[0].float().topk(min(_PREDICTIONS, predictions.shape[1]))
    return [
        {"class": int(c), "name": fit.class_name(int(c)), "probability": round(float(p), _DIGITS)}
        for c, p in zip(classes, values, strict=True)
    ]


def _write(
    run: Run,
    fit: FitRun,
    images: ImageSet,
    observed: Observations,
    concepts: list[int],
    batch_size: int,
    level: float,
) -> dict[str, str]:
    """A figure and a report of the pictures, together with the images of the fit that show the same concepts best."""
    from pace.showing.report import write_report

    pictures = images
    try:
        examples = fit.examples(concepts, _EXAMPLES)
    except (ValueError, OSError) as error:
        warnings.warn(f"concepts are only shown in these pictures: {line_of(error)}", stacklevel=2)
    else:
        observed = _together(observed, fit, examples, batch_size)
        pictures = joined(images, examples)
    with busy("drawing"):
        figure = _draw(run, fit, pictures, observed, len(images), level)
    with busy("writing the report"):
        report = write_report(
            run.file("report.html"),
            fit.concepts,
            pictures,
            observed,
            class_names=fit.model.class_names,
            preprocessing=fit.model.backbone.preprocessing,
            title=f"What the transformer sees in {images.names[0] if len(images) == 1 else f'{len(images)} pictures'}",
        )
    return {**figure, "report": report.name}


def _draw(
    run: Run, fit: FitRun, pictures: ImageSet, observed: Observations, count: int, level: float
) -> dict[str, str]:
    try:
        from pace.showing import figures
    except ModuleNotFoundError as error:  # everything else works without matplotlib
        warnings.warn(f"no figure: {line_of(error)}", stacklevel=2)
        return {}
    figure = figures.three_levels(
        fit.concepts,
        pictures,
        observed,
        preprocessing=fit.model.backbone.preprocessing,
        shown=range(min(count, _DRAWN)),
        level=level,
        class_names=fit.model.class_names,
    )
    figures.save(figure, run.file("figure.png"))
    return {"figure": "figure.png"}


def _together(first: Observations, fit: FitRun, images: ImageSet, batch_size: int) -> Observations:
    """The observations `first`, followed by those of `images`."""
    import torch

    from pace.observations import Observations
    from pace.observing.extract import observe

    second = observe(fit.model.backbone, images, batch_size=batch_size)
    parts = zip(first.batch(slice(None), "cpu"), second.batch(slice(None), "cpu"), strict=True)
    embeddings, attention, predictions = (
        None if one is None or other is None else torch.cat([one, other]) for one, other in parts
    )
    return Observations(embeddings, attention, predictions, first.grid, first.prefix_tokens)


def _show(run: Run, fit: FitRun, level: float) -> None:
    found = run.record["results"]["images"]
    for entry in found[:_PRINTED]:
        say(entry["picture"], style="bold")
        predicted = entry["predictions"]
        if predicted:
            say(f"prediction: {predicted[0]['name']} ({100 * predicted[0]['probability']:.1f} %)")
        head = ["concept", "share θ", f"{100 * level:g} % interval", "also seen in"]
        rows = [
            [
                str(concept["concept"]),
                f"{concept['theta']:.3f}",
                f"{concept['low']:.3f} to {concept['high']:.3f}",
                concept["examples"][0],
            ]
            for concept in entry["top_concepts"]
        ]
        if predicted and entry["top_concepts"][0]["eta"] is not None:
            head.insert(3, f"η for {predicted[0]['name']}")
            for row, concept in zip(rows, entry["top_concepts"], strict=True):
                row.insert(3, f"{concept['eta']:+.2f}")
        table(head, rows, words=(0, len(head) - 1))
        say()
    if len(found) > _PRINTED:
        say(f"and {len(found) - _PRINTED} more pictures")
    say(fit.in_use)
    files = run.record["results"]["files"]
    say(f"written to {run.folder}")
    say(run.file(files["report"]).resolve().as_uri())
