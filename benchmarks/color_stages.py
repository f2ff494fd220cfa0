"""How steady PACE's concepts are on Color under each part of the perturbation alone, beside the true colours.

    uv run python benchmarks/color_stages.py [--seeds 3] [--concepts 100] [--cls]

PACE with its defaults, learned from the paper's 1,600 images and scored on the other 400. `share` is its stability over that
of the true colours, which changes where the perturbation changes colours; recovery is the NMI of a patch's concept with its
true colour.
"""

import argparse
import warnings

import numpy as np
from sklearn.metrics import normalized_mutual_info_score

from pace import PACE, Backbone
from pace.backbones.color_vit import LAYER, SIZE, load_model
from pace.baselines import TrueColors
from pace.images import AUGMENT_SEED, Color, Perturbation
from pace.images.perturb import STAGES
from pace.metrics import sparsity, stability, stability_ratio
from pace.metrics.ground_truth import seen_colors, true_colors
from pace.observing.extract import observe_pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--concepts", type=int, default=100)
    parser.add_argument("--cls", action="store_true", help="count the CLS token as a patch")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    backbone = Backbone(load_model(), layer=LAYER, count_cls=arguments.cls)
    print("| seed | stages | PACE | true colours | share | ratio | sparsity | recovery | in use |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for seed in range(arguments.seeds):
        train, test = (Color(split, size=SIZE, seed=seed) for split in ("train", "test"))
        # Perturbed views to learn from are never those to be judged by.
        pair = observe_pair(backbone, train, perturb=Perturbation(seed + AUGMENT_SEED), progress=False)
        model = PACE(arguments.concepts, seed=seed, progress=False).fit(pair[0], perturbed=pair[1])
        for stages in (STAGES, *((stage,) for stage in STAGES)):
            perturbation = Perturbation(seed, stages)
            seen, moved = observe_pair(backbone, test, perturb=perturbation, progress=False)
            one, other = model.explain(seen), model.explain(moved, patches=False)
            assert seen.grid is not None
            assert one.phi is not None
            patches = np.asarray(one.phi)[:, seen.prefix_tokens :].argmax(2)
            colors = true_colors(test, backbone.preprocessing, seen.grid)
            recovery = normalized_mutual_info_score(colors.ravel(), patches.ravel())
            looks = seen_colors(test, backbone.preprocessing, seen.grid, perturbation)
            answer = TrueColors([(seen, colors), (moved, looks)], arguments.concepts)
            ours = stability(one.theta, other.theta)
            theirs = stability(answer.explain(seen).theta, answer.explain(moved).theta)
            name = "all" if stages == STAGES else stages[0]
            print(
                f"| {seed} | {name} | {ours:.3f} | {theirs:.3f} | {ours / max(theirs, 1e-9):.2f} "
                f"| {stability_ratio(one.theta, other.theta):.3f} | {sparsity(one.theta):.3f} | {recovery:.3f} "
                f"| {len(model.means_) - len(model.empty_concepts_)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
