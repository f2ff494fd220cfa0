"""`pace explain`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pace.cli import options
from pace.cli.errors import Problem
from pace.cli.opening import open_fit
from pace.cli.output import busy, say, table
from pace.cli.runs import Run, running

if TYPE_CHECKING:
    from pace.images import ImageSet
    from pace.model_explainer import ModelExplanation

_PRINTED = 20  # pictures; the rest is in the files
_DRAWN = 3  # pictures in the figure
_REPORTED = 400  # pictures in the report
_EXAMPLES = 3  # images of the fit per concept
_PICTURES = typer.Argument(help="Image files, or folders of them.", show_default=False)


def explain(
    ctx: typer.Context,
    *,
    pictures: Annotated[list[str], _PICTURES],
    fit: options.FitOptions,
    top: Annotated[int, typer.Option(min=1, help="Concepts, or parts, to show for each picture.")] = 5,
    level: Annotated[float, typer.Option(min=0, max=1, help="Probability of the credible intervals.")] = 0.9,
    skip_unreadable: options.SkipUnreadable = False,
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
    images = _open_pictures(pictures, skip_unreadable)
    found = open_fit(ctx, fit)
    with running(ctx, Path(pictures[0]).stem or "pictures", device=found.device) as run:
        explanation = found.fitted(images, batch_size=fit.batch_size)
        run.record["results"] = results = _findings(explanation, top, level)
        explanation.to_csv(run.file("explanation.csv"), level)
        explained = results["images"]
        shown = min(len(images), _REPORTED)
        concepts = [row["concept"] for picture in explained[:shown] for row in _rows(picture)]
        _write(run, explanation[:shown], concepts, fit.batch_size, level)
    for picture in explained[:_PRINTED]:
        _show(picture, level)
    if len(explained) > _PRINTED:
        say(f"and {len(explained) - _PRINTED} more pictures; the report shows the first {shown}")
    say(found.in_use)
    say(f"written to {run.folder}")
    say(run.file("report.html").resolve().as_uri())
    return run.record


def _open_pictures(paths: Sequence[str], skip_unreadable: bool) -> ImageSet:
    """Files in the order given, and the images in folders; each once."""
    with busy("starting"):  # importing torch takes seconds
        from pace.images import Folder, ImageFiles

    files: list[str] = []
    for text in paths:
        path = Path(text).expanduser()
        if path.is_dir():
            folder = Folder(path)
            files += [str(folder.path(name)) for name in folder.names]
        elif path.is_file():
            files.append(str(path))
        else:
            raise Problem(f"{text}: no such picture or folder")
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


def _write(run: Run, explanation: ModelExplanation, concepts: Sequence[int], batch_size: int, level: float) -> None:
    """A figure and a report of the pictures, together with the images of the fit that show the same concepts best."""
    from pace.showing import figures

    fitted, own = explanation.explainer, explanation.images
    title = f"What the transformer sees in {own.names[0] if len(own) == 1 else f'{len(own)} pictures'}"
    images = fitted.with_examples(own, concepts)
    with busy("drawing"):
        whole = explanation if images is own else fitted(images, batch_size=batch_size)
        how: Any = {"preprocessing": fitted.backbone.preprocessing, "class_names": fitted.class_names, "level": level}
        drawn = figures.three_levels(
            fitted.concepts, images, whole.observations, shown=range(min(len(own), _DRAWN)), **how
        )
        figures.save(drawn, run.file("figure.png"))
    with busy("writing the report"):
        whole.report(run.file("report.html"), title)


def _show(picture: dict[str, Any], level: float) -> None:
    from pace.naming import kind_label

    say(picture["picture"], style="bold")
    prediction = picture["prediction"]
    first = "part and kind" if "top_parts" in picture else "concept"
    head = [first, "share θ", f"{100 * level:g} % interval", "also seen in"]
    if prediction:
        say(f"prediction: {prediction['name']} ({100 * prediction['probability']:.1f} %)")
        head.insert(3, f"speaks for {prediction['name']}")
    rows = []
    for concept in _rows(picture):
        interval = f"{concept['low']:.3f} to {concept['high']:.3f}"
        speaks = [] if concept["evidence"] is None else [f"{concept['evidence']:+.2f}"]
        name = kind_label(concept["part"], concept["kind"]) if "part" in concept else str(concept["concept"])
        rows.append([name, f"{concept['theta']:.3f}", interval, *speaks, *concept["examples"][:1]])
    table(head, rows, words=(0, len(head) - 1))
    say()
