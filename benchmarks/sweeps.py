"""What the number of sweeps an epoch does to learning: the bound it ends at, and the time it takes.

    uv run python benchmarks/sweeps.py [--concepts 100] [--images 400]

Color images seen by the ViT that is shipped for them, with perturbed views; tied covariances, seed 0, one thread.
"""

import argparse
import time

import torch

from pace import PACE, Backbone
from pace.backbones.color_vit import LAYER, SIZE, load_model
from pace.images import Color, Perturbation
from pace.model import learning
from pace.observing.extract import observe_pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concepts", type=int, default=100)
    parser.add_argument("--images", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    images = Color("train", n_per_class=-(-arguments.images * 5 // 8), size=SIZE)
    original, perturbed = observe_pair(Backbone(load_model(), LAYER), images, perturb=Perturbation(1), progress=False)
    print(f"{len(original)} images, K = {arguments.concepts}")
    for sweeps in (100, 10, 4, 2, 1):
        learning.SWEEPS_AN_EPOCH = sweeps
        start = time.process_time()
        model = PACE(arguments.concepts, refine=0, device="cpu", progress=False).fit(original, perturbed=perturbed)
        took = time.process_time() - start
        bound = model.lower_bounds_[-1].total
        print(
            f"{sweeps:4} sweeps: bound {bound:10.1f} an image after {model.n_iter_:3} epochs and {took:5.0f} s of CPU",
            flush=True,
        )


if __name__ == "__main__":
    main()
