"""One EM pass of PACE beside one of scikit-learn's GaussianMixture, on the same points, in one run, as ratios.

    uv run python benchmarks/em_pass.py [--concepts 100] [--threads 2] [--covariance full] [--share 0.1]

Both start from the same means and covariances, work in float32 on the same threads and make one E-step and one M-step. PACE's
pass also finds θ of every image: `sweeps` says how many sweeps that took (one sweep is what GaussianMixture's E-step does).
`rate` is what a pass would need with dense, square matrix products (4 n d² K operations; 8 n d K for diagonal ones) over its
time, as a share of the machine's own float32 product of (n, d) by (d, d), measured beside it; above 1 means that operations
were saved.
"""

import argparse
import resource
import time
from dataclasses import replace

import numpy as np
import torch
from common import mixture_at

from pace import PACE, Observations
from pace.fitting.arguments import settings_of
from pace.fitting.start import find_start
from pace.model.concepts import update
from pace.model.learning import expect_all

TOKENS = 196
_PAUSE = 0.3  # seconds


def points(n: int, d: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Concepts that overlap somewhat, each image a mixture of a few: what embeddings look like to a mixture model."""
    means = rng.normal(size=(k, d)).astype(np.float32) * 1.5 * (16 / d) ** 0.5
    shares = rng.dirichlet(np.full(k, 0.1), n // TOKENS)
    owner = np.stack([rng.choice(k, TOKENS, p=share) for share in shares]).reshape(-1)
    return means[owner] + rng.normal(size=(len(owner), d)).astype(np.float32)


def best_of(repeats: int, *works) -> list[float]:
    """The shortest time of each. They take turns, so that a slow moment of the machine is not one's alone.

    The pause before each is for the threads of the one before, of another library: they keep a core busy for a while.
    """
    best = [float("inf")] * len(works)
    for _ in range(repeats):
        for number, work in enumerate(works):
            time.sleep(_PAUSE)
            start = time.perf_counter()
            work()
            best[number] = min(best[number], time.perf_counter() - start)
    return best


def compare(covariance: str, d: int, n: int, k: int, repeats: int) -> dict[str, float]:
    x = points(n, d, k, np.random.default_rng(0))
    observations = Observations(x.reshape(-1, TOKENS, d), np.ones((len(x) // TOKENS, TOKENS), np.float32))
    model = PACE(k, covariance=covariance, n_init=1, device="cpu", prune=False, progress=False)
    settings = settings_of(model, observations)
    start = find_start(model, observations, None, settings)
    concepts, prior = start.concepts, start.prior

    theirs = mixture_at(concepts)

    def sklearn_pass() -> None:
        _, responsibilities = theirs._e_step(x)
        theirs._m_step(x, responsibilities)

    def pace_pass(sweeps: int) -> None:
        nonlocal concepts
        chosen = replace(settings, max_sweeps=sweeps)
        concepts = update(concepts, expect_all(observations, None, concepts, chosen), prior, chosen)

    sklearn_pass(), pace_pass(1)  # warm up, and move off the start
    product, a = torch.from_numpy(x[: min(n, 16384)]), torch.randn(d, d)
    (matmul,) = best_of(5, lambda: product @ a)
    peak = 2 * len(product) * d * d / matmul
    sklearn_time, one_sweep, converged = best_of(repeats, sklearn_pass, lambda: pace_pass(1), lambda: pace_pass(100))
    dense = 4 * len(x) * d * d * k if covariance == "full" else 8 * len(x) * d * k
    return {
        "d": d, "n": len(x), "sklearn": sklearn_time, "one": one_sweep, "all": converged,
        "ratio one": sklearn_time / one_sweep, "ratio all": sklearn_time / converged,
        "rate": dense / one_sweep / peak,
        "peak": peak / 1e9,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concepts", type=int, default=100)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--repeats", type=int, default=3, help="passes of which the quickest counts; diagonal ones five times"
    )
    parser.add_argument("--covariance", choices=["full", "tied", "diag"], help="only these; all by default")
    parser.add_argument("--share", type=float, default=1.0, help="of the points, for a quick look")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    from threadpoolctl import threadpool_limits

    with threadpool_limits(arguments.threads):
        print(f"K = {arguments.concepts}, {arguments.threads} threads, torch {torch.__version__}, float32")
        print("covariance    d       n   sklearn   PACE 1 sweep  ratio   converged  ratio   rate   product GFLOP/s")
        for covariance, d, n in (
            ("full", 64, 60000),
            ("full", 384, 40000),
            ("full", 768, 25000),
            ("tied", 64, 60000),
            ("tied", 384, 40000),
            ("diag", 64, 60000),
            ("diag", 384, 40000),
            ("diag", 768, 40000),
        ):
            if arguments.covariance not in (None, covariance):
                continue
            # A pass of a tenth of a second is easily disturbed, and cheaply repeated.
            repeats = arguments.repeats * (1 if covariance == "full" else 5)
            r = compare(covariance, d, int(arguments.share * n), arguments.concepts, repeats)
            print(
                f"{covariance:10} {d:4} {r['n']:7} {r['sklearn']:8.2f}s {r['one']:12.2f}s {r['ratio one']:6.1f} "
                f"{r['all']:10.2f}s {r['ratio all']:6.1f} {r['rate']:6.2f} {r['peak']:12.0f}",
                flush=True,
            )
    print(f"peak memory of the whole run: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
