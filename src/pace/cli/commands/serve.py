"""`pace serve`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pace.cli import options
from pace.cli.errors import Problem
from pace.cli.fits import open_fit
from pace.cli.opening import allow, open_images
from pace.cli.output import busy, say
from pace.cli.runs import Run

if TYPE_CHECKING:
    from pace.serving import Session

_RUN = typer.Argument(metavar="RUN", help="Folder of a `pace fit`.", show_default="the latest in runs/")
_IMAGES = typer.Option(
    metavar="FOLDER|NAME", help="Pictures to begin with.", show_default="those of the fit, or their test split"
)
_LIMIT = typer.Option(min=1, help="Begin with a random sample of this many.")
_PORT = typer.Option(min=0, max=65535, help="Of the address, for a tunnel.", show_default="any that is free")
_MODEL = typer.Option("--model", metavar="PATH", help="Where the run's model is, if it has moved.")


def serve(
    ctx: typer.Context,
    run: Annotated[str | None, _RUN] = None,
    images: Annotated[str | None, _IMAGES] = None,
    data_root: options.DataRoot = None,
    limit: Annotated[int, _LIMIT] = 200,
    port: Annotated[int, _PORT] = 0,
    model: Annotated[str | None, _MODEL] = None,
    max_pixels: options.MaxPixels = None,
    device: options.Device = "auto",
) -> dict[str, Any]:
    """A live page, on this machine alone: drop a picture on it.

    Shows a picture's parts and kinds, what is predicted, and what is predicted without the ones you switch off. There
    you also name, hide and merge concepts, which is kept in the run.

    \b
    Example:
      pace fit --images birds --model birds --concepts 40
      pace serve

    Open the address it prints; Ctrl-C ends it. Nobody else can open it, and pictures stay on this machine.
    """
    with busy("starting"):  # importing torch takes seconds
        try:
            from pace import serving
        except ModuleNotFoundError as error:
            raise Problem(f"{error}; pace serve needs it: pip install 'pace-xai[serve]'") from None
    with serving.listening(port) as listener:
        session = _session(ctx, options.FitOptions(fit_run=run, moved=model, device=device), images, data_root, limit)
        allow(max_pixels)
        say("open this page; Ctrl-C ends it:")
        with suppress(KeyboardInterrupt):  # how it ends
            serving.serve(session, listener, say)
        say("stopped")
        return {"images": len(session.images), "dropped": session.dropped}


def _session(
    ctx: typer.Context, fit: options.FitOptions, images: str | None, data_root: str | None, limit: int
) -> Session:
    from pace.serving import Session

    found = open_fit(ctx, fit)
    choice = found.other_images(options.ImageOptions(images=images, data_root=data_root, limit=limit))
    if choice.images is None:
        raise Problem("the images of this run were given in Python; name some with --images")
    shown = open_images(choice)
    with TemporaryDirectory() as folder:
        seen, perturbed = found.observe(shown, True, Run(Path(folder), {}), others=found.evaluations()[-1:])
    assert perturbed is not None
    say(found.in_use)
    with busy("making the page"):
        return Session(
            found.fitted, shown, (seen, perturbed), f"What the transformer sees in {Path(choice.images).name}"
        )
