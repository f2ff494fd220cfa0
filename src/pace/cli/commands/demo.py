"""`pace demo`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pace.cli import options
from pace.cli.output import busy, say, show_scores
from pace.cli.runs import running


def demo(
    ctx: typer.Context,
    concepts: Annotated[
        int, typer.Option("--concepts", "-k", min=5, help="How many concepts to look for; Color has five colours.")
    ] = 5,
    per_class: Annotated[int, typer.Option(min=10, help="Images of each class to make.")] = 500,
    seed: options.Seed = 0,
    out: options.Out = None,
    config: options.Config = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> dict[str, Any]:
    """See it work, on images and a model made for it.

    \b
    Example:
      pace demo

    Makes the Color images, lets a small transformer look at them, learns its concepts, judges them and writes a report.
    Needs no data, no weights and no network.
    """
    with busy("starting"):  # torch alone takes seconds to load
        from pace import demo as shipped

    with running(ctx, "color", out=out) as run:
        found = shipped.run(run.folder, seed=seed, n_per_class=per_class, n_concepts=concepts)
        address = found.report.resolve().as_uri()
        run.record["device"] = "cpu"
        run.record["results"] = {
            "report": str(found.report.relative_to(run.folder)),
            "figures": [str(figure.relative_to(run.folder)) for figure in found.figures],
            "address": address,
            "true_colour_stability": found.true_colour_stability,
            **found.scores.as_dict(),
        }
    show_scores(found.scores)
    say(f"{found.seconds:.0f} seconds; everything is in {run.folder}")
    say("open this page:")
    say(address, style="bold")
    return run.record
