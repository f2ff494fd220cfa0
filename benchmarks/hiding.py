"""Does the order of the methods by the effect of their concepts depend on how patches are hidden?

    uv run python benchmarks/hiding.py --data-root data --dataset cub --backbone FILE --architecture NAME --image-size 224 \
        --normalize half [--limit 2000] [--no-finetune] [--device cuda]

The effect (`pace.metrics.concept_effect`) of every method with a patch level, under each of four ways to hide patches, on the
same test images; in brackets what random concepts of the same sizes have. Below, Kendall's rank correlation of the methods'
order between every two ways. Without a backbone it is the ViT shipped for Color. What is fine-tuned is kept in `--out`.
"""

import argparse
from itertools import combinations
from pathlib import Path

import torch
from scipy.stats import kendalltau

from pace.benchmark import Recipe
from pace.benchmark.cache import Cache
from pace.benchmark.data import Inputs, open_dataset
from pace.benchmark.methods import COLORS, Method, choose_methods
from pace.benchmark.subject import color_size, prepare_subject
from pace.metrics import concept_effect, effect_by_lot, hide
from pace.metrics.hiding import WAYS, Hiding

METHODS = ["pace", "craft", "references"]


def effects(
    method: Method, inputs: Inputs, ways: dict[str, Hiding], seed: int
) -> dict[str, tuple[float, float]] | None:
    """By way: the effect of the method's concepts, and of random ones; None without a patch level."""
    (train, pair), (test, _) = inputs.train, inputs.test
    explainer = method.make().fit(inputs.backbone, train, perturbed=pair, seed=seed)
    rows = next(iter(ways.values())).rows
    found = explainer.explain(test, seed=seed)
    if found.phi is None:
        return None
    importance = explainer.importance(test[rows], found[rows])
    return {
        how: (
            concept_effect(hiding, found.phi, importance, found.prefix_tokens, seed=seed),
            effect_by_lot(hiding, found.phi, importance, found.prefix_tokens, seed=seed),
        )
        for how, hiding in ways.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="color")
    parser.add_argument("--data-root")
    parser.add_argument("--backbone")
    parser.add_argument("--architecture")
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--normalize")
    parser.add_argument("--layer", type=int)
    parser.add_argument("--finetune", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--concepts", type=int, default=100)
    parser.add_argument("--limit", type=int, help="images of each split")
    parser.add_argument("--hidden-images", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/hiding"))
    given = parser.parse_args()
    methods = [method for method in choose_methods(given.methods, given.concepts, {}, {}) if method.name != COLORS]
    dataset = open_dataset(
        given.dataset, given.data_root, given.limit, given.seed, None if given.backbone else color_size()
    )
    recipe = Recipe(
        given.backbone,
        given.architecture,
        given.image_size,
        given.layer,
        train=given.finetune,
        normalize=given.normalize,
    )
    subject = prepare_subject(
        recipe, dataset, Cache(given.out / dataset.name), given.seed, torch.device(given.device), print
    )
    inputs = Inputs(dataset, subject.backbone, given.seed, batch_size=64, store=None)
    rows = inputs.sample(given.hidden_images)
    ways = {how: hide(subject.backbone, dataset.test, rows, how) for how in WAYS}
    print(f"{dataset.name}, {subject.about['name']}, {len(rows)} test images, seed {given.seed}")
    print(f"| method | {' | '.join(WAYS)} |\n|---|{'---|' * len(WAYS)}", flush=True)
    table = {}
    for method in methods:
        found = effects(method, inputs, ways, given.seed)
        if found is not None:
            table[method.label] = found
            cells = (f"{effect:.3f} ({lot:.3f})" for effect, lot in found.values())
            print(f"| {method.title} | {' | '.join(cells)} |", flush=True)
    print("\n| ways | Kendall's τ |\n|---|---|")
    for pair in combinations(WAYS, 2):
        order = [[found[how][0] for found in table.values()] for how in pair]
        print(f"| {pair[0]}, {pair[1]} | {kendalltau(*order).statistic:.2f} |")


if __name__ == "__main__":
    main()
