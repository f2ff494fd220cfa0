"""`pace name` and `pace find`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pace.cli import fits, observing, options
from pace.cli.errors import Problem
from pace.cli.output import busy, say, table
from pace.cli.runs import Run, open_run
from pace.editing import Edits
from pace.files import CONCEPTS
from pace.naming import use_of

if TYPE_CHECKING:
    from pace.explainer import PACE
    from pace.words import Words

_FOUND = 10  # concepts listed by `pace find`

_LIST = "Concepts, such as A2,A3 or 4,17; a part stands for all its kinds."
_WHAT = typer.Argument(
    metavar="[CONCEPT]", help="Its number, A3 for a kind, A for a part, or its name.", show_default=False
)
_NAME = typer.Argument(metavar="[NAME]", help='What to call it; "" takes the name away.', show_default=False)
_WORDS = typer.Option(metavar="FILE", help="Words to suggest, one in a line.", show_default="those of the package")
_CLIP = typer.Option(
    metavar="NAME|PATH",
    help="An image-text model: of open_clip (ViT-B-32/openai), a Hugging Face name, or a file.",
    show_default="the explained model, if it is one",
)


def name(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a `pace fit`.")],
    what: Annotated[str | None, _WHAT] = None,
    called: Annotated[str | None, _NAME] = None,
    hide: Annotated[str | None, typer.Option(metavar="LIST", help=f"Leave out of lists. {_LIST}")] = None,
    show: Annotated[str | None, typer.Option(metavar="LIST", help="Show hidden ones again.")] = None,
    merge: Annotated[str | None, typer.Option(metavar="LIST", help="Make these one, with the first's number.")] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Take the last change back.")] = False,
    suggest: Annotated[bool, typer.Option("--suggest", help="Suggest names, by an image-text model.")] = False,
    words: Annotated[str | None, _WORDS] = None,
    clip: Annotated[str | None, _CLIP] = None,
    device: options.Device = "auto",
) -> dict[str, Any]:
    """Name, hide or merge concepts; without a change, list them.

    \b
    Example:
      pace name runs/birds A "head"
      pace name runs/birds A3 "red face"
      pace name runs/birds --merge A3,A5
      pace name runs/birds --undo

    Names are kept in the run, and used wherever a concept is shown.
    """
    chosen = open_run(run, "fit")
    changes = {"hide": hide, "show": show, "merge": merge}
    asked = [what is not None, undo, suggest, *(some is not None for some in changes.values())]
    if sum(asked) > 1:
        raise Problem("one change at a time: a name, --hide, --show, --merge, --undo or --suggest")
    if what is not None and called is None:
        raise Problem(f'pace name {run} {what} "…" needs the name')
    if suggest:
        return _suggest(chosen, words, clip, device)
    concepts = _concepts(chosen)
    edits = Edits(concepts.names_, chosen.folder)
    said = None
    if what is not None:
        said = edits.name(what, str(called))
    elif undo:
        said = f"taken back: {edits.undo()}"
    else:
        for verb, some in changes.items():
            if some is not None:
                said = getattr(edits, verb)(*(one.strip() for one in some.split(",")))
    if said is None:
        _list(chosen, concepts, edits)
    else:
        say(said)
    document = [
        {"concept": one.number, "short": one.short, "name": one.long, "hidden": one.hidden, "merged_into": one.into}
        for one in edits.names
    ]
    return {"changed": said, "concepts": document}


def find(
    text: Annotated[str, typer.Argument(metavar="TEXT", help='What to look for, such as "red head".')],
    fit_run: Annotated[str | None, options.RUN] = None,
    clip: Annotated[str | None, _CLIP] = None,
    device: options.Device = "auto",
) -> dict[str, Any]:
    """Find the concepts that a text suits, by an image-text model.

    \b
    Example:
      pace find "red head" --clip ViT-B-32/openai
    """
    looking, gallery = _words(fits.chosen_run(fit_run), clip, device)
    names, found = looking.names, looking.find(text)
    rows = [[names[one.concept].label, f"{one.score:.2f}", *gallery[one.concept][:1]] for one in found[:_FOUND]]
    table(["concept", "score", "nearest patch in"], rows, words=(0, 2))
    say("the score is how often the text suits a patch of this concept better than one of another; 0.5 is chance")
    return {"text": text, "found": [one._asdict() for one in found]}


def _concepts(run: Run) -> PACE:
    with busy("starting"):
        from pace.explainer import PACE

    return PACE.load(run.file(CONCEPTS))


def _list(run: Run, concepts: PACE, edits: Edits) -> None:
    for group in edits.merges:
        concepts = concepts.merged(*group)
    use, names = use_of(concepts.concept_weights_), edits.names
    gallery = fits.read_gallery(run, len(names))
    shown = [names[k] for k in use.order if not names[k].hidden]
    rows = [[one.short, one.label, f"{100 * use.shares[one.number]:.1f} %", gallery[one.number][0]] for one in shown]
    table(["concept", "name", "share of the images", "nearest patch in"], rows, words=(0, 1, 3))
    if hidden := [one.label for one in names if one.hidden and one.into is None]:
        say(f"and {len(hidden)} hidden: {', '.join(hidden)}")
    for one in names:
        if one.into is not None:
            say(f"{one.short} was merged into {names[one.into].short}")


def _words(run: Run, clip: str | None, device: str) -> tuple[Words, list[list[str]]]:
    from pace.words import Words

    explainer, source = fits.load_run(run.folder, device=device), observing.source_of(run)
    kept = observing.kept_views(source, False)[0] if observing.has_kept(source) else None
    with busy("looking at the concepts"):
        return Words(explainer, clip, observations=kept), explainer.gallery


def _suggest(run: Run, words: str | None, clip: str | None, device: str) -> dict[str, Any]:
    looking, gallery = _words(run, clip, device)
    names, found = looking.names, looking.suggest(None if words is None else Path(words))
    rows = [
        [
            names[one.concept].label,
            one.name or "no good name",
            f"{one.score:.2f}",
            one.closest,
            *gallery[one.concept][:1],
        ]
        for one in found
    ]
    table(["concept", "suggested", "score", "closest word", "nearest patch in"], rows, words=(0, 1, 3, 4))
    say("the score is how often the word suits a patch of this concept better than one of another; 0.5 is chance")
    say(f'take one with: pace name {run.folder} {names[found[0].concept].short} "{found[0].closest}"')
    return {"suggestions": [one._asdict() for one in found]}
