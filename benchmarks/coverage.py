"""Do 90 % intervals cover? On planted mixtures, and on photos: the shares in another crop that keeps the content.

    uv run python benchmarks/coverage.py [--data-root data --dataset cub --backbone vit_cub_fp16.safetensors \
        --architecture vit_small_patch14_reg4_dinov2 --image-size 224 --normalize half]

Planted: shares from Dir(1, …, 1), five concepts, 14 x 14 patches, PACE fitted to 400 images. Photos: PACE fitted to training
images; the other view of a test image is mirrored and leaves out a twelfth at each side. The concepts of an image that count
are those it shows (a hundredth or more). In both, q(θ) is the posterior that counts every patch.
"""

import argparse
from functools import partial
from itertools import permutations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate

from pace import PACE, Explanation, Observations
from pace.backbones import ModelChoice, choose_layer, open_backbone, open_model
from pace.images import open_images
from pace.observing.extract import observe, observe_pair

SIDE, SHOWN = 14, 0.01
CASES: dict[str, dict[str, float]] = {
    "apart": {},
    "2.5 deviations apart": {"apart": 2.5},
    "2 deviations apart": {"apart": 2.0},
    "1.5 deviations apart": {"apart": 1.5},
    "exponential attention": {"peaked": 1.0},
    "peaked attention": {"peaked": 2.06},
    "2 x 2 patches alike": {"alike": 2},
    "7 x 7 patches alike": {"alike": 7},
    "peaked attention, 2 x 2 alike": {"peaked": 2.06, "alike": 2},
}


def planted(apart: float = 8.0, peaked: float = 0.0, alike: int = 1, seed: int = 0) -> tuple[float, float, float]:
    """Coverage of the intervals, of those of q(θ), and the effective patches of an image."""
    rng = np.random.default_rng(seed)
    means, theta, cells = np.eye(5, 8) * apart / 2**0.5, rng.dirichlet(np.ones(5), 400), -(-SIDE // alike)
    drawn = np.stack([rng.choice(5, cells * cells, p=row) for row in theta]).reshape(-1, cells, cells)
    concepts = drawn.repeat(alike, 1).repeat(alike, 2)[:, :SIDE, :SIDE].reshape(len(theta), -1)
    embeddings = means[concepts] + rng.normal(size=(*concepts.shape, 8))
    observations = Observations(embeddings, rng.exponential(size=concepts.shape) ** peaked, grid=(SIDE, SIDE))
    model = PACE(5, covariance="tied", prune=False, seed=seed).fit(observations)
    distances = np.square(model.means_[:, None] - means).sum(-1)
    own = list(min(permutations(range(5)), key=lambda order: sum(distances[k, n] for n, k in enumerate(order))))
    truth = np.empty_like(theta)
    truth[:, own] = theta
    return coverage(model.explain(observations), truth, np.ones_like(truth, bool))


def coverage(found: Explanation, truth: NDArray[np.float64], counted: NDArray[np.bool_]) -> tuple[float, float, float]:
    plain = Explanation(found.theta, found.gamma)
    inside = [(low <= truth) & (truth <= high) for low, high in (found.interval(0.9), plain.interval(0.9))]
    return *(float(some[counted].mean()) for some in inside), float(found.weights.sum(1).mean())


def other_view(batch: Tensor, numbers: object) -> Tensor:
    """Mirrored, without a twelfth at each side."""
    height, width = batch.shape[2:]
    top, left = height // 12, width // 12
    inner = batch[:, :, top : height - top, left : width - left].flip(3)
    return interpolate(inner, (height, width), mode="bilinear", antialias=True).clamp(0, 1)


def photos(given: argparse.Namespace) -> tuple[float, float, float]:
    train, test = (open_images(given.dataset, given.data_root, split) for split in ("train", "test"))
    if given.limit:
        train, test = (
            images.subset(np.linspace(0, len(images) - 1, given.limit).astype(int).tolist()) for images in (train, test)
        )
    choice = ModelChoice(given.backbone, given.architecture, given.image_size, given.normalize)
    device = torch.device(given.device)
    model, _ = open_model(choice)
    backbone = open_backbone(model, choice, device, partial(choose_layer, images=train))
    seen, pair = observe_pair(backbone, train, batch_size=256)
    concepts = PACE(given.concepts).fit(seen, perturbed=pair)
    found = concepts.explain(observe(backbone, test, batch_size=256))
    there = concepts.transform(observe(backbone, test, perturb=other_view, batch_size=256))
    return coverage(found, there.astype(np.float64), found.theta >= SHOWN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="cub")
    parser.add_argument("--data-root")
    parser.add_argument("--backbone")
    parser.add_argument("--architecture")
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--normalize")
    parser.add_argument("--concepts", type=int, default=100)
    parser.add_argument("--limit", type=int, help="images of each split")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    print("| case | covered | by q(θ) | effective patches |\n|---|---|---|---|")
    rows = {case: lambda options=options: planted(**options) for case, options in CASES.items()}
    if given.backbone is not None:
        rows = {f"{given.dataset}, another crop": lambda: photos(given)}
    for case, measure in rows.items():
        print("| {} | {:.2f} | {:.2f} | {:.1f} |".format(case, *measure()), flush=True)


if __name__ == "__main__":
    main()
