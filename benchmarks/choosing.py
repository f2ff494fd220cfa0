"""Which block, whose attention and which weights: scores on a sixth of the training images that is held out.

    uv run python benchmarks/choosing.py --data-root DIR --dataset cub --backbone FILE --try own:-1 last:-2 --weights 1:1 1:2

For every block (`own:LAYER` weighs patches by its own CLS attention, `last:LAYER` by the last block's) EM learns 100 concepts
from five sixths of the training images (`--views`: and their perturbed views); refining goes on from there with each pair of
weights (w_f:w_s). Test images are never looked at. If the transformer was fine-tuned on the held-out images too, its
predictions are easier there than on test images; `--finetune 24` fine-tunes on the five sixths alone, for so many epochs.
"""

import argparse
import copy
import time
import warnings

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning

from pace import PACE, Backbone, Observations
from pace.backbones import finetune, load
from pace.fitting.parameters import settings_of
from pace.images import AUGMENT_SEED, CUB, Flower, Perturbation
from pace.metrics import (
    concepts_per_image,
    effective_concepts,
    faithfulness,
    part_consistency,
    sparsity,
    stability,
    stability_ratio,
)
from pace.model import refining
from pace.model.refining import Refinement, refine
from pace.observing.extract import observe_pair
from pace.observing.layers import within_share

DATASETS = {"flower": Flower, "cub": CUB}


class Split:
    """Training images and their perturbed views, five sixths to learn from and a sixth to look at."""

    def __init__(self, both: tuple[Observations, Observations], device: torch.device) -> None:
        held, others = sixth(len(both[0]))
        self.train, self.train_perturbed = (_on(view[others], device) for view in both)
        self.held, self.held_perturbed = (_on(view[held], device) for view in both)
        self.rows = held


def sixth(images: int) -> tuple[np.ndarray, np.ndarray]:
    """A sixth of the images, and the others."""
    order = np.random.default_rng(0).permutation(images)
    return np.sort(order[: images // 6]), np.sort(order[images // 6 :])


def _on(view: Observations, device: torch.device) -> Observations:
    parts = (view.embeddings, view.attention, view.predictions)
    return Observations(*(torch.as_tensor(part).to(device) for part in parts), view.grid, view.prefix_tokens)


def predicted(view: Observations) -> np.ndarray:
    return torch.as_tensor(view.predictions).argmax(1).cpu().numpy()


def row(model: PACE, split: Split, parts: np.ndarray | None) -> str:
    explained, moved = model.explain(split.held), model.explain(split.held_perturbed, patches=False)
    guess, again = predicted(split.held), predicted(split.held_perturbed)
    known = faithfulness(model.transform(split.train), predicted(split.train), explained.theta, guess)
    same = guess == again
    scores = [
        float(known),
        float(stability(explained.theta, moved.theta)),
        float(stability(explained.theta[same], moved.theta[same])),
        float(stability_ratio(explained.theta, moved.theta)),
        float(sparsity(explained.theta)),
        float(effective_concepts(explained.theta)),
        float(concepts_per_image(explained.phi[:, split.held.prefix_tokens :])),
    ]
    if parts is not None:
        scores.append(float(part_consistency(explained.phi[:, split.held.prefix_tokens :], parts)))
    return "  ".join(f"{score:8.3f}" for score in scores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--dataset", choices=DATASETS, required=True)
    parser.add_argument("--backbone", required=True, help="fine-tuned weights, or with --finetune those to begin with")
    parser.add_argument("--normalize", choices=("imagenet", "half", "clip"))
    parser.add_argument("--finetune", type=int, metavar="EPOCHS")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--layer-decay", type=float, default=1.0)
    parser.add_argument("--cls", action="store_true", help="count the CLS token as a patch")
    parser.add_argument("--views", action="store_true", help="EM learns from perturbed views, too")
    parser.add_argument("--images-in-step", type=int, help="of refining")
    parser.add_argument("--model", default="vit_small_patch14_reg4_dinov2")
    parser.add_argument("--try", dest="blocks", nargs="+", default=["own:-1"], help="own:LAYER or last:LAYER")
    parser.add_argument("--weights", nargs="+", default=["1:2"], help="w_f:w_s")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--concepts", type=int, default=100)
    parser.add_argument("--limit", type=int, help="images at most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    device = torch.device(arguments.device)
    images = DATASETS[arguments.dataset](arguments.data_root, "train")
    if arguments.limit:
        images = images.subset(list(range(0, len(images), -(-len(images) // arguments.limit))))
    net = (
        load(arguments.backbone, model=arguments.model, normalize=arguments.normalize, img_size=224).float().to(device)
    )
    if arguments.finetune:
        held, others = sixth(len(images))
        trained = finetune(
            net,
            images.subset(others.tolist()),
            validation=images.subset(held.tolist()),
            epochs=arguments.finetune,
            lr=arguments.lr,
            layer_decay=arguments.layer_decay,
            batch_size=128,
            augment=Perturbation(AUGMENT_SEED),
            device=device,
        )
        net = trained.model
        print(f"{trained.accuracy:.1%} of the held-out images right")
    net.eval().requires_grad_(False)
    if arguments.images_in_step:
        refining.images_in_step = lambda images: arguments.images_in_step
    columns = "  ".join(
        f"{name:>8}" for name in ("faith", "stab", "(same)", "ratio", "sparsity", "effect.", "an image", "parts")
    )
    print(f"{'':32}{columns}", flush=True)
    for block in arguments.blocks:
        whose, layer = block.split(":")
        attention_layer = -1 if whose == "last" else None
        backbone = Backbone(net, int(layer), count_cls=arguments.cls, attention_layer=attention_layer)
        split = Split(observe_pair(backbone, images, perturb=Perturbation(0), progress=False), device)
        parts = None
        if isinstance(images, CUB):
            from pace.metrics.ground_truth import visible_parts

            grid = backbone.grid(*backbone.preprocessing.size)
            parts = visible_parts(images.subset(split.rows.tolist()), backbone.preprocessing, grid)
        share = within_share(split.held)
        began = time.perf_counter()
        # Two sweeps an epoch, as few as learn well; explaining sweeps until images settle.
        model = PACE(
            arguments.concepts, refine=0, prune=False, n_init=2, max_iter=arguments.epochs, max_sweeps=2, device=device
        ).fit(split.train, perturbed=split.train_perturbed if arguments.views else None)
        model.set_params(max_sweeps=100)
        took = time.perf_counter() - began
        print(f"{block:8} EM {share:5.0%} within {took:6.1f} s {row(model, split, parts)}", flush=True)
        for pair in arguments.weights:
            refined, began = copy.copy(model), time.perf_counter()
            weights = Refinement(arguments.steps, *map(float, pair.split(":")))
            concepts = model._concepts.to(device, torch.float32)
            settings = settings_of(model, split.train)
            refined._concepts, _ = refine(split.train, split.train_perturbed, concepts, settings, weights, seed=0)
            took = time.perf_counter() - began
            print(f"{block:8} refined {pair:7} {took:6.1f} s {row(refined, split, parts)}", flush=True)


if __name__ == "__main__":
    main()
