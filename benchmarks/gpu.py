"""What a GPU does for PACE, beside its own rate for plain products, in one run.

    uv run python benchmarks/gpu.py [--parts products distances scatter factors fit tied small explain] [--small] [--profile]

Rates count useful operations: n K d (d + 1) for the distances of n patches (P_k is triangular) and as many for every weighted
patch in a scatter (it is symmetric), whatever was carried out for them. `of TF32` and `of float16` are shares of the same GPU's
product of (n, d) by (d, d). Errors are against float64 on a sample: of a distance in nats (half its difference), of a scatter
in products of standard deviations. Points are generated on the GPU: a few concepts an image, each with its own covariance, and
channels of unequal spread. `--small` is for a look on a CPU; without CUDA or Triton the kernels' rows are left out.
"""

import argparse
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from common import AUTHORS, patches, seconds, setting, synchronise, tf32, views
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

import pace.fitting.start
import pace.model.learning
from pace import PACE, Backbone, Observations
from pace.fitting.parameters import settings_of
from pace.model import inference, learning
from pace.model.gaussians import FAMILIES, FullGaussians, Prior, dense, plain
from pace.model.gaussians.family import by_concept

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Rows, columns and depth of a tile, warps, stages.
TILES = {
    False: [(128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 4, 3), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4),
            (256, 128, 64, 8, 3), (64, 256, 64, 4, 3), (128, 128, 128, 8, 2)],
    True: [(128, 128, 64, 8, 3), (128, 128, 32, 8, 4), (128, 256, 32, 8, 3), (128, 256, 64, 8, 2), (256, 128, 32, 8, 3)],
}  # fmt: skip
TILES_TF32 = [(128, 128, 32, 8, 3), (128, 256, 32, 8, 3)]
BLOCKS = [(1 << 16, 256, 512), (1 << 16, 256, 1024), (1 << 16, 128, 512), (1 << 16, 384, 768), (1 << 14, 256, 2048)]
# Rows prepared, rows summed up in one go, depth, warps, stages.
SCATTERS = [(1 << 18, 4096, 64, 8, 4), (1 << 19, 4096, 64, 8, 4), (1 << 20, 4096, 64, 8, 4), (1 << 21, 4096, 64, 8, 4),
            (1 << 20, 4096, 32, 4, 5)]  # fmt: skip
# Entries of φ that a thread works on at once, concepts that a warp takes.
SWEEPS = [(8, 256), (16, 256), (32, 256), (64, 256), (16, 64), (32, 64), (16, 32)]


class Size:
    """How much of everything."""

    def __init__(self, small: bool):
        self.rows, self.dim, self.concepts = (2048, 64, 8) if small else (1 << 16, 768, 100)
        self.product_rows = 2048 if small else 201_728
        self.images, self.tokens, self.classes = (48, 17, 3) if small else (7169, 197, 102)
        self.epochs = 2 if small else 10
        self.explained = 32 if small else 2000
        self.explained_dims = (16, 32) if small else (384, 768)
        self.small_dim_images = 48 if small else 7169


def attempt(name: str, work: Callable[[], str]) -> None:
    """One row of a table; a configuration that does not fit the GPU says so, and the others go on."""
    try:
        print(f"  {name:58} {work()}", flush=True)
    except Exception as error:
        print(f"  {name:58} {type(error).__name__}: {str(error).splitlines()[0][:100]}", flush=True)


def fitted(size: Size) -> tuple[FullGaussians, Tensor, Tensor, Prior]:
    """Gaussians that fit generated patches, the patches, who made each, and the prior."""
    x, owner = patches(size.rows // 64, 64, size.dim, size.concepts, DEVICE)
    x, owner = x.flatten(0, 1), owner.flatten()
    x -= x.mean(0)
    prior = Prior(torch.cov(x.T).double() / 2, float(size.dim))
    start = FullGaussians.seed(torch.zeros(size.concepts, size.dim, device=DEVICE), prior.covariance, 0)
    sums = start.empty_sums()
    start.accumulate(x, torch.nn.functional.one_hot(owner, size.concepts).float(), sums)
    return start.maximise(sums, prior), x, owner, prior


def products(size: Size) -> dict[str, float]:
    """TFLOP/s of (n, d)(d, d) by precision."""
    rates = {}
    n, d = size.product_rows, size.dim
    print(f"\n# products: ({n}, {d}) by ({d}, {d})")
    for name, kind, fast in (
        ("float32", torch.float32, False), ("TF32", torch.float32, True),
        ("bfloat16", torch.bfloat16, False), ("float16", torch.float16, False), ("float64", torch.float64, False),
    ):  # fmt: skip
        a, b = torch.randn(n, d, device=DEVICE).to(kind), torch.randn(d, d, device=DEVICE).to(kind)
        with tf32(fast):
            rates[name] = 2 * n * d * d / seconds(lambda a=a, b=b: a @ b) / 1e12
        print(f"  {name:10} {rates[name]:8.2f} TFLOP/s", flush=True)
    return rates


def distances(size: Size, rates: dict[str, float]) -> None:
    gaussians, x, _, _ = fitted(size)
    n, (k, d) = len(x), gaussians.means.shape
    useful, sample = n * k * d * (d + 1), slice(0, n, max(1, n // 256))
    wide = FullGaussians(gaussians.means.double(), gaussians.precision_cholesky.double())
    exact = plain.Distances(wide.means, wide.precision_cholesky).precise(x[sample].double())
    surprise = exact + wide.log_det
    near = surprise <= surprise.amin(1, keepdim=True) + 2 * 35.5
    print(
        f"\n# distances: n = {n}, K = {k}, d = {d}; {float(near.sum(1).double().mean()):.2f} concepts within 35.5 nats"
    )

    def row(work: Callable[[], Tensor]) -> str:
        took = seconds(work)
        off = (work()[sample].double() - exact).abs() / 2
        rate = useful / took / 1e12
        return (
            f"{took * 1e3:8.2f} ms {rate:7.1f} TFLOP/s  {rate / rates['TF32']:5.2f} of TF32 {rate / rates['float16']:5.2f} of "
            f"float16  error: near max {float(off[near].max()):.4f} mean {float(off[near].mean()):.4f}, "
            f"all {float(off.max()):.3f}"
        )

    in_torch = plain.Distances(gaussians.means, gaussians.precision_cholesky)
    for block in BLOCKS:
        with setting(plain, "BLOCK", {"cpu": block, "cuda": block}):
            for name, fast in (("float32", False), ("TF32", True)):
                with tf32(fast):
                    attempt(f"torch, {name}, blocks {block}", lambda: row(lambda: in_torch.precise(x)))
            attempt(f"torch, bfloat16, blocks {block}", lambda: row(lambda: in_torch.rough(x)))
    if not dense._has_kernels(x):
        print("  no kernels here")
    else:
        from pace.model.gaussians import fused as kernels

        in_triton = kernels.Distances(gaussians.means, gaussians.precision_cholesky)
        white, factors = in_triton.read(x), in_triton._factors
        attempt("making the halves of x", lambda: f"{seconds(lambda: in_triton.read(x)) * 1e3:8.2f} ms")
        for precise in (False, True):
            best, tiles = {}, {}
            for tile in TILES[precise]:

                def timed(tile: tuple[int, ...] = tile, precise: bool = precise, best: dict = best) -> str:
                    work = lambda: kernels.distances(white, factors, in_triton._shift, precise=precise)  # noqa: E731
                    line = row(work)
                    best[tile] = float(line.split()[0])
                    return line

                tiles = kernels.DISTANCES | {precise: tile}
                with setting(kernels, "DISTANCES", tiles):
                    attempt(f"kernel, {'both halves' if precise else 'float16'}, {tile}", timed)
            if best:
                kernels.DISTANCES[precise] = min(best, key=best.__getitem__)
                print(f"  -> from here on: DISTANCES[{precise}] = {kernels.DISTANCES[precise]}")
        relative = factors.high.float() + factors.low.float()
        same = kernels.Halves(relative, relative)
        patches32 = kernels.Halves(white.high.float() + white.low.float(), white.low.float())
        for tile in TILES_TF32:
            with setting(kernels, "DISTANCES", kernels.DISTANCES | {False: tile}):
                work = lambda: kernels.distances(patches32, same, in_triton._shift, precise=False)  # noqa: E731
                attempt(f"kernel, TF32, {tile}", lambda w=work: row(w))
    attempt("mahalanobis, as it is used", lambda: row(lambda: gaussians.mahalanobis(x)))
    attempt("near_distances, as it is used (35.5 nats)", lambda: row(lambda: gaussians.near_distances(x, 35.5)))


def scatter(size: Size, rates: dict[str, float]) -> None:
    gaussians, x, owner, _ = fitted(size)
    n, (k, d) = len(x), gaussians.means.shape
    for entries in (1, 3, 30, k - 1):
        r = torch.zeros(n, k, device=DEVICE)
        r.scatter_(1, torch.rand(n, k, device=DEVICE).topk(min(entries, k), 1).indices, 0.1)
        r.scatter_(1, owner[:, None], 1.0)
        rows, concepts, counts = by_concept(r != 0)
        weights, useful = r[rows, concepts], len(rows) * d * (d + 1)
        some = rows[: int(counts[0])]
        centred = (x[some].double() - gaussians.means[0].double()) * weights[: len(some), None].double().sqrt()
        exact = centred.T @ centred
        scale = exact.diagonal().sqrt().clamp_min(1e-12)
        print(f"\n# scatter: n = {n}, K = {k}, d = {d}; {len(rows) / n:.1f} weights a patch")

        def line(took: float, useful: int = useful) -> str:
            rate = useful / took / 1e12
            return (
                f"{took * 1e3:8.2f} ms {rate:7.1f} TFLOP/s  {rate / rates['TF32']:5.2f} of TF32 "
                f"({2 * rate / rates['TF32']:5.2f} if both halves counted) {rate / rates['float16']:5.2f} of float16"
            )

        def row(work: Callable[[Tensor], object], exact: Tensor = exact, scale: Tensor = scale) -> str:
            room = torch.zeros(k, d, d, dtype=torch.float64, device=DEVICE)
            work(room)
            error = ((room[0] - exact) / (scale[:, None] * scale)).abs()
            return f"{line(seconds(lambda: work(room)))}  error max {float(error.max()):.1e}"

        if dense._has_kernels(x):
            from pace.model.gaussians import fused as kernels

            best = {}
            for chosen in SCATTERS:

                def add(out: Tensor, rows: Tensor = rows, concepts: Tensor = concepts, counts: Tensor = counts,
                        weights: Tensor = weights) -> None:  # fmt: skip
                    kernels.add_scatter(x, gaussians.means, rows, concepts, counts, weights, out)

                def timed(chosen: tuple[int, ...] = chosen, best: dict = best, add: Callable = add) -> str:
                    text = row(add)
                    best[chosen] = float(text.split()[0])
                    return text

                with setting(kernels, "SCATTER", chosen):
                    attempt(f"kernel, {chosen}", timed)
            if best:
                kernels.SCATTER = min(best, key=best.__getitem__)
                print(f"  -> from here on: SCATTER = {kernels.SCATTER}")
        attempt("finding the rows", lambda r=r: f"{seconds(lambda: by_concept(r != 0)) * 1e3:8.2f} ms")
        sums = gaussians.empty_sums()
        attempt("accumulate, as it is used", lambda r=r, s=sums: line(seconds(lambda: gaussians.accumulate(x, r, s))))
        in_torch = plain.Distances(gaussians.means, gaussians.precision_cholesky)
        for name, fast in (("float32", False), ("TF32", True)):
            with tf32(fast):
                attempt(
                    f"scatter without kernels, {name}",
                    lambda r=r, s=sums, t=in_torch: line(seconds(lambda: t.scatter(x, r, s["second"]))),
                )


def factors(size: Size, rates: dict[str, float]) -> None:
    gaussians, x, owner, prior = fitted(size)
    sums = gaussians.empty_sums()
    gaussians.accumulate(x, torch.nn.functional.one_hot(owner, size.concepts).float(), sums)
    print(f"\n# factors: K = {size.concepts}, d = {size.dim}, float64")
    for together in (1, 10, 25, 50, 100):
        with setting(dense, "_FACTORED", {"cpu": together, "cuda": together}):
            attempt(
                f"maximise, {together} at once",
                lambda: f"{seconds(lambda: gaussians.maximise(sums, prior)) * 1e3:8.1f} ms",
            )
    attempt("log_prior", lambda: f"{seconds(lambda: gaussians.log_prior(prior)) * 1e3:8.1f} ms")
    if dense._has_kernels(x):
        again = lambda: FullGaussians(gaussians.means, gaussians.precision_cholesky)._distances  # noqa: E731
        attempt("halves of the factors", lambda: f"{seconds(again) * 1e3:8.1f} ms")


@contextmanager
def stopwatch(family: str) -> Iterator[dict[str, list[float]]]:
    """Seconds spent in the parts of a fit, by name; every part waits for the GPU, which costs the whole a little."""
    spent: dict[str, list[float]] = defaultdict(list)
    parts = [(FAMILIES[family], name) for name in ("near_distances", "accumulate", "maximise", "log_prior", "features")]
    parts += [(pace.model.learning, "infer"), (pace.fitting.start, "draw_sample"), (pace.fitting.start, "cluster")]
    parts += [
        (pace.fitting.start, "within_covariance"),
        (pace.model.learning, "fit_dirichlet"),
        (pace.model.learning, "_ascend"),
    ]
    before = [(holder, name, getattr(holder, name)) for holder, name in parts if hasattr(holder, name)]

    def watched(name: str, work: Callable) -> Callable:
        def call(*args: object, **options: object) -> object:
            synchronise()
            start = time.perf_counter()
            result = work(*args, **options)
            synchronise()
            spent[name].append(time.perf_counter() - start)
            return result

        return call

    for holder, name, work in before:
        setattr(holder, name, watched(name, work))
    try:
        yield spent
    finally:
        for holder, name, work in before:
            setattr(holder, name, work)


def observed(images: int, tokens: int, dim: int, concepts: int, classes: int) -> tuple[Observations, Observations]:
    return views(*patches(images, tokens, dim, concepts, DEVICE), concepts, classes)


def model(size: Size, covariance: str, epochs: int, **options: object) -> PACE:
    return PACE(size.concepts, covariance=covariance, max_iter=epochs, tol=1e-12, progress=False, **options)


def fit(size: Size, covariance: str, profile: bool) -> None:
    print(
        f"\n# fit: {size.images} images, two views, {size.tokens} tokens, d = {size.dim}, K = {size.concepts}, {covariance}"
    )
    both = observed(size.images, size.tokens, size.dim, size.concepts, size.classes)
    few = [views[: max(48, size.images // 10)] for views in both]
    model(size, covariance, 1, n_init=1).fit(few[0], perturbed=few[1])  # compiles
    synchronise()
    start = time.perf_counter()
    learned = model(size, covariance, size.epochs).fit(both[0], perturbed=both[1])
    synchronise()
    total = time.perf_counter() - start
    print(
        f"  {size.epochs} epochs and the search for a start: {total:.2f} s; bound {learned.lower_bounds_[-1].total:.2f}"
    )
    falls = [a.total - b.total for a, b in zip(learned.lower_bounds_, learned.lower_bounds_[1:], strict=False)]
    print(f"  the bound never fell by more than {max([0.0, *falls]):.2e} of {abs(learned.lower_bounds_[-1].total):.1f}")
    with stopwatch(covariance) as spent:
        start = time.perf_counter()
        model(size, covariance, size.epochs).fit(both[0], perturbed=both[1])
        synchronise()
        total = time.perf_counter() - start
    print(f"  again with stopwatches: {total:.2f} s, of which")
    for name, times in sorted(spent.items(), key=lambda item: -sum(item[1])):
        print(f"    {name:20} {sum(times):8.2f} s in {len(times)} calls; longest {max(times) * 1e3:.1f} ms")
    print(f"    {'all else':20} {total - sum(map(sum, spent.values())):8.2f} s")
    if DEVICE.type == "cuda":
        print(f"  peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    if profile:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if DEVICE.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as watch:
            model(size, covariance, 2, n_init=1).fit(few[0], perturbed=few[1])
        order = "self_device_time_total" if DEVICE.type == "cuda" else "self_cpu_time_total"
        print(watch.key_averages().table(sort_by=order, row_limit=20, max_name_column_width=60))


def small_dim(size: Size) -> None:
    print(
        f"\n# d = 25, K = {size.concepts}, {size.small_dim_images} images, two views, {size.tokens} tokens, exact rules"
    )
    both = observed(size.small_dim_images, size.tokens, 25, size.concepts, size.classes)
    for covariance in ("diag", "full", "tied"):
        model(size, covariance, 1, n_init=1).fit(both[0], perturbed=both[1])
        start = time.perf_counter()
        learned = model(size, covariance, size.epochs, n_init=1).fit(both[0], perturbed=both[1])
        synchronise()
        rate = learned.n_iter_ * len(both[0]) / (time.perf_counter() - start)
        print(
            f"  {covariance:5} {rate:12,.0f} images a second, start included: {rate / AUTHORS:,.0f} times the authors'",
            flush=True,
        )


def vit(dim: int) -> torch.nn.Module:
    """A ViT-S/16 or ViT-B/16 with random weights."""
    import timm

    name = {384: "vit_small_patch16_224", 768: "vit_base_patch16_224"}[dim]
    return timm.create_model(name, num_classes=102).to(DEVICE).eval()


def pictures(number: int) -> Tensor:
    return torch.rand(number, 3, 224, 224, device=DEVICE)


def whole(size: Size) -> None:
    """From images on the device to concepts: both views through a ViT-B/16, then the fit."""
    backbone = Backbone(vit(768), count_cls=True)
    batch = pictures(min(256, size.images))
    backbone(batch)
    model(size, "full", 1, n_init=1).fit(*observed(48, 197, 768, size.concepts, 2)[:1])  # compiles
    synchronise()
    begin = time.perf_counter()
    seen = []
    for _ in range(2):
        parts = [backbone(batch[: size.images - start]) for start in range(0, size.images, len(batch))]
        # Random weights say the same of every image: noise of the embeddings' own size makes them differ.
        embeddings = torch.cat([part.embeddings for part in parts])
        embeddings += embeddings.std() * torch.randn_like(embeddings)
        attention, predictions = (torch.cat(list(field)) for field in list(zip(*parts, strict=True))[1:])
        seen.append(Observations(embeddings, attention, predictions, (14, 14), 1))
    synchronise()
    forward = time.perf_counter() - begin
    model(size, "full", size.epochs).fit(seen[0], perturbed=seen[1])
    synchronise()
    total = time.perf_counter() - begin
    print(
        f"\n# whole: {size.images} images, two views, ViT-B/16 in float32, then full covariances, {size.epochs} epochs"
    )
    print(f"  forward {forward:.1f} s, fit {total - forward:.1f} s, together {total:.1f} s")


def explain(size: Size) -> None:
    print(f"\n# explain: {size.explained} images of {size.tokens} tokens on the device, K = {size.concepts}")
    for dim in size.explained_dims:
        observations, _ = observed(size.explained, size.tokens, dim, size.concepts, size.classes)
        forward = {}
        if dim in (384, 768):
            net, batch = vit(dim), pictures(min(256, size.explained))
            with torch.no_grad():
                forward["float32"] = seconds(lambda n=net, b=batch: n(b)) / len(batch)
                with tf32(True):
                    forward["TF32"] = seconds(lambda n=net, b=batch: n(b)) / len(batch)
                with torch.autocast(DEVICE.type, torch.bfloat16):
                    forward["bfloat16"] = seconds(lambda n=net, b=batch: n(b)) / len(batch)
        for covariance in ("tied", "full"):
            learned = model(size, covariance, 2, n_init=1).fit(observations[: size.explained // 2])
            theta = seconds(lambda m=learned, o=observations: m.explain(o, patches=False)) / size.explained
            phi = seconds(lambda m=learned, o=observations: m.explain(o)) / size.explained
            shares = ", ".join(f"{theta / took:.0%} of a {name} ViT's" for name, took in forward.items())
            print(
                f"  d = {dim}, {covariance:5} θ {1 / theta:10,.0f} images a second, θ and φ {1 / phi:10,.0f}; θ {shares}",
                flush=True,
            )
            with setting(inference, "_kernel", lambda log_likelihood: None):
                slow = seconds(lambda m=learned, o=observations: m.explain(o, patches=False)) / size.explained
            print(f"    sweeps in torch: θ {1 / slow:10,.0f} images a second, {slow / theta:.1f} times as long")
            sweeps(learned, observations, theta)


def sweeps(learned: PACE, observations: Observations, theta: float) -> None:
    """Where explaining spends its time: on a batch's evidence, and on sweeps by the kernel or by torch."""
    settings = settings_of(learned, observations)
    concepts = learned._fitted().to(settings.device, settings.dtype)
    some = slice(0, settings.chunk(observations, None, concepts.gaussians).units)
    batch = observations.batch(some, settings.device, settings.dtype)
    evidence, weights, _ = learning._evidence([batch], concepts, settings, relative=True)
    images, tokens, k = evidence.shape
    start = inference.uniform_start(images, k, tokens, settings.updates, settings.device)
    how = {"max_sweeps": settings.max_sweeps, "tol": settings.sweep_tol}

    def gamma() -> Tensor:
        return inference.infer_gamma(evidence, weights, concepts.alpha, start, **how)

    def row(work: Callable[[], object]) -> str:
        took = seconds(work) / images
        return f"{took * 1e6:8.2f} µs an image {took / theta:7.1%} of θ's"

    attempt("  evidence", lambda: row(lambda: learning._evidence([batch], concepts, settings, relative=True)))
    kernel = inference._kernel(evidence)
    with setting(inference, "_kernel", lambda log_likelihood: None):
        expected = gamma()
        attempt("  sweeps, torch", lambda: row(gamma))
    if kernel is None:
        print("    no kernel here")
        return
    for tile in SWEEPS:
        with setting(kernel, "TILE", tile):
            attempt(f"  sweeps, kernel, {tile}", lambda: row(gamma))
    needed = kernel.settle(evidence, weights.count, concepts.alpha, start[0], **how).sweeps.double()
    off = ((gamma() - expected).abs() / expected).amax(1)
    print(
        f"    {float(needed.mean()):.1f} sweeps an image, {int(needed.max())} at most; γ of kernel and torch differ by "
        f"{float(off.median()):.1e} at the median image, {float(off.max()):.1e} at most"
    )


def main() -> None:
    names = ["products", "distances", "scatter", "factors", "fit", "tied", "small", "whole", "explain"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--rows", type=int, help="patches whose distances and scatter are timed")
    parser.add_argument("--small", action="store_true", help="little of everything")
    parser.add_argument("--profile", action="store_true", help="torch's profiler on a tenth of the images, two epochs")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    size, begin = Size(arguments.small), time.perf_counter()
    size.rows = arguments.rows or size.rows
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, kernels: {dense._has_kernels(torch.empty(1, 768, device=DEVICE))}")
    rates = products(size)
    work: dict[str, Callable[[], None]] = {
        "distances": lambda: distances(size, rates),
        "scatter": lambda: scatter(size, rates),
        "factors": lambda: factors(size, rates),
        "fit": lambda: fit(size, "full", arguments.profile),
        "tied": lambda: fit(size, "tied", arguments.profile),
        "small": lambda: small_dim(size),
        "whole": lambda: whole(size),
        "explain": lambda: explain(size),
    }
    for part, run in work.items():
        if part in arguments.parts:
            try:
                run()
            except Exception as error:  # the other parts may still say something
                print(f"  {part} stopped: {type(error).__name__}: {error}")
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()
            print(f"  [{time.perf_counter() - begin:.0f} s since the start]", flush=True)


if __name__ == "__main__":
    main()
