"""How many concepts `n_concepts="auto"` finds in planted mixtures whose number is known, and what that costs.

    OMP_NUM_THREADS=1 uv run python benchmarks/number_of_concepts.py [--seeds 20] [--covariance tied]

500 images of 36 patches; concepts from 1 to 50 times the smallest; θ ~ Dirichlet; means typically 8.5 standard deviations
apart. With covariance "full" or "diag" every planted concept has its own. `cost` is the CPU time of the fit over that of a fit
with as many concepts given by hand, on the first `--timed` seeds.
"""

import argparse
import time
import warnings

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning

from pace import PACE, Observations

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


def fit(observations: Observations, number: int | str, covariance: str, seed: int) -> tuple[int, float]:
    """The number of concepts, and CPU seconds."""
    began = time.process_time()
    model = PACE(number, covariance=covariance, seed=seed, device="cpu", progress=False).fit(observations)
    return len(model.means_), time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, nargs="+", default=[3, 12, 40])
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--covariance", default="tied")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--timed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    torch.set_num_threads(1)
    print("| planted | d | within 1 | found | cost |\n|---|---|---|---|---|", flush=True)
    for number in arguments.numbers:
        for dim in arguments.dims:
            found, costs = [], []
            for seed in range(arguments.seeds):
                observations = plant(seed, number, dim, arguments.covariance)
                k, took = fit(observations, "auto", arguments.covariance, seed)
                found.append(k)
                if seed < arguments.timed:
                    costs.append(took / fit(observations, k, arguments.covariance, seed)[1])
            right = sum(abs(k - number) <= 1 for k in found)
            counts = ", ".join(f"{k} x {found.count(k)}" for k in sorted(set(found)))
            cost = f"{np.mean(costs):.2f}" if costs else "–"
            print(f"| {number} | {dim} | {right} of {len(found)} | {counts} | {cost} |", flush=True)


if __name__ == "__main__":
    main()
