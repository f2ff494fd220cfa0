"""PACE from beginning to end on Birds drawn on the spot and the small vision transformer that is shipped.

Needs no data and no network.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from pace.backbones.birds_vit import LAYER, SIZE, load_model
from pace.explainer import PACE
from pace.images import Birds, Perturbation, to_float
from pace.metrics import Scores
from pace.progress import announce

N_PER_CLASS, N_CONCEPTS, N_PARTS = 60, 24, 8


@dataclass(frozen=True)
class DemoResult:
    """Where everything is, and the numbers."""

    folder: Path
    report: Path
    figures: tuple[Path, ...]
    model: PACE
    scores: Scores
    seconds: float


def run(
    folder: str | os.PathLike[str],
    *,
    seed: int = 0,
    n_per_class: int = N_PER_CLASS,
    n_concepts: int = N_CONCEPTS,
    progress: bool | None = None,
) -> DemoResult:
    """Draw birds, run the shipped transformer on them, learn its concepts, score them, and write a report.

    Parameters
    ----------
    folder
        Where everything goes; it is made if it does not exist.
    seed
        Of the images, the perturbations and PACE.
    n_per_class
        Images of each class; four fifths are learned from, one fifth is scored and shown.
    n_concepts
        K. Birds have eight parts, the background among them, of 23 kinds in all; PACE is told the number of parts.
    progress
        Show progress bars; by default only on a terminal, for what takes longer than a second.
    """
    folder = Path(folder)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more do not help such small tensors, and on a busy machine are many times slower
    try:
        with import_module("threadpoolctl").threadpool_limits(1):
            return _run(folder, seed, n_per_class, n_concepts, progress)
    finally:
        torch.set_num_threads(threads)


def _run(folder: Path, seed: int, n_per_class: int, n_concepts: int, progress: bool | None) -> DemoResult:
    began = time.monotonic()
    announce("drawing the birds and loading the transformer", progress)
    from pace.backbones import Backbone, ModelChoice
    from pace.metrics import evaluate
    from pace.metrics.ground_truth import known_truth
    from pace.model_explainer import ModelExplainer, typical_images
    from pace.observing.extract import observe_pair
    from pace.showing.report import write_report

    train, test = (Birds(split, n_per_class=n_per_class, size=SIZE, seed=seed) for split in ("train", "test"))
    backbone = Backbone(load_model(), layer=LAYER, attention_layer=-1)
    announce(f"running the transformer on {len(train) + len(test)} images, as they are and perturbed", progress)
    # Another seed, so that train and test images of the same number are not perturbed alike.
    learned, learned_perturbed = observe_pair(backbone, train, perturb=Perturbation(seed + 1), progress=progress)
    perturb = Perturbation(seed)
    seen, seen_perturbed = observe_pair(backbone, test, perturb=perturb, progress=progress)

    announce(f"learning {n_concepts} concepts", progress)
    model = PACE(n_concepts, parts=N_PARTS, seed=seed, progress=progress).fit(learned, perturbed=learned_perturbed)
    announce("scoring them on images they have not seen", progress)
    truth: dict[str, Any] = known_truth(test, backbone.preprocessing, backbone.grid(SIZE, SIZE))
    scores = evaluate(model, learned, seen, seen_perturbed, **truth, seed=seed)

    announce("writing the report and the figures", progress)
    model.save(folder / "model.safetensors")
    pixels = to_float(torch.stack([test[index] for index in range(len(test))]))
    shown: dict[str, Any] = {"images": test, "observations": seen, "preprocessing": backbone.preprocessing}
    report = write_report(
        folder / "report.html",
        model,
        **shown,
        perturbed=seen_perturbed,
        perturbed_images=perturb(pixels, range(len(test))),
        scores=scores,
        title="Birds: what a small vision transformer sees",
    )
    drawn = _draw_figures(folder / "figures", model, shown)
    gallery, choice = typical_images(model, learned, train), ModelChoice("birds", layer=LAYER)
    ModelExplainer(backbone, model, train.class_names, gallery, None, scores, choice).save(folder / "run")
    return DemoResult(folder, report, drawn, model, scores, time.monotonic() - began)


def _draw_figures(folder: Path, model: PACE, shown: dict[str, Any]) -> tuple[Path, ...]:
    from pace.showing import figures

    drawn = {
        "three-levels": figures.three_levels(model, **shown),
        "classes": figures.class_concepts(model, **shown),
        "concepts": figures.concept_gallery(model, **shown),
        "bound": figures.bound(model),
        "concept-map": figures.concept_map(model),
    }
    return tuple(figures.save(figure, folder / f"{name}.png", dpi=150) for name, figure in drawn.items())
