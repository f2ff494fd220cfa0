"""What perfect parts of birds would score: concepts that know where every part is, and are never wrong.

    uv run python benchmarks/true_parts.py --data-root data [--every 4]

No transformer and no fit. A patch inside a bird's box shows the nearest visible part, any other patch the background. In a
perturbed view the same places show the same parts, so only the crop and the flip matter. With several kinds of each part,
classes are assigned to kinds at random, anew for every part, so that concepts also tell classes apart. Faithfulness is to the
class.
"""

import argparse

import numpy as np
import torch
from numpy.typing import NDArray

from pace.backbones import Preprocessing
from pace.images import CUB, Perturbation, prepare_points
from pace.metrics import concepts_per_image, faithfulness, part_consistency, sparsity, stability, stability_ratio
from pace.metrics.ground_truth import image_size, visible_parts

Array = NDArray[np.float64]
GRID, SEES = (16, 16), Preprocessing(crop_ratio=1.0)
SURVIVE = 0.8  # of the predictions, about, in docs/results.md


def parts_seen(images: CUB, numbers: NDArray[np.int64], perturbation: Perturbation | None) -> NDArray[np.int64]:
    """(M, patches): the part of every patch; the background is one more."""
    height, width = SEES.size
    rows, columns = np.indices(GRID).reshape(2, 1, -1) + 0.5
    x, y = columns / GRID[1], rows / GRID[0]  # (1, patches), from 0 to 1
    whole = np.tile([0.0, 0, 1, 1], (len(numbers), 1))
    left, top, right, bottom = (whole if perturbation is None else perturbation.crops(numbers, SEES.size)).T[:, :, None]
    places = np.stack([width * (left + x * (right - left)), height * (top + y * (bottom - top))], 2)
    found = []
    for number, patches in zip(numbers.tolist(), places, strict=True):
        parts, (x0, y0, wide, high) = images.parts(number), images.box(number)
        corners = [[x0, y0], [x0 + wide, y0 + high]]
        points = prepare_points(torch.tensor([*parts[:, :2].tolist(), *corners]), image_size(images, number), SEES)
        *seen, first, last = points.numpy()
        away = np.square(patches[:, None] - np.stack(seen)).sum(2)
        nearest = np.where(parts[:, 2] > 0, away, np.inf).argmin(1)
        found.append(np.where(((patches > first) & (patches < last)).all(1), nearest, len(parts)))
    return np.stack(found)


def one_hot(concepts: NDArray[np.int64], number: int) -> Array:
    return np.eye(number, dtype=np.float32)[concepts]


def mixtures(concepts: NDArray[np.int64], number: int, count: NDArray[np.bool_]) -> Array:
    """(M, K): shares of the patches that count; of all where none does."""
    count = count | ~count.any(1, keepdims=True)
    flat = concepts + number * np.arange(len(concepts))[:, None]
    sums = np.bincount(flat.ravel(), count.ravel(), minlength=len(concepts) * number).reshape(-1, number)
    return sums / sums.sum(1, keepdims=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--every", type=int, default=4, help="of so many test images one is looked at")
    parser.add_argument("--concepts", type=int, default=100, help="of parts and kinds together")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    train, test = (CUB(arguments.data_root, split=split) for split in ("train", "test"))
    chosen = {train: np.arange(len(train)), test: np.arange(0, len(test), arguments.every)}
    parts = [parts_seen(images, numbers, None) for images, numbers in chosen.items()]
    parts.append(parts_seen(test, chosen[test], Perturbation(arguments.seed)))
    labels = [np.asarray(images.labels)[numbers] for images, numbers in chosen.items()]
    labels.append(labels[1])
    where = visible_parts(test, SEES, GRID)[chosen[test]]
    background = len(test.part_names)
    kinds = arguments.concepts // (background + 1)
    divide = np.random.default_rng(arguments.seed).integers(kinds, size=(background + 1, labels[0].max() + 1))
    ways = {
        "true parts": (background + 1, parts),
        f"true parts, {kinds} kinds of each": (
            arguments.concepts,
            [part * kinds + divide[part, label[:, None]] for part, label in zip(parts, labels, strict=True)],
        ),
    }
    print(f"{len(chosen[test])} test images, seed {arguments.seed}")
    print(
        "| concepts | patches | faithfulness | stability | steadiest 80 % | ratio | sparsity | an image | part consistency |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for title, (number, concepts) in ways.items():
        phi = one_hot(concepts[1], number)
        for counted in ("all", "of the bird"):
            learn, theta, moved = (
                mixtures(shown, number, (part < background) | (counted == "all"))
                for shown, part in zip(concepts, parts, strict=True)
            )
            away = np.sort([float(stability(theta[m : m + 1], moved[m : m + 1])) for m in range(len(theta))])
            cells = [
                faithfulness(learn, labels[0], theta, labels[1]),
                away.mean(),
                away[: int(SURVIVE * len(away))].mean(),
                stability_ratio(theta, moved),
                sparsity(theta),
                concepts_per_image(phi),
                part_consistency(phi, where),
            ]
            print(f"| {title} | {counted} | " + " | ".join(f"{float(cell):.2f}" for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
