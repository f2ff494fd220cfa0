"""One EM pass of PACE beside one of scikit-learn's GaussianMixture, on the same points, in one run, as ratios.

    uv run python benchmarks/em_pass.py [--concepts 100] [--threads 2] [--covariance full]

Both start from the same means and covariances, work in float32 on the same threads and make one E-step and one M-step. PACE's
pass also finds θ of every image: `sweeps` says how many sweeps that took (one sweep is what GaussianMixture's E-step does).
`rate` is what a pass would need with dense, square matrix products (4 n d² K operations; 8 n d K for diagonal ones) over its
time, as a share of the machine's own float32 product of (n, d) by (d, d), measured beside it; above 1 means that operations
were saved. `done` counts only the operations that were carried out, in whatever precision.
"""

import argparse
import resource
import time

import numpy as np
import torch
from common import mixture_at

from pace import PACE, Observations
from pace.fitting.parameters import settings_of
from pace.model.gaussians import dense
from pace.model.learning import pass_over, update

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
    model = PACE(k, covariance=covariance, n_init=1, max_iter=1, max_sweeps=1, device="cpu", progress=False)
    settings = settings_of(model, observations)
    start = model._start(observations, None, settings)
    concepts, prior = start.concepts, start.prior

    theirs = mixture_at(concepts)

    def sklearn_pass() -> None:
        _, responsibilities = theirs._e_step(x)
        theirs._m_step(x, responsibilities)

    def pace_pass(sweeps: int) -> None:
        nonlocal concepts
        chosen = settings.__class__(**{**settings.__dict__, "max_sweeps": sweeps})
        concepts = update(concepts, pass_over(observations, None, concepts, chosen), prior, chosen)

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
        "done": _carried_out(covariance, concepts, observations, settings, d) / one_sweep / peak,
        "peak": peak / 1e9,
    }  # fmt: skip


def _carried_out(covariance, concepts, observations, settings, d) -> float:
    """Operations of the products in a full pass: pairs or triangular blocks, and the scatter of patches with weight."""
    if covariance != "full":
        return float("nan")
    k, width = len(concepts), dense._BLOCK["cpu"][1]
    ends = [min(s + width, d) - s for s in range(0, d, width)]
    distance = sum(2 * min(s + width, d) * w for s, w in zip(range(0, d, width), ends, strict=True))
    if d <= dense._PAIRED_DIM:
        distance = d * (d + 3)
    n = len(observations) * observations.n_tokens
    seen = []
    accumulate = dense.FullGaussians.accumulate
    dense.FullGaussians.accumulate = lambda self, x, r, sums: seen.append(int((r > 1.2e-7).sum()))
    pass_over(observations, None, concepts, settings)
    dense.FullGaussians.accumulate = accumulate
    return n * k * distance + 2 * sum(seen) * d * d


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concepts", type=int, default=100)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--repeats", type=int, default=3, help="passes of which the quickest counts; diagonal ones five times"
    )
    parser.add_argument("--covariance", choices=["full", "diag"], help="only these; both by default")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    from threadpoolctl import threadpool_limits

    with threadpool_limits(arguments.threads):
        screened = "with" if dense._quick_in_bfloat16(torch.device("cpu")) else "without"
        print(
            f"K = {arguments.concepts}, {arguments.threads} threads, torch {torch.__version__}, float32, {screened} screen"
        )
        print(
            "covariance    d       n   sklearn   PACE 1 sweep  ratio   converged  ratio   rate   done   product GFLOP/s"
        )
        for covariance, d, n in (
            ("full", 64, 60000),
            ("full", 384, 40000),
            ("full", 768, 25000),
            ("diag", 64, 60000),
            ("diag", 384, 40000),
            ("diag", 768, 40000),
        ):
            if arguments.covariance not in (None, covariance):
                continue
            # A pass of a tenth of a second is easily disturbed, and cheaply repeated.
            repeats = arguments.repeats * (5 if covariance == "diag" else 1)
            r = compare(covariance, d, n, arguments.concepts, repeats)
            print(
                f"{covariance:10} {d:4} {r['n']:7} {r['sklearn']:8.2f}s {r['one']:12.2f}s {r['ratio one']:6.1f} "
                f"{r['all']:10.2f}s {r['ratio all']:6.1f} {r['rate']:6.2f} {r['done']:6.2f} {r['peak']:12.0f}",
                flush=True,
            )
    print(f"peak memory of the whole run: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
