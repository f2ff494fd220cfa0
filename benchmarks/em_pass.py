"""One EM pass of PACE next to one of scikit-learn's GaussianMixture, on the same points, in one run.

    uv run python benchmarks/em_pass.py [--concepts 100] [--threads 2] [--covariance full]

Both start from the same means and covariances, work in float32 on the same threads and make one E-step and one M-step. PACE's
pass also finds θ of every image: with one sweep, which is what GaussianMixture's E-step does, and until θ has settled.
`rate` is the work of dense, square matrix products (4 n d² K operations; 8 n d K for diagonal ones) over PACE's time with
one sweep, relative to the machine's own float32 product of (n, d) by (d, d); above 1 means that PACE saves operations.

    PYTHONPATH=… python benchmarks/em_pass.py --against kmeans --device cuda

sets it beside a pass of Lloyd's algorithm by flash-kmeans instead (`pip install --no-deps --target … flash-kmeans`; Triton on a
GPU, its plain torch on a CPU), over points generated on the device. A k-means pass only says which centre is nearest.
"""

import argparse
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module

import numpy as np
import torch
from common import mixture_at, patches, seconds
from threadpoolctl import threadpool_limits

from pace import PACE, Observations
from pace.fitting.arguments import settings_of
from pace.fitting.start import find_start
from pace.model.concepts import Concepts, update
from pace.model.learning import Memory, expect_all

TOKENS = 196
_PAUSE = 0.3  # seconds
_POINTS = {
    "full": ((64, 60000), (384, 40000), (768, 25000)),
    "diag": ((64, 60000), (384, 40000), (768, 40000)),
}  # d, n
_BESIDE_KMEANS = {"cpu": ((64, 40000), (384, 20000)), "cuda": ((384, 1500000), (768, 1000000))}


def points(n: int, d: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Overlapping concepts, each image a mixture of a few."""
    means = rng.normal(size=(k, d)).astype(np.float32) * 1.5 * (16 / d) ** 0.5
    shares = rng.dirichlet(np.full(k, 0.1), n // TOKENS)
    owner = np.stack([rng.choice(k, TOKENS, p=share) for share in shares]).reshape(-1)
    return means[owner] + rng.normal(size=(len(owner), d)).astype(np.float32)


def best_of(repeats: int, *works: Callable[[], object]) -> list[float]:
    """The shortest time of each. They take turns, so that a slow moment of the machine hits all of them.

    The pause is for threads of the library used before, which keep a core busy for a while.
    """
    best = [float("inf")] * len(works)
    for _ in range(repeats):
        for number, work in enumerate(works):
            time.sleep(_PAUSE)
            start = time.perf_counter()
            work()
            best[number] = min(best[number], time.perf_counter() - start)
    return best


def passes(observations: Observations, k: int, covariance: str, device: str) -> tuple[Concepts, Callable[[int], None]]:
    """Where the paper's model starts, and a function that makes one more pass of a fit with at most so many sweeps."""
    model = PACE(k, parts=None, covariance=covariance, n_init=1, device=device, progress=False)
    settings = settings_of(model, observations)
    start = find_start(model, observations, None, settings)
    concepts = start.concepts
    memory = Memory(1, len(observations), observations.n_tokens, concepts, settings)

    def one_pass(sweeps: int) -> None:
        nonlocal concepts
        chosen = replace(settings, max_sweeps=sweeps)
        concepts = update(concepts, expect_all(observations, None, concepts, chosen, memory), start.prior, chosen)

    return concepts, one_pass


def beside_kmeans(d: int, n: int, k: int, device: str) -> str:
    """One row of the table of tied and diagonal passes beside k-means."""
    x, _ = patches(n // TOKENS, TOKENS, d, k, torch.device(device))
    flat = x.view(1, -1, d)
    if device == "cuda":
        lloyd = import_module("flash_kmeans").batch_kmeans_Euclid
    else:
        lloyd = import_module("flash_kmeans.torch_fallback").batch_kmeans_Euclid_torch_native
    centres = flat[:, torch.randperm(flat.shape[1])[:k].to(x.device)].clone()

    clock = time.perf_counter if device == "cuda" else time.process_time  # which others do not disturb

    def kmeans(iterations: int) -> float:
        return seconds(lambda: lloyd(flat, k, max_iters=iterations, tol=-1.0, init_centroids=centres), clock=clock)

    kmeans_pass = (kmeans(11) - kmeans(1)) / 10  # without the norms, which are computed once
    observations = Observations(x, x.new_ones(x.shape[:2]))
    cells = [f"| {d} | {flat.shape[1]:,} | {kmeans_pass:.3f} s"]
    for covariance in ("tied", "diag"):
        _, pace_pass = passes(observations, k, covariance, device)
        pace_pass(1)
        one, settled = (seconds(partial(pace_pass, sweeps), clock=clock) for sweeps in (1, 100))
        cells.append(f"{one:.3f} s | {one / kmeans_pass:.1f} | {settled / kmeans_pass:.1f}")
    return " | ".join(cells) + " |"


def compare(covariance: str, d: int, n: int, k: int, repeats: int) -> str:
    """One row of the table."""
    x = points(n, d, k, np.random.default_rng(0))
    observations = Observations(x.reshape(-1, TOKENS, d), np.ones((len(x) // TOKENS, TOKENS), np.float32))
    start, pace_pass = passes(observations, k, covariance, "cpu")
    theirs = mixture_at(start)

    def sklearn_pass() -> None:
        _, responsibilities = theirs._e_step(x)
        theirs._m_step(x, responsibilities)

    sklearn_pass(), pace_pass(1)  # warm up, and move off the start
    some, square = torch.from_numpy(x[:16384]), torch.randn(d, d)
    (product,) = best_of(5, lambda: some @ square)
    peak = 2 * len(some) * d * d / product
    sklearn, one, settled = best_of(repeats, sklearn_pass, lambda: pace_pass(1), lambda: pace_pass(100))
    dense = 4 * len(x) * d * d * k if covariance == "full" else 8 * len(x) * d * k
    return (
        f"| {covariance} | {d} | {len(x):,} | {sklearn:.2f} s | {one:.2f} s | {sklearn / one:.1f} "
        f"| {settled:.2f} s | {sklearn / settled:.1f} | {dense / one / peak:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concepts", type=int, default=100)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3, help="passes, the fastest of which counts; diagonal ones x 5")
    parser.add_argument("--covariance", choices=_POINTS, help="only these; both by default")
    parser.add_argument("--against", choices=("sklearn", "kmeans"), default="sklearn")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="for --against kmeans")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"K = {arguments.concepts}, {arguments.threads} threads, torch {torch.__version__}, float32\n")
    if arguments.against == "kmeans":
        print(
            "| d | points | k-means | tied, 1 sweep | ratio | settled, ratio | diag, 1 sweep | ratio | settled, ratio |"
        )
        print("|---" * 9 + "|")
        for d, n in _BESIDE_KMEANS[arguments.device]:
            print(beside_kmeans(d, n, arguments.concepts, arguments.device), flush=True)
        return
    print("| covariance | d | points | sklearn | PACE, 1 sweep | ratio | settled | ratio | rate |\n" + "|---" * 9 + "|")
    with threadpool_limits(arguments.threads):
        for covariance in [arguments.covariance] if arguments.covariance else _POINTS:
            # A pass of a tenth of a second is easily disturbed, and cheap to repeat.
            repeats = arguments.repeats * (5 if covariance == "diag" else 1)
            for d, n in _POINTS[covariance]:
                print(compare(covariance, d, n, arguments.concepts, repeats), flush=True)
    print(f"\npeak memory of the whole run: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
