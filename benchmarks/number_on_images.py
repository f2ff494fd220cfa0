"""How many concepts on real images: found by the search, by held-out likelihood, by BIC, and set by hand.

    uv run python benchmarks/number_on_images.py --data-root DIR --dataset flower --backbone FILE [--device cuda]
    uv run python benchmarks/number_on_images.py --observations train.safetensors test.safetensors
    uv run python benchmarks/number_on_images.py --observations RUN RUN --search 300 600

The second form reads files that `--keep DIR` wrote, or runs of `pace extract`. With `--search` the number is only looked for,
with so many concepts allowed. All fits: tied covariances, refine=0, the images as they are.

    auto        n_concepts="auto"
    held-out    of a few numbers the one with the best `score` on a sixth of the training images, learned from the others;
                then a fit to all of them
    BIC         the best of the same numbers, fitted to all training images; every patch counts as an observation
    by hand     told

`cost`: seconds until the final model is there, over those of a plain fit with as many concepts.

Two measures of how alike the concepts of two seeds are, the mean over their best one-to-one matching, and over all pairs of
seeds: the cosine of their means after the mean patch is taken off, and the correlation of their shares θ over the test images.
Concepts of the larger set that find no partner are left out of it. The search looks at a sample of images that `seed` draws.
"""

import argparse
import time
import warnings
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from scipy.optimize import linear_sum_assignment
from sklearn.exceptions import ConvergenceWarning

from pace import PACE, Backbone, Observations
from pace.backbones import load
from pace.fitting.parameters import settings_of
from pace.images import CUB, Flower
from pace.metrics import concepts_per_image, effective_concepts, faithfulness
from pace.model.selecting import select
from pace.observing.store import ObservationStore

DATASETS = {"flower": Flower, "cub": CUB}
LOOKED_AT = 1000  # test images of which the patches are counted


@dataclass
class Choice:
    """A number of concepts, the model that has them, and the seconds it took to get there."""

    model: PACE
    seconds: float


class Chooser:
    """Ways to choose K with one seed. A fit that two ways need is made once, and its seconds count for both."""

    def __init__(self, train: Observations, numbers: list[int], seed: int, allowed: int):
        self.train, self.numbers, self.seed, self.allowed = train, numbers, seed, allowed
        order = np.random.default_rng(seed).permutation(len(train))
        cut = len(train) // 6
        self.held_out, self.others = train[np.sort(order[:cut])], train[np.sort(order[cut:])]
        self._fits: dict[int, Choice] = {}

    def fixed(self, number: int) -> Choice:
        if number not in self._fits:
            self._fits[number] = fit(self.train, number, self.seed)
        return self._fits[number]

    def auto(self) -> Choice:
        return fit(self.train, "auto", self.seed, max_concepts=self.allowed)

    def by_held_out(self) -> Choice:
        began = time.perf_counter()
        scores = {number: fit(self.others, number, self.seed).model.score(self.held_out) for number in self.numbers}
        looking = time.perf_counter() - began
        best = max(scores, key=lambda number: scores[number])
        return Choice(self.fixed(best).model, looking + self.fixed(best).seconds)

    def by_bic(self) -> Choice:
        fits = {number: self.fixed(number) for number in self.numbers}
        began = time.perf_counter()
        best = max(fits, key=lambda number: self._bic(fits[number].model))
        scoring = time.perf_counter() - began
        return Choice(fits[best].model, scoring + sum(choice.seconds for choice in fits.values()))

    def _bic(self, model: PACE) -> float:
        """As a log-likelihood: the more, the better. Parameters are μ, α, β, H and Σ."""
        (k, d), images = model.means_.shape, len(self.train)
        parameters = k * (d + 2 + self.train.n_classes) + d * (d + 1) / 2
        return images * model.score(self.train) - parameters / 2 * np.log(images * self.train.n_tokens)


def fit(observations: Observations, number: int | str, seed: int, **options: int) -> Choice:
    began = time.perf_counter()
    model = PACE(number, refine=0, seed=seed, progress=False, **options).fit(observations)
    return Choice(model, time.perf_counter() - began)


def similarity(one: np.ndarray, other: np.ndarray) -> float:
    """Mean cosine of the rows of one with those of the other, matched one to one."""
    unit = [rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-30) for rows in (one, other)]
    cosines = unit[0] @ unit[1].T
    return float(cosines[linear_sum_assignment(-cosines)].mean())


def centre_of(train: Observations) -> np.ndarray:
    """The mean patch of some images, by attention."""
    batch = train.batch(slice(None, None, -(-len(train) // LOOKED_AT)))
    weights = batch.attention.float() / batch.attention.float().sum(1, keepdim=True)
    return torch.einsum("mj,mjd->d", weights, batch.embeddings.float()).cpu().numpy() / len(weights)


def search(train: Observations, allowed: list[int], seeds: int) -> None:
    """What is found where so many are allowed, and how alike the seeds' concepts are before any fit goes on from them."""
    settings, centre = settings_of(PACE(), train), centre_of(train)
    print(
        "\n| allowed | found, by seed | tried up to | CPU seconds | alike: means |\n|---|---|---|---|---|", flush=True
    )
    for most in allowed:
        found, took = [], []
        for seed in range(seeds):
            began = time.process_time()
            found.append(select(train, settings, most=most, seed=seed))
            took.append(time.process_time() - began)
        means = [selection.means.cpu().numpy() - centre for selection in found]
        alike = np.mean([similarity(a, b) for a, b in combinations(means, 2)] or [1.0])
        cells = [[selection.n_concepts for selection in found], [int(max(selection.numbers)) for selection in found]]
        told = [", ".join(map(str, cell)) for cell in [*cells, [f"{seconds:.0f}" for seconds in took]]]
        print(f"| {most} | {' | '.join(told)} | {alike:.2f} |", flush=True)


def report(way: str, choices: list[Choice], choosers: list[Chooser], test: Observations) -> str:
    """One row of the table, over all seeds."""
    train = choosers[0].train
    some = test[:: -(-len(test) // LOOKED_AT)]
    centre = centre_of(train)
    rows, means, shares = [], [], []
    for choice, chooser in zip(choices, choosers, strict=True):
        model = choice.model
        theta = [torch.as_tensor(model.transform(part), device=train.embeddings.device) for part in (train, test)]
        right = faithfulness(theta[0], train.predictions, theta[1], test.predictions)
        phi = model.explain(some).phi
        plain = chooser.fixed(len(model.means_)).seconds
        each = concepts_per_image(phi, test.prefix_tokens)
        rows.append([right, effective_concepts(theta[1]), each, choice.seconds, choice.seconds / plain])
        means.append(model.means_ - centre)
        found = theta[1].cpu().numpy()
        shares.append((found - found.mean(0)).T)
    number = " ".join(str(len(rows)) for rows in means)
    right, effective, each, seconds, cost = np.mean(rows, 0)
    alike = [np.mean([similarity(a, b) for a, b in combinations(sets, 2)] or [1.0]) for sets in (means, shares)]
    return (
        f"| {way} | {number} | {right:.3f} | {effective:.0f} | {each:.1f} | {seconds:.1f} | {cost:.2f} "
        f"| {alike[0]:.2f} | {alike[1]:.2f} |"
    )


def observe(arguments: argparse.Namespace) -> dict[str, Observations]:
    model = load(arguments.backbone, model=arguments.model, img_size=224).float().to(arguments.device)
    backbone = Backbone(model, layer=-1, count_cls=arguments.cls)
    found = {}
    for split in ("train", "test"):
        images = DATASETS[arguments.dataset](arguments.data_root, split)
        if arguments.limit:
            images = images.subset(range(0, len(images), -(-len(images) // arguments.limit)))
        began = time.perf_counter()
        found[split] = on_device(backbone.observe(images, progress=False), arguments.device)
        print(f"{split}: {found[split]}, {time.perf_counter() - began:.0f} seconds", flush=True)
    return found


def read(path: str, device: str) -> Observations:
    if Path(path).is_dir():
        return on_device(ObservationStore.open(Path(path) / "original").observations(), device)
    parts = load_file(path)
    prefix = int(parts.pop("prefix_tokens", 1))  # files that do not say it are from when CLS counted
    return on_device(Observations(**parts, prefix_tokens=prefix), device)


def on_device(seen: Observations, device: str) -> Observations:
    """Embeddings in half precision, as they are stored."""
    batch = seen.batch(slice(None), device)
    return Observations(batch.embeddings.half(), batch.attention, batch.predictions, seen.grid, seen.prefix_tokens)


def keep(folder: str, found: dict[str, Observations]) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for split, seen in found.items():
        parts = {"embeddings": seen.embeddings, "attention": seen.attention, "predictions": seen.predictions}
        parts["prefix_tokens"] = torch.tensor(seen.prefix_tokens)
        save_file(
            {name: part.cpu().contiguous() for name, part in parts.items()}, Path(folder) / f"{split}.safetensors"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--observations", nargs=2, metavar=("TRAIN", "TEST"))
    parser.add_argument("--data-root")
    parser.add_argument("--dataset", choices=sorted(DATASETS), default="flower")
    parser.add_argument("--backbone", help="fine-tuned weights")
    parser.add_argument("--model", default="vit_small_patch14_reg4_dinov2")
    parser.add_argument("--cls", action="store_true", help="count the CLS token as a patch")
    parser.add_argument("--keep", help="folder for the observations")
    parser.add_argument("--limit", type=int, help="images of each split at most")
    parser.add_argument("--numbers", type=int, nargs="+", default=[25, 50, 100, 200, 300])
    parser.add_argument("--max-concepts", type=int, default=PACE().max_concepts, help="that auto looks for")
    parser.add_argument("--by-hand", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--search", type=int, nargs="+", metavar="ALLOWED")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if not arguments.observations and not (arguments.data_root and arguments.backbone):
        parser.error("give --observations, or --data-root and --backbone")
    warnings.simplefilter("ignore", ConvergenceWarning)

    if arguments.observations:
        files = zip(("train", "test"), arguments.observations, strict=True)
        found = {split: read(path, arguments.device) for split, path in files}
        if arguments.limit:
            found = {split: seen[:: -(-len(seen) // arguments.limit)] for split, seen in found.items()}
    else:
        found = observe(arguments)
    if arguments.keep:
        keep(arguments.keep, found)
    train, test = found["train"], found["test"]
    if arguments.search:
        search(train, arguments.search, arguments.seeds)
        return
    fit(train[:64], 2, 0)  # what is slow the first time only
    choosers = [Chooser(train, arguments.numbers, seed, arguments.max_concepts) for seed in range(arguments.seeds)]
    ways = {
        "auto": Chooser.auto,
        f"by hand, {arguments.by_hand}": lambda chooser: chooser.fixed(arguments.by_hand),
        "BIC": Chooser.by_bic,
        "held-out likelihood": Chooser.by_held_out,
    }
    head = "| K | concepts, by seed | faithfulness | effective | per image | seconds | cost | cosine of means | of θ |"
    print(head, "|---|---|---|---|---|---|---|---|---|", sep="\n", flush=True)
    for way, choose in ways.items():
        print(report(way, [choose(chooser) for chooser in choosers], choosers, test), flush=True)


if __name__ == "__main__":
    main()
