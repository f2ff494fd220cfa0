"""What one EM pass costs as the number of images M, of concepts K and of dimensions d grows.

    uv run python benchmarks/cost.py --device cpu [--quick] [--vary images concepts dim] [--ways pace] [--out FILE]

One number is varied at a time around a base point. All methods go through the same generated images in two views, and start
from the same means and covariances:

    pace     E-step (θ of every image, with the pull of predictions and views) and M-step, from the third epoch on
    sklearn  E-step and M-step of GaussianMixture on the patches of both views; always on the CPU
    printed  the paper's procedure as printed, in plain torch (printed.py); full covariances only
    limit    the useful operations of PACE's distances and sums at the rate of this machine's own matrix product of that shape
             (float32 on a CPU, TF32 on a GPU): P_k is triangular, a scatter symmetric, and patches without weight add nothing

Where sklearn or the printed procedure would take long, part of the images is timed and scaled up (`sklearn_images`,
`printed_images` say how many were timed; ≈ in the table). Seconds are CPU time with one thread on a CPU, and wall time
otherwise. A method that fails leaves its error in the row.
"""

import argparse
import csv
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from common import mixture_at, patches, seconds, start_at, tf32, timed, views
from printed import BATCH, Printed
from sklearn.mixture._gaussian_mixture import _compute_precision_cholesky, _estimate_gaussian_parameters
from threadpoolctl import threadpool_limits
from torch import Tensor

from pace import PACE
from pace.fitting.arguments import alpha_of, settings_of
from pace.model.concepts import update
from pace.model.learning import Memory, expect_all
from pace.model.settings import Settings

SEED = 0
AXES = {"images": "M", "concepts": "K", "dim": "d"}
COVARIANCES = ("full", "tied", "diag")


@dataclass
class Row:
    """One point: what was varied, where it lies, and the seconds of a pass by each method."""

    machine: str
    covariance: str
    varied: str
    images: int
    concepts: int
    dim: int
    pace: float | None = None
    sklearn: float | None = None
    sklearn_images: int | None = None  # that were timed
    printed: float | None = None
    printed_images: int | None = None
    limit: float | None = None
    weights: float | None = None  # concepts a patch has weight in, on average
    error: str = ""

    def times(self, way: str) -> str:
        """How many times PACE's seconds this method took."""
        took = getattr(self, way)
        if not (took and self.pace):
            return "–"
        scaled = (getattr(self, f"{way}_images", None) or self.images) < self.images
        return f"{'≈ ' * scaled}{took / self.pace:.2g}"


@dataclass(frozen=True)
class Grid:
    """A base point, and the values each number takes."""

    tokens: int
    classes: int
    base: tuple[int, int, int]  # images, concepts, dim
    images: tuple[int, ...]
    concepts: tuple[int, ...]
    dim: tuple[int, ...]
    spend: float  # seconds to spend on repeating a pass
    sklearn: float  # operations of a pass above which only part of the images is timed
    printed: float  # likewise


GRIDS = {
    "cpu": Grid(
        tokens=197, classes=102, base=(64, 32, 128),
        images=(32, 64, 128, 256), concepts=(8, 16, 32, 64, 128), dim=(32, 64, 128, 256, 512),
        spend=1.5, sklearn=2.2e11, printed=2.2e11,
    ),
    "cuda": Grid(
        tokens=197, classes=102, base=(1792, 100, 768),
        images=(1792, 3584, 7169), concepts=(25, 100, 200), dim=(25, 192, 384, 768),
        spend=0.3, sklearn=6e11, printed=1e13,
    ),
    "quick": Grid(
        tokens=17, classes=5, base=(32, 4, 8), images=(32, 64), concepts=(4, 8), dim=(8, 16),
        spend=0.0, sklearn=1e6, printed=1e6,
    ),
}  # fmt: skip


class Problem:
    """Images generated for a point, and the common start."""

    def __init__(self, row: Row, grid: Grid, device: torch.device) -> None:
        torch.manual_seed(SEED)
        x, owner = patches(row.images, grid.tokens, row.dim, row.concepts, device, seed=SEED)
        self.row, self.grid = row, grid
        # CPU time where possible, since it does not count what other processes do meanwhile.
        alone = device.type == "cpu" and torch.get_num_threads() == 1
        self.clock = time.process_time if alone else time.perf_counter
        self.views = views(x, owner, row.concepts, grid.classes)
        self.patches = 2 * owner.numel()
        means = x.new_zeros(row.concepts, row.dim).index_add_(0, owner.flatten(), x.flatten(0, 1))
        means /= owner.flatten().bincount(minlength=row.concepts).clamp_min(1)[:, None]
        model = PACE(row.concepts, covariance=row.covariance, device=device, progress=False)
        self.settings: Settings = settings_of(model, self.views[0])
        self.start, self.prior = start_at(means, self.views[0], model, self.settings)
        printed = replace(self.settings, updates="paper")
        self.printed_alpha = float(alpha_of(model, row.concepts, self.views[0], printed)[0])

    def some(self, operations: float, allowed: float) -> int:
        """Images that take about as many operations as are allowed, if all of them take `operations`; at least a batch."""
        share = int(allowed / operations * self.row.images)
        return min(self.row.images, max(BATCH, share // BATCH * BATCH))

    def quickest(self, work: Callable[[], object]) -> float:
        took = [timed(work, self.clock)]
        while sum(took) + min(took) < self.grid.spend and len(took) < 30:
            took.append(timed(work, self.clock))
        return min(took)


def time_pace(problem: Problem) -> None:
    row, settings = problem.row, problem.settings
    concepts = problem.start
    memory = Memory(2, row.images, problem.grid.tokens, concepts, settings)

    def one_pass() -> None:
        nonlocal concepts
        concepts = update(concepts, expect_all(*problem.views, concepts, settings, memory), problem.prior, settings)

    one_pass()
    entries, family = 0, type(concepts.gaussians)
    accumulate = family._accumulate

    def counting(self: object, x: Tensor, r: Tensor, sums: dict[str, Tensor]) -> None:
        nonlocal entries
        entries += int(r.count_nonzero())
        accumulate(self, x, r, sums)

    with patch.object(family, "_accumulate", counting):
        one_pass()
    row.weights = entries / problem.patches
    row.pace = problem.quickest(one_pass)
    row.limit = limit(problem, entries)


def limit(problem: Problem, entries: int) -> float:
    """Seconds that the useful operations take at the rate of a matrix product of the same shape."""
    n, k, d = problem.patches, problem.row.concepts, problem.row.dim
    device = problem.start.offset.device
    rows = min(n, 1 << (14 if device.type == "cpu" else 17))

    def at_rate(operations: float, inner: int, columns: int) -> float:
        a, b = torch.randn(rows, inner, device=device), torch.randn(inner, columns, device=device)
        with tf32(device.type == "cuda"):
            return operations * seconds(lambda: a @ b, 0.1, problem.clock) / (2 * rows * inner * columns)

    triangle = d * (d + 1)
    if problem.row.covariance == "full":
        return at_rate((n * k + entries) * triangle, d, d)
    if problem.row.covariance == "tied":  # whitened and scattered once, whatever the number of concepts
        return at_rate(2 * n * triangle, d, d) + at_rate(2 * (n * k + entries) * d, d, k)
    return at_rate(4 * (n * k + entries) * d, 2 * d, k)  # of patches and their squares


def time_sklearn(problem: Problem) -> None:
    row, d = problem.row, problem.row.dim
    # Tied covariances are treated as K equal ones; diagonal ones wait for memory, hence the large factor.
    each = {"full": 4 * d, "tied": 2 * d, "diag": 256}[row.covariance]
    row.sklearn_images = problem.some(problem.patches * row.concepts * d * each, problem.grid.sklearn)
    x = torch.cat([view.embeddings[: row.sklearn_images].flatten(0, 1) for view in problem.views]).cpu().numpy()
    mixture = mixture_at(problem.start)

    def for_images() -> None:
        _, log_responsibilities = mixture._e_step(x)
        found = _estimate_gaussian_parameters(x, np.exp(log_responsibilities), mixture.reg_covar, row.covariance)
        mixture.weights_, mixture.means_, mixture.covariances_ = found[0] / found[0].sum(), *found[1:]

    def once() -> None:
        mixture.precisions_cholesky_ = _compute_precision_cholesky(mixture.covariances_, row.covariance)

    share = problem.quickest(for_images) * row.images / row.sklearn_images
    row.sklearn = share + problem.quickest(once)


def time_printed(problem: Problem) -> None:
    row = problem.row
    if row.covariance != "full":
        return
    row.printed_images = problem.some(3 * problem.patches * row.concepts * row.dim**2, problem.grid.printed)
    original, perturbed = (view[: row.printed_images] for view in problem.views)
    start = problem.start
    means = start.gaussians.means + start.offset
    printed = Printed(means, start.gaussians.covariances().to(means), problem.printed_alpha, problem.grid.classes)

    def for_images() -> None:
        printed.clear()
        printed.learn(original, perturbed)

    printed.learn(original[:BATCH], perturbed[:BATCH])
    share = problem.quickest(for_images) * row.images / (row.printed_images // BATCH * BATCH)
    row.printed = share + problem.quickest(printed.finish)
    if not bool(printed.log_det.isfinite().all()):
        row.error += "printed: a covariance is not positive definite; "


WAYS: dict[str, Callable[[Problem], None]] = {"pace": time_pace, "sklearn": time_sklearn, "printed": time_printed}


def measure(row: Row, grid: Grid, device: torch.device, ways: Iterable[str] = WAYS) -> None:
    problem = Problem(row, grid, device)
    for name in ways:
        try:
            WAYS[name](problem)
        except Exception as error:  # the other methods go on
            row.error += f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}; "


def machine_of(device: torch.device, threads: int) -> str:
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
    else:
        known = Path("/proc/cpuinfo")
        lines = known.read_text(encoding="utf-8").splitlines() if known.exists() else []
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else platform.processor()
    return f"{name}, {threads} CPU thread{'s' * (threads != 1)}, torch {torch.__version__.partition('+')[0]}"


def points(grid: Grid, vary: list[str]) -> Iterator[tuple[str, dict[str, int]]]:
    base = dict(zip(AXES, grid.base, strict=True))
    for varied in vary:
        yield from ((varied, base | {varied: value}) for value in getattr(grid, varied))


def line(row: Row) -> str:
    """A row of the Markdown table."""
    took = "failed" if row.pace is None else f"{row.pace:.2g} s"
    cells = [row.covariance, f"{row.images:,}", str(row.concepts), str(row.dim), took]
    return f"| {' | '.join([*cells, *(row.times(way) for way in ('sklearn', 'printed', 'limit')), row.error])} |"


def write(rows: list[Row], path: str | Path) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        table.writeheader()
        table.writerows(asdict(row) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="a little of everything, to see that it runs")
    parser.add_argument("--vary", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--covariance", nargs="+", choices=COVARIANCES, default=list(COVARIANCES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="sklearn takes most of the time")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="for all methods on the CPU")
    parser.add_argument("--out", help="CSV file, rewritten after every point")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    grid = GRIDS["quick" if arguments.quick else arguments.device]
    torch.set_num_threads(arguments.threads)
    machine = machine_of(device, arguments.threads)
    print(f"{machine}; {grid.tokens} tokens, {grid.classes} classes, two views, seed {SEED}\n")
    print(
        "| covariance | M | K | d | PACE | sklearn | printed | limit | errors |\n|---|---|---|---|---|---|---|---|---|"
    )
    known: dict[tuple[object, ...], Row] = {}  # the base lies on every axis and is timed once
    with threadpool_limits(arguments.threads):
        for covariance in arguments.covariance:
            for varied, where in points(grid, arguments.vary):
                place = (covariance, *where.values())
                if place in known:
                    continue
                row = known[place] = Row(machine, covariance, varied, **where)
                measure(row, grid, device, arguments.ways)
                print(line(row), flush=True)
                if arguments.out:
                    write(list(known.values()), arguments.out)
                if device.type == "cuda":
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
