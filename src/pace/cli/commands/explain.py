"""`pace explain`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from pace.cli import options
from pace.cli.errors import Problem
from pace.cli.opening import FitRun, allow, discard, open_fit
from pace.cli.output import busy, say, table
from pace.cli.runs import Run, running
from pace.naming import Name, class_titles

if TYPE_CHECKING:
    from pace.images import ImageSet
    from pace.model_explainer import ModelExplanation

_PRINTED = 20  # pictures; the rest is in the files, without ablation
_DRAWN = 3  # pictures in the figure
_REPORTED = 400  # pictures in the report
_EXAMPLES = 3  # images of the fit per concept
_ABLATION_HELP = "Take the concepts away one by one and see what is predicted without them."
_PICTURES = typer.Argument(help="Image files, or folders of them.", show_default=False)


def explain(
    ctx: typer.Context,
    *,
    pictures: Annotated[list[str], _PICTURES],
    fit: options.FitOptions,
    top: Annotated[int, typer.Option(min=1, help="Concepts, or parts, to show for each picture.")] = 5,
    level: Annotated[float, typer.Option(min=0, max=1, help="Probability of the credible intervals.")] = 0.9,
    ablation: Annotated[bool, typer.Option("--ablation/--no-ablation", help=_ABLATION_HELP)] = True,
    skip_unreadable: options.SkipUnreadable = False,
    max_pixels: options.MaxPixels = None,
) -> dict[str, Any]:
    """Explain your own pictures with the concepts of a fit.

    Prints each picture's concepts, how certain they are, and what is predicted without them; writes a report that
    shows where in the picture they are.

    \b
    Example:
      pace fit --images color --model color --concepts 8
      pace explain photo.jpg
      pace explain photo.jpg holiday/ --run runs/fit-color-20250101-120000 --json
    """
    allow(max_pixels)
    images = _open_pictures(pictures, skip_unreadable)
    found = open_fit(ctx, fit)
    with running(ctx, Path(pictures[0]).stem or "pictures", device=found.device, fit=found.fingerprint()) as run:
        explanation = found.fitted(images, batch_size=fit.batch_size)
        run.record["results"] = results = _findings(explanation, top, level)
        explanation.to_csv(run.file("explanation.csv"), level)
        explained = results["images"]
        if ablation and explanation.observations.n_classes:
            _ablate(explanation, explained[:_PRINTED])
        shown = min(len(images), _REPORTED)
        _write(
            run, found, explanation[:shown], [_rows(picture) for picture in explained[:shown]], fit.batch_size, level
        )
    names = found.fitted.class_names or []
    titles = dict(zip(names, class_titles(names), strict=True))
    for picture in explained[:_PRINTED]:
        _show(picture, level, titles, explanation.names)
    if len(explained) > _PRINTED:
        say(f"and {len(explained) - _PRINTED} more pictures; the report shows the first {shown}")
    say(found.in_use)
    say(f"written to {run.folder}")
    say(f"the picture as a figure: {run.file('figure.png')}")
    say(run.file("report.html").resolve().as_uri())
    return run.record


def _open_pictures(paths: Sequence[str], skip_unreadable: bool) -> ImageSet:
    """Files in the order given, and the images in folders; each once."""
    for text in paths:  # before torch is imported, which takes seconds
        if not Path(text).expanduser().exists():
            raise Problem(f"{text}: no such picture or folder")
    with busy("starting"):
        from pace.images import Folder, ImageFiles

    files: list[str] = []
    for text in paths:
        path = Path(text).expanduser()
        if path.is_dir():
            folder = Folder(path)
            files += [str(folder.path(name)) for name in folder.names]
        else:
            files.append(str(path))
    return ImageFiles(Path(), list(dict.fromkeys(files)), on_error="skip" if skip_unreadable else "raise")


def _findings(explanation: ModelExplanation, top: int, level: float) -> dict[str, Any]:
    """As ``run.json`` has them: what the library says of every picture, and images of the fit that show the same."""
    found = explanation.to_dict(level, top)
    for picture in found["images"]:
        for row in picture["top_concepts"] + picture.get("top_parts", []):
            row["examples"] = explanation.explainer.gallery[row["concept"]][:_EXAMPLES]
    return found


def _rows(picture: dict[str, Any]) -> list[dict[str, Any]]:
    """What is said of a picture: its parts, each with its kind, or its concepts."""
    rows: list[dict[str, Any]] = picture.get("top_parts", picture["top_concepts"])
    return rows


def _ablate(explanation: ModelExplanation, explained: list[dict[str, Any]]) -> None:
    """Add to every row of the first pictures what is predicted without its concept, or its part in all kinds."""
    from pace.ablation import hide_somehow, numbers, take_away
    from pace.metrics.inputs import patches_of

    every, began, part_of = np.arange(len(explained)), time.monotonic(), explanation.part_of
    rows = [(number, row) for number in every for row in _rows(explained[number])]
    if not rows:
        return
    sets = [
        [k] if part_of is None else np.flatnonzero(part_of == part_of[k]).tolist()
        for k in (row["concept"] for _, row in rows)
    ]
    assert explanation.phi is not None
    with busy(f"taking {len(rows)} concepts away from {len(explained)} pictures"):
        hiding = hide_somehow(explanation.explainer.backbone, explanation.images, every)
        phi = patches_of(explanation.phi[every], explanation.prefix_tokens)
        done = take_away(hiding, phi, np.array([number for number, _ in rows]), sets, grid=explanation.grid)
    for (_, row), found in zip(rows, numbers(done), strict=True):
        row["without"] = found
    passes, seconds = hiding.passes, time.monotonic() - began
    say(f"{len(rows)} concepts taken away: {passes} forward passes, {seconds:.0f} s; --no-ablation skips it")


def _write(
    run: Run,
    fit: FitRun,
    explanation: ModelExplanation,
    rows: list[list[dict[str, Any]]],
    batch_size: int,
    level: float,
) -> None:
    """A figure and a report of the pictures, together with the images of the fit that show the same concepts best."""
    from pace.observing.extract import gathered
    from pace.showing import figures

    fitted, own = explanation.explainer, explanation.images
    title = f"What the transformer sees in {own.names[0] if len(own) == 1 else f'{len(own)} pictures'}"
    images = fitted.with_examples(own, [row["concept"] for some in rows for row in some])
    without = [{row["concept"]: row["without"] for row in some if "without" in row} for some in rows]
    if images is own:
        whole = explanation
    else:
        seen, _ = fit.observe(images.examples, False, run, batch_size=batch_size)
        discard(run)
        parts = [(range(len(own)), explanation.observations), (range(len(own), len(images)), seen)]
        whole = fitted.explained(images, gathered(parts))
    how: Any = {"preprocessing": fitted.backbone.preprocessing, "class_names": fitted.class_names, "without": without}
    with busy("drawing"):
        drawn = range(min(len(own), _DRAWN))
        drawing = figures.three_levels(fitted.concepts, images, whole.observations, shown=drawn, level=level, **how)
        figures.save(drawing, run.file("figure.png"))
    with busy("writing the report"):
        whole.report(run.file("report.html"), title, without=without)


def _show(picture: dict[str, Any], level: float, titles: Mapping[str, str], called: Sequence[Name]) -> None:
    say(picture["picture"], style="bold")
    prediction = picture["prediction"]
    first = "part and kind" if "top_parts" in picture else "concept"
    head = [first, "share θ", f"{100 * level:g} % interval", "also seen in"]
    if prediction:
        predicted = titles.get(prediction["name"], prediction["name"])
        say(f"prediction: {predicted} ({100 * prediction['probability']:.1f} %)")
        head.insert(3, f"speaks for {predicted}")
    measured = any("without" in row for row in _rows(picture))
    if measured:
        head[4:4] = ["without it", "as much elsewhere", "as much attention"]
    rows = []
    for concept in _rows(picture):
        interval = f"{concept['low']:.3f} to {concept['high']:.3f}"
        speaks = [] if concept["evidence"] is None else [f"{concept['evidence']:+.2f}"]
        if measured:
            without = concept["without"]
            speaks.append(f"{without['after']:.0%} ({without['low']:.0%} to {without['high']:.0%})")
            speaks += [f"{without['area']:.0%}", f"{without['attention']:.0%}"]
        rows.append(
            [called[concept["concept"]].label, f"{concept['theta']:.3f}", interval, *speaks, *concept["examples"][:1]]
        )
    table(head, rows, words=(0, len(head) - 1))
    say()
