"""Peak memory of learning from a stream of batches: it must not grow with the number of images.

    uv run python benchmarks/memory.py [--covariance full] [--dim 384]

Each batch is made, learned from with `partial_fit` and forgotten. Peak memory is that of the process, libraries included.
"""

import argparse
import resource

import numpy as np

from pace import PACE, Observations

TOKENS = 197


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--covariance", default="full")
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--concepts", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--batches", type=int, default=32)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(arguments.concepts, arguments.dim)).astype(np.float32)
    model = PACE(arguments.concepts, covariance=arguments.covariance, n_init=1, device="cpu", seed=0, max_sweeps=5)
    print(f"{arguments.covariance}, d = {arguments.dim}, K = {arguments.concepts}, {arguments.batch} images a batch")
    for step in range(1, arguments.batches + 1):
        owner = rng.integers(arguments.concepts, size=(arguments.batch, TOKENS))
        noise = rng.normal(size=(arguments.batch, TOKENS, arguments.dim)).astype(np.float32)
        model.partial_fit(Observations(centres[owner] + noise, np.ones((arguments.batch, TOKENS), np.float32)))
        if step & (step - 1) == 0:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            print(f"{step * arguments.batch:7} images: peak {peak:.3f} GiB", flush=True)


if __name__ == "__main__":
    main()
