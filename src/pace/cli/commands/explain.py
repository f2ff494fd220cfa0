"""`pace explain`."""

from __future__ import annotations

import json as json_format
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pace.cli import options
from pace.cli.errors import Problem, line_of
from pace.cli.fitted import GALLERY, Fitted, fit_record, name_of, open_fitted
from pace.cli.models import device_of
from pace.cli.output import busy, say, table
from pace.cli.pictures import joined, open_pictures
from pace.cli.runs import Run, running

if TYPE_CHECKING:
    from pace.explanation import Explanation
    from pace.images import ImageSet
    from pace.observations import Observations

_PREDICTIONS = 5  # classes kept of a prediction
_PRINTED = 20  # pictures that are printed; the rest is in the files
_DRAWN = 3  # pictures in the figure
_REPORTED = 400  # pictures that a report shows
_EXAMPLES = 3  # images of the fit that show a concept
_DIGITS = 6


def explain(
    ctx: typer.Context,
    pictures: Annotated[list[str], typer.Argument(help="Image files, or folders of them.", show_default=False)],
    fit_run: options.FitRun = None,
    top: Annotated[int, typer.Option(min=1, help="Concepts to print of each picture, at most.")] = 5,
    level: Annotated[float, typer.Option(help="Probability of the credible intervals.")] = 0.9,
    skip_unreadable: options.SkipUnreadable = False,
    moved: options.MovedModel = None,
    batch_size: options.BatchSize = 64,
    device: options.Device = "auto",
    out: options.Out = None,
    config: options.Config = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> dict[str, Any]:
    """Explain pictures of your own by the concepts of a fit.

    Prints which concepts, how sure and for which prediction; writes a report that shows where.

    \b
    Example:
      pace fit --images color --model color --concepts 8
      pace explain photo.jpg
      pace explain photo.jpg holiday/ --run runs/fit-color-20250101-120000 --json
    """
    if not 0 < level < 1:
        raise Problem(f"--level {level}: expected a probability between 0 and 1")
    where = device_of(device)
    from pace.observing.extract import observe

    images = open_pictures(pictures, skip_unreadable)
    fitted = open_fitted(fit_run, where, moved)
    with running(ctx, Path(pictures[0]).stem or "pictures", out=out, device=where, **fit_record(fitted)) as run:
        run.record["configuration"]["fit_run"] = str(fitted.run.folder.resolve())
        seen = observe(fitted.subject.backbone, images, batch_size=batch_size)
        explanation = fitted.concepts.explain(seen)
        gallery = json_format.loads(fitted.run.file(GALLERY).read_bytes())["images"]
        found = _findings(fitted, images, seen, explanation, gallery, top, level)
        run.record["results"] = {"level": level, "images": found}
        run.record["results"]["files"] = _write(run, fitted, images, seen, explanation, batch_size, top, level)
    _show(run, fitted, level)
    return run.record


def _findings(
    fitted: Fitted,
    images: ImageSet,
    seen: Observations,
    explanation: Explanation,
    gallery: list[list[str]],
    top: int,
    level: float,
) -> list[dict[str, Any]]:
    low, high = explanation.interval(level)
    evidence = fitted.concepts.label_head_
    predictions = None if seen.predictions is None else seen.batch(slice(None)).predictions
    found = []
    for number, name in enumerate(images.names):
        predicted: list[dict[str, Any]] = []
        if predictions is not None:
            values, classes = predictions[number].float().topk(min(_PREDICTIONS, predictions.shape[1]))
            predicted = [
                {"class": int(c), "name": name_of(fitted.class_names, int(c)), "probability": round(float(p), _DIGITS)}
                for c, p in zip(classes, values, strict=True)
            ]
        spoken_for = predicted[0]["class"] if predicted and evidence.shape[1] else None
        concepts = [
            {
                "concept": int(k),
                "theta": round(float(explanation.theta[number, k]), _DIGITS),
                "low": round(float(low[number, k]), _DIGITS),
                "high": round(float(high[number, k]), _DIGITS),
                "eta": None if spoken_for is None else round(float(evidence[k, spoken_for]), _DIGITS),
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


def _write(
    run: Run,
    fitted: Fitted,
    images: ImageSet,
    seen: Observations,
    explanation: Explanation,
    batch_size: int,
    top: int,
    level: float,
) -> dict[str, str]:
    """A figure and a report of the pictures, among images of the fit that show the same concepts best."""
    from pace.showing.report import write_report

    shown = range(min(len(images), _REPORTED))
    if len(images) > _REPORTED:
        warnings.warn(f"the report shows the first {_REPORTED} of {len(images)} pictures", stacklevel=2)
    pictures, observed = images.subset(shown), seen[shown.start : shown.stop]
    concepts = list(dict.fromkeys(int(k) for number in shown for k in explanation.shown_concepts(number, top)))
    try:
        examples = fitted.examples(concepts, _EXAMPLES)
    except (ValueError, OSError) as error:
        warnings.warn(f"the concepts are shown by these pictures alone: {line_of(error)}", stacklevel=2)
    else:
        observed = _together(observed, fitted, examples, batch_size)
        pictures = joined(pictures, examples)
    with busy("drawing"):
        figure = _draw(run, fitted, pictures, observed, len(shown), level)
    with busy("writing the report"):
        report = write_report(
            run.file("report.html"),
            fitted.concepts,
            pictures,
            observed,
            class_names=fitted.class_names,
            preprocessing=fitted.subject.backbone.preprocessing,
            title=f"What the transformer sees in {images.names[0] if len(images) == 1 else f'{len(images)} pictures'}",
        )
    return {**figure, "report": report.name}


def _draw(
    run: Run, fitted: Fitted, pictures: ImageSet, observed: Observations, count: int, level: float
) -> dict[str, str]:
    try:
        from pace.showing import figures
    except ModuleNotFoundError as error:  # all the rest works without matplotlib
        warnings.warn(f"no figure: {line_of(error)}", stacklevel=2)
        return {}
    figure = figures.three_levels(
        fitted.concepts,
        pictures,
        observed,
        preprocessing=fitted.subject.backbone.preprocessing,
        shown=range(min(count, _DRAWN)),
        level=level,
        class_names=fitted.class_names,
    )
    figures.save(figure, run.file("figure.png"))
    return {"figure": "figure.png"}


def _together(first: Observations, fitted: Fitted, images: ImageSet, batch_size: int) -> Observations:
    import torch

    from pace.observations import Observations
    from pace.observing.extract import observe

    second = observe(fitted.subject.backbone, images, batch_size=batch_size)
    parts = zip(first.batch(slice(None), "cpu"), second.batch(slice(None), "cpu"), strict=True)
    embeddings, attention, predictions = (
        None if one is None or other is None else torch.cat([one, other]) for one, other in parts
    )
    return Observations(embeddings, attention, predictions, first.grid, first.prefix_tokens)


def _show(run: Run, fitted: Fitted, level: float) -> None:
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
    say(f"by {fitted.in_use}")
    files = run.record["results"]["files"]
    say(f"written to {run.folder}")
    say(run.file(files["report"]).resolve().as_uri())
