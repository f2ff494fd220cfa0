"""`pace demo`."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from pace.cli import options
from pace.cli.output import busy, say, show_scores
from pace.cli.runs import running


def demo(
    ctx: typer.Context,
    concepts: Annotated[int, typer.Option("--concepts", "-k", min=2, help="Number of concepts.")] = 24,
    per_class: Annotated[int, typer.Option(min=10, help="Birds to draw of each class.")] = 60,
    seed: options.Seed = 0,
) -> dict[str, Any]:
    """See it work on birds that it draws itself.

    \b
    Example:
      pace demo

    Draws birds, learns by which parts a small transformer, which comes with the package, tells them apart, scores this
    against the true ones and writes a report. Needs no data, weights or network.
    """
    with busy("starting"):  # importing torch takes seconds
        from pace import demo as library

    with running(ctx, "birds") as run:
        found = library.run(run.folder, seed=seed, n_per_class=per_class, n_concepts=concepts)
        address = found.report.resolve().as_uri()
        run.record["device"] = "cpu"
        run.record["results"] = {"address": address, **found.scores.as_dict()}
    show_scores(found.scores)
    say(found.scores.verdict, style="bold")
    say(f"{found.seconds:.0f} seconds; everything is in {run.folder}")
    say(f"try it: pace serve {shlex.quote(str(run.file('run')))} --images birds")
    say("open this page:")
    say(address, style="bold")
    return run.record
