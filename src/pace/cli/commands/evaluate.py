"""`pace evaluate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from pace.cli import options
from pace.cli.fits import open_fit
from pace.cli.observing import discard, has_kept, in_memory, kept_views, source_of
from pace.cli.opening import image_record, reopen_images
from pace.cli.output import note, say, show_scores
from pace.cli.runs import running

if TYPE_CHECKING:
    import torch

_HIDDEN, _RUNS = 32, 60  # images whose concepts are hidden by default, and about how often the model runs for each
_HIDING = typer.Option(
    min=0,
    help="Test images whose concepts are removed and added; 0 for none.",
    show_default=f"{_HIDDEN}; on a CPU none, unless that takes less than a fifth of the time",
)


def evaluate(
    ctx: typer.Context,
    *,
    fit: options.FitOptions,
    images: options.ImageOptions,
    keep: options.Keep = True,
    bootstrap: options.Bootstrap = 200,
    every: Annotated[bool, typer.Option("--all", help="Print all scores, not only the main ones.")] = False,
    hidden_images: Annotated[int | None, _HIDING] = None,
) -> dict[str, Any]:
    """Score a fit, and say what to believe.

    \b
    Example:
      pace fit --images color --model color --concepts 8
      pace evaluate

    Uses the test split of the fit's images, unless --images names others. Warns where scores mislead.
    """
    found = open_fit(ctx, fit)
    from pace.metrics import evaluate as score
    from pace.metrics import hide
    from pace.metrics.ground_truth import known_truth

    backbone = found.fitted.backbone
    choice = found.other_images(images)
    test, rest = found.test_images(choice)
    about = {"images": image_record(choice, test), "fit": found.fingerprint()}
    with running(ctx, choice.images, device=found.device, **about) as run:
        kept = source_of(found.run)
        if has_kept(kept):
            train, _ = kept_views(kept, pairs=False)
            if found.device.type == "cuda":  # they are read more than once
                train, _ = in_memory((train, None), found.device)
        else:
            train, _ = found.observe(reopen_images(found.run), False, run, batch_size=fit.batch_size)
            discard(run)
        seen, perturbed = found.observe(
            test, True, run, images.seed, fit.batch_size, found.evaluations()[-1:], near=True
        )
        truth = known_truth(test, backbone.preprocessing, seen.grid) if seen.grid else {}
        train = train if rest is None else train[rest]
        hiding = None
        if hidden_images is None and seen.n_classes:
            hidden_images = _hidden(found.device, len(test))
        if hidden_images and seen.n_classes:
            order = np.random.default_rng(images.seed).permutation(len(test))
            hiding = hide(backbone, test, np.sort(order[:hidden_images]))
        more: dict[str, Any] = {"hiding": hiding, "bootstrap": bootstrap, "seed": images.seed, **truth}
        scores = score(found.fitted.concepts, train, seen, perturbed, **more)
        run.record["results"] = {"images": len(test), **scores.as_dict()}
        if not keep:
            discard(run)
    show_scores(scores, every)
    say(f"{len(test)} images, {found.in_use}")
    say(f"written to {run.folder}")
    say(scores.verdict, style="bold")
    return run.record


def _hidden(device: torch.device, images: int) -> int:
    """How many images to hide concepts of, where nobody says."""
    if device.type != "cpu" or 2 * images / 5 >= _HIDDEN * _RUNS:
        return _HIDDEN
    note(
        f"deletion and insertion by concept are left out; --hidden-images {_HIDDEN} takes {_HIDDEN * _RUNS} runs of the model"
    )
    return 0
