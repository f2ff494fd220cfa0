"""How near do the demo's concepts come to the true parts and kinds of Birds? Test images, PACE beside the truth.

    python benchmarks/birds_parts.py [--seeds 0 1 2 3] [--concepts 24] [--parts 8] [--layer 4] [--weights vit.safetensors]

The truth is concepts that know the kind of every patch, in both views, and weigh patches by attention as PACE does. Settings
were chosen on images of other seeds (`--seeds 50 51 52 53`).
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from pace import PACE, Backbone
from pace.backbones import load_finetuned
from pace.backbones.birds_vit import LAYER, SIZE, load_model, new_model
from pace.demo.running import N_CONCEPTS, N_PARTS, N_PER_CLASS
from pace.images import Birds, Perturbation
from pace.images.birds import KIND_NAMES, KIND_PARTS
from pace.metrics import faithfulness, kind_accuracy, part_recovery, sparsity, stability, stability_ratio
from pace.metrics.ground_truth import known_truth, true_parts
from pace.observations import Observations
from pace.observing.extract import observe_pair

_GRID = (14, 14)


def true_phi(images: Birds, seen: Observations, backbone: Backbone) -> np.ndarray:
    """(M, patches, kinds) of images, or of the crops of their views."""
    crops = None if seen.crops is None else np.asarray(seen.crops)
    kinds = true_parts(images, backbone.preprocessing, _GRID, crops, kinds=True)
    return np.eye(len(KIND_NAMES))[kinds.reshape(len(images), -1)]


def by_attention(phi: np.ndarray, seen: Observations) -> np.ndarray:
    weights = np.asarray(seen.attention, np.float64)
    return np.einsum("mj,mjk->mk", weights / weights.sum(1, keepdims=True), phi)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--concepts", type=int, default=N_CONCEPTS)
    parser.add_argument("--parts", type=int, default=N_PARTS)
    parser.add_argument("--layer", type=int, default=LAYER)
    parser.add_argument("--per-class", type=int, default=N_PER_CLASS)
    parser.add_argument("--weights", help="another ViT, by scripts/train_birds_vit.py")
    options = parser.parse_args()
    network = load_model() if options.weights is None else load_finetuned(new_model(), options.weights).model
    backbone = Backbone(network, layer=options.layer, attention_layer=-1)
    columns = ("seed", "concepts", "faithfulness", "stability", "ratio", "sparsity", "part NMI", "kind accuracy")
    print("|" + "|".join(f" {column} " for column in columns) + "|\n" + "|---" * len(columns) + "|")
    for seed in options.seeds:
        train, test = (Birds(split, options.per_class, SIZE, seed) for split in ("train", "test"))
        learned, learned_pair = observe_pair(backbone, train, perturb=Perturbation(seed + 1), progress=False)
        seen, pair = observe_pair(backbone, test, perturb=Perturbation(seed), progress=False)
        sets = ((train, learned), (test, seen), (test, pair))
        truth = known_truth(test, backbone.preprocessing, _GRID)
        phis = [true_phi(images, shown, backbone) for images, shown in sets]
        model = PACE(options.concepts, parts=options.parts, seed=seed, progress=False)
        model.fit(learned, perturbed=learned_pair)
        found = [model.explain(shown) for _, shown in sets]
        for title, thetas, phi, part_of in (
            (
                "truth",
                [by_attention(*both) for both in zip(phis, (s for _, s in sets), strict=True)],
                phis[1],
                KIND_PARTS,
            ),
            ("PACE", [one.theta for one in found], found[1].phi, model.part_of_),
        ):
            learn, theta, moved = thetas
            cells = (
                faithfulness(learn, learned.predictions, theta, seen.predictions),
                stability(theta, moved),
                stability_ratio(theta, moved),
                sparsity(theta),
                part_recovery(phi, truth["true_parts"], part_of),
                kind_accuracy(phi, **truth),
            )
            print(f"| {seed} | {title} | " + " | ".join(f"{float(cell):.2f}" for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
