"""How many concepts are found in planted mixtures whose number is known, and what that costs.

    OMP_NUM_THREADS=1 uv run python benchmarks/number_of_concepts.py [--seeds 20] [--covariance tied]

500 images of 36 patches; concepts from 1 to 50 times the smallest; θ ~ Dirichlet; means typically 8.5 deviations apart.
With covariance "full" or "diag" every planted concept has a covariance of its own. The cost is that of `select` and of the
fit that goes on from the concepts it found, over that of a plain fit with as many concepts, in CPU time, on the first seeds.
"""

import argparse
import time
import warnings

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning

from pace import PACE, Observations
from pace.fitting.parameters import settings_of
from pace.model.selecting import Selection, select

IMAGES, TOKENS, DISTANCE = 500, 36, 8.5


def plant(seed: int, number: int, dim: int, covariance: str) -> Observations:
    rng = np.random.default_rng([seed, number, dim])
    sizes = np.geomspace(1, 50, number)
    means = rng.normal(size=(number, dim)) * DISTANCE / np.sqrt(2 * dim)
    theta = rng.dirichlet(max(2.0, number / 4) * sizes / sizes.sum(), IMAGES)
    concept = np.stack([rng.choice(number, TOKENS, p=mixture) for mixture in theta])
    patches = rng.normal(size=(IMAGES, TOKENS, dim))
    if covariance in ("full", "diag"):
        spread = np.exp(0.4 * rng.normal(size=(number, dim)))
        for k in range(number):
            turn = np.linalg.qr(rng.normal(size=(dim, dim)))[0] if covariance == "full" else np.eye(dim)
            patches[concept == k] = patches[concept == k] * spread[k] @ turn
    patches += means[concept]
    return Observations(patches.astype(np.float32), np.ones((IMAGES, TOKENS), np.float32))


def find(observations: Observations, start: int, seed: int) -> Selection:
    return select(observations, settings_of(PACE(device="cpu"), observations), start=start, seed=seed)


def fit_seconds(observations: Observations, covariance: str, number: int, **options: object) -> float:
    began = time.process_time()
    PACE(number, covariance=covariance, device="cpu", progress=False, **options).fit(observations)
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--timed", type=int, default=2, help="seeds on which the cost is measured")
    parser.add_argument("--covariance", default="tied")
    parser.add_argument("--numbers", type=int, nargs="+", default=[3, 12, 40])
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--starts", type=int, nargs="+", default=[10, 100, 300])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    torch.set_num_threads(1)
    find(plant(0, 3, 16, arguments.covariance), 10, 0)  # warm up
    print("| planted | d | start | found within 1 | found | seconds to find | whole cost |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for number in arguments.numbers:
        for dim in arguments.dims:
            first = arguments.first_seed
            data = [plant(seed, number, dim, arguments.covariance) for seed in range(first, first + arguments.seeds)]
            plain: dict[tuple[int, int], float] = {}
            for start in arguments.starts:
                found, seconds, costs = [], [], []
                for seed, observations in enumerate(data):
                    began = time.process_time()
                    selection = find(observations, start, first + seed)
                    seconds.append(time.process_time() - began)
                    k = selection.n_concepts
                    found.append(k)
                    if seed < arguments.timed:
                        if (seed, k) not in plain:
                            plain[seed, k] = fit_seconds(observations, arguments.covariance, k)
                        rest = fit_seconds(observations, arguments.covariance, k, init=selection.means.numpy())
                        costs.append((seconds[-1] + rest) / plain[seed, k])
                right = sum(abs(k - number) <= 1 for k in found)
                counts = ", ".join(f"{k} x {found.count(k)}" for k in sorted(set(found)))
                print(
                    f"| {number} | {dim} | {start} | {right} of {len(found)} | {counts} | {np.mean(seconds):.2f} "
                    f"| {np.mean(costs) if costs else float('nan'):.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
