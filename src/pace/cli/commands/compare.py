"""`pace compare`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pace.cli import options
from pace.cli.fits import load_run
from pace.cli.output import say, table

_ALIKE = 0.1  # of the patches of either that both hold, from which concepts are listed as the same
_IMAGES = typer.Option(metavar="FOLDER", help="Images both look at.", show_default="some of those of the first fit")


def compare(
    one: Annotated[str, typer.Argument(metavar="A", help="Folder of a `pace fit`.")],
    other: Annotated[str, typer.Argument(metavar="B", help="Another one, of the same model or of a different one.")],
    images: Annotated[str | None, _IMAGES] = None,
    device: options.Device = "auto",
) -> dict[str, Any]:
    """Say which concepts of two fits are the same.

    These are the ones that lie in the same places of the same images.

    \b
    Example:
      pace compare runs/birds runs/birds-seed-1
    """
    first, second = (load_run(folder, device=device) for folder in (one, other))
    from pace.comparing import compare as matched

    found = matched(first, second, images)
    alike = [match for match in found if match.alike >= _ALIKE]
    rows = [[match.one_name, match.other_name, f"{100 * match.alike:.0f} %"] for match in alike]
    table([one, other, "patches in common"], rows, words=(0, 1))
    if len(alike) < len(found):
        say(f"{len(found) - len(alike)} concepts of {one} have no counterpart with {100 * _ALIKE:.0f} % in common")
    mean = sum(match.alike for match in found) / len(found)
    say(f"{len(found)} pairs; on average {100 * mean:.0f} % of the patches that either holds are held by both")
    return {"matches": [match._asdict() for match in found], "mean": mean}
