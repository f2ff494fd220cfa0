"""`pace explain`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from pace.cli import options
from pace.cli.errors import Problem, line_of
from pace.cli.opening import FitRun, allow, discard, open_fit, reopen_images
from pace.cli.output import busy, say, table
from pace.cli.runs import Run, running
from pace.naming import class_titles

if TYPE_CHECKING:
    from torch import Tensor

    from pace.explanation import Array
    from pace.images import ImageSet
    from pace.observations import Observations

_PRINTED = 20  # pictures; the rest is in the files, without ablation
_DRAWN = 3  # pictures in the figure
_REPORTED = 400  # pictures in the report
_EXAMPLES = 3  # images of the fit per concept
_DIGITS = 6
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
    from pace.observing.extract import observe

    with running(ctx, Path(pictures[0]).stem or "pictures", device=found.device, fit=found.fingerprint()) as run:
        observed = observe(found.model.backbone, images, batch_size=fit.batch_size)
        run.record["results"] = results = _findings(found, images, observed, top, level)
        explained = results["images"]
        if ablation and observed.n_classes:
            _ablate(found, images, observed, explained[:_PRINTED])
        shown = images.subset(range(min(len(images), _REPORTED)))
        _write(run, found, shown, observed, explained, fit.batch_size, level)
    for picture in explained[:_PRINTED]:
        _show(picture, level, class_titles(found.model.class_names or ()))
    if len(explained) > _PRINTED:
        say(f"and {len(explained) - _PRINTED} more pictures; the report shows the first {len(shown)}")
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


def _findings(fit: FitRun, images: ImageSet, observed: Observations, top: int, level: float) -> dict[str, Any]:
    """As ``run.json`` has them: prediction and concepts of every picture, and their names where they are kinds of parts."""
    from pace.naming import concept_names
    from pace.showing.summary import predicted_classes

    explanation = fit.concepts.explain(observed)
    assert explanation.phi is not None
    evidence, *shares = _rounded(fit.concepts.label_head_, explanation.theta, *explanation.interval(level))
    by_part = explanation.part_of is not None
    part_shares = _rounded(explanation.parts, *explanation.part_interval(level)) if by_part else []
    called = concept_names(explanation.part_of, fit.concepts.concept_weights_)
    kinds = [{"part": name.part, "kind": name.kind} if by_part else {} for name in called]
    patches = explanation.phi[:, explanation.prefix_tokens :].argmax(2)
    names, predicted = fit.model.class_names, predicted_classes(observed)
    gallery = fit.gallery()

    def row(k: int, share: list[float], prediction: dict[str, Any] | None) -> dict[str, Any]:
        eta = evidence[k, prediction["class"]] if prediction else None
        sure = dict(zip(("theta", "low", "high"), share, strict=True))
        return {"concept": int(k), **kinds[k], **sure, "eta": eta, "examples": gallery[k][:_EXAMPLES]}

    found = []
    for number, name in enumerate(images.names):
        prediction: dict[str, Any] | None = None
        if predicted is not None and names is not None and observed.predictions is not None:
            c = int(predicted[number])
            probability = round(float(observed.predictions[number, c]), _DIGITS)
            prediction = {"class": c, "name": names[c], "probability": probability}
        picture: dict[str, Any] = {"picture": name, "prediction": prediction}
        picture["top_concepts"] = [
            row(k, [values[number, k] for values in shares], prediction)
            for k in explanation.shown_concepts(number, top)
        ]
        if by_part:
            picture["top_parts"] = [
                row(explanation.kind_of(number, p), [values[number, p] for values in part_shares], prediction)
                for p in explanation.shown_parts(number, top)
            ]
        picture["theta"] = shares[0][number]
        picture["patch_concepts"] = patches[number].reshape(explanation.grid or -1)
        found.append(picture)
    return {"level": level, "images": found, **({"concepts": kinds} if by_part else {})}


def _ablate(fit: FitRun, images: ImageSet, observed: Observations, explained: list[dict[str, Any]]) -> None:
    """Add to every row of the first pictures what is predicted without its concept, or its part in all kinds."""
    from pace.ablation import hide_somehow, numbers, take_away
    from pace.metrics.inputs import patches_of

    every, began = np.arange(len(explained)), time.monotonic()
    explanation = fit.concepts.explain(observed[every])
    part_of = explanation.part_of
    rows = [(number, row) for number in every for row in _rows(explained[number])]
    if not rows:
        return
    sets = [
        [k] if part_of is None else np.flatnonzero(part_of == part_of[k]).tolist()
        for k in (row["concept"] for _, row in rows)
    ]
    with busy(f"taking {len(rows)} concepts away from {len(explained)} pictures"):
        hiding = hide_somehow(fit.model.backbone, images, every)
        phi = patches_of(explanation.phi, explanation.prefix_tokens)
        done = take_away(hiding, phi, np.array([number for number, _ in rows]), sets, grid=explanation.grid)
    for (_, row), found in zip(rows, numbers(done), strict=True):
        row["without"] = found
    passes, seconds = hiding.passes, time.monotonic() - began
    say(f"{len(rows)} concepts taken away: {passes} forward passes, {seconds:.0f} s; --no-ablation skips it")


def _rounded(*arrays: Array) -> list[Array]:
    return [values.astype(float).round(_DIGITS) for values in arrays]


def _rows(picture: dict[str, Any]) -> list[dict[str, Any]]:
    """What is said of a picture: its parts, each with its kind, or its concepts."""
    rows: list[dict[str, Any]] = picture.get("top_parts", picture["top_concepts"])
    return rows


def _write(
    run: Run,
    fit: FitRun,
    images: ImageSet,
    observed: Observations,
    explained: list[dict[str, Any]],
    batch_size: int,
    level: float,
) -> None:
    """A figure and a report of the pictures, together with the images of the fit that show the same concepts best."""
    from pace.observing.extract import gathered
    from pace.showing import figures
    from pace.showing.report import write_report

    title = f"What the transformer sees in {images.names[0] if len(images) == 1 else f'{len(images)} pictures'}"
    drawn, own = range(min(len(images), _DRAWN)), range(len(images))
    rows = [_rows(picture) for picture in explained[: len(images)]]
    concepts = [row["concept"] for some in rows for row in some]
    without = [{row["concept"]: row["without"] for row in some if "without" in row} for some in rows]
    try:
        examples = _examples(fit, concepts)
        seen, _ = fit.observe(examples, False, run, batch_size=batch_size)
        discard(run)
        observed = gathered([(own, observed[own]), (range(len(images), len(images) + len(examples)), seen)])
        images = _joined(images, examples)
    except (ValueError, OSError) as error:
        warnings.warn(f"concepts are only shown in these pictures: {line_of(error)}", stacklevel=2)
        observed = observed[own]
    backbone, names = fit.model.backbone, fit.model.class_names
    shown: Any = (fit.concepts, images, observed)
    how: Any = {"preprocessing": backbone.preprocessing, "class_names": names}
    with busy("drawing"):
        figures.save(
            figures.three_levels(*shown, shown=drawn, level=level, without=without, **how), run.file("figure.png")
        )
    with busy("writing the report"):
        write_report(run.file("report.html"), *shown, title=title, without=without, **how)


def _examples(fit: FitRun, concepts: Sequence[int]) -> ImageSet:
    """The images of the fit that show these concepts best."""
    seen, gallery = reopen_images(fit.run), fit.gallery()
    best = dict.fromkeys(name for concept in concepts for name in gallery[concept][:_EXAMPLES])
    place = {name: number for number, name in enumerate(seen.names)}
    return seen.subset(place[name] for name in best)


def _joined(images: ImageSet, examples: ImageSet) -> ImageSet:
    """The images, followed by the examples."""
    from pace.images import ImageSet

    class Joined(ImageSet):
        def __getitem__(self, index: int) -> Tensor:
            return images[index] if index < len(images) else examples[index - len(images)]

        def fingerprint(self) -> str:
            return f"{images.fingerprint()}+{examples.fingerprint()}"

    names = [f"{name} (example)" if name in images.names else name for name in examples.names]
    return Joined([*images.names, *names], None, None)


def _show(picture: dict[str, Any], level: float, classes: Sequence[str]) -> None:
    from pace.naming import kind_label

    say(picture["picture"], style="bold")
    prediction = picture["prediction"]
    first = "part and kind" if "top_parts" in picture else "concept"
    head = [first, "share θ", f"{100 * level:g} % interval", "also seen in"]
    if prediction:
        predicted = classes[prediction["class"]]
        say(f"prediction: {predicted} ({100 * prediction['probability']:.1f} %)")
        head.insert(3, f"η for {predicted}")
    measured = any("without" in row for row in _rows(picture))
    if measured:
        head[4:4] = ["without it", "as much elsewhere", "as much attention"]
    rows = []
    for concept in _rows(picture):
        interval = f"{concept['low']:.3f} to {concept['high']:.3f}"
        eta = [] if concept["eta"] is None else [f"{concept['eta']:+.2f}"]
        name = kind_label(concept["part"], concept["kind"]) if "part" in concept else str(concept["concept"])
        if measured:
            without = concept["without"]
            eta.append(f"{without['after']:.0%} ({without['low']:.0%} to {without['high']:.0%})")
            eta += [f"{without['area']:.0%}", f"{without['attention']:.0%}"]
        rows.append([name, f"{concept['theta']:.3f}", interval, *eta, concept["examples"][0]])
    table(head, rows, words=(0, len(head) - 1))
    say()
