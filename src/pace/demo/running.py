"""`pace.demo.run`: from nothing to a report."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pace import __version__
from pace.atomic import write_atomically
from pace.backbones.color_vit import LAYER, SIZE, load_model
from pace.demo.truth import stability_of_true_colours, true_colours
from pace.explainer import PACE
from pace.images import Color, Perturbation
from pace.metrics import Score, Scores
from pace.progress import announce

N_CONCEPTS = 5  # four colours and black


@dataclass(frozen=True)
class DemoResult:
    """Where everything is, and the numbers."""

    folder: Path
    report: Path
    figures: tuple[Path, ...]
    model: PACE
    scores: Scores
    true_colour_stability: float  # of an explanation by the true colours, under the same perturbation
    seconds: float


def run(
    folder: str | os.PathLike[str],
    *,
    seed: int = 0,
    n_per_class: int = 500,
    n_concepts: int = N_CONCEPTS,
    progress: bool | None = None,
) -> DemoResult:
    """Make Color images, let the shipped transformer look at them, learn its concepts, judge them, and write a report.

    Parameters
    ----------
    folder
        Where everything goes; it is made if it is not there.
    seed
        Of the images, the perturbations and PACE.
    n_per_class
        Images of each class; four fifths are learned from, one fifth is judged and shown.
    n_concepts
        K. Color has five colours; with many more concepts than that each colour is split into several.
    progress
        Show bars; by default only on a terminal, for what takes longer than a second.
    """
    if n_concepts < N_CONCEPTS:
        raise ValueError(f"n_concepts: expected at least {N_CONCEPTS}, one for each colour; found {n_concepts}")
    began = time.monotonic()
    folder = Path(folder)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    with _one_thread():
        return _run(folder, began, seed, n_per_class, n_concepts, progress)


@contextmanager
def _one_thread() -> Iterator[None]:
    """The tensors here are too small for more threads to help, and on a busy machine threads that wait for each other
    take many times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with import_module("threadpoolctl").threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(threads)


def _true_colours(stability: float) -> Score:
    return Score(
        name="stability_true_colours",  # the report shows it beside stability
        title="Stability of the true colours",
        value=stability,
        low=None,
        high=None,
        better=None,
        range=(0, math.inf),
        meaning="What stability would be if the concepts were the true colours, which the perturbation changes too.",
    )


def _run(folder: Path, began: float, seed: int, n_per_class: int, n_concepts: int, progress: bool | None) -> DemoResult:
    announce("making the images and loading the transformer", progress)
    from pace.backbones import Backbone
    from pace.metrics import evaluate
    from pace.observing.extract import observe_pair
    from pace.showing import figures
    from pace.showing.report import write_report

    train, test = (Color(split, n_per_class=n_per_class, size=SIZE, seed=seed) for split in ("train", "test"))
    backbone = Backbone(load_model(), layer=LAYER)
    announce(f"the transformer looks at {len(train) + len(test)} images, as they are and perturbed", progress)
    # A train image and a test image of the same number are not perturbed alike.
    learned, learned_perturbed = observe_pair(backbone, train, perturb=Perturbation(seed + 1), progress=progress)
    perturb = Perturbation(seed)
    seen, seen_perturbed = observe_pair(backbone, test, perturb=perturb, progress=progress)

    announce(f"learning {n_concepts} concepts", progress)
    settings: dict[str, Any] = {"n_concepts": n_concepts, "covariance": "tied", "alpha": "learn", "seed": seed}
    model = PACE(**settings, progress=progress).fit(learned, perturbed=learned_perturbed)
    grid = backbone.grid(SIZE, SIZE)
    announce("judging them on images they have not seen", progress)
    scores = evaluate(model, learned, seen, seen_perturbed, colours=true_colours(test, grid), seed=seed)
    reference = stability_of_true_colours(test, perturb, grid, n_concepts)
    scores = Scores([*scores.values(), _true_colours(reference)], scores.warnings)

    announce("writing the report and the figures", progress)
    pixels = torch.stack([test[index] for index in range(len(test))]).float() / 255
    model.save(folder / "model.safetensors")
    report = write_report(
        folder / "report.html",
        model,
        test,
        seen,
        perturbed=seen_perturbed,
        perturbed_images=perturb(pixels, range(len(test))),
        scores=scores,
        preprocessing=backbone.preprocessing,
        title="Color: what a small vision transformer sees",
    )
    shown = backbone.preprocessing
    drawn = {
        "three-levels": figures.three_levels(model, test, seen, preprocessing=shown, n_concepts=N_CONCEPTS),
        "classes": figures.class_concepts(model, test, seen, preprocessing=shown),
        "concepts": figures.concept_gallery(model, test, seen, preprocessing=shown),
        "bound": figures.bound(model),
        "concept-map": figures.concept_map(model),
    }
    saved = tuple(figures.save(figure, folder / "figures" / f"{name}.png", dpi=150) for name, figure in drawn.items())
    seconds = time.monotonic() - began
    record = {
        "settings": {"n_per_class": n_per_class, "layer": LAYER, **settings},
        "versions": {"pace": __version__, **{name: version(name) for name in ("torch", "timm", "numpy")}},
        "seconds": round(seconds, 1),
        "true_colour_stability": reference,
        **scores.as_dict(),
    }
    write_atomically(folder / "scores.json", json.dumps(record, indent=1).encode())
    return DemoResult(folder, report, saved, model, scores, reference, seconds)
