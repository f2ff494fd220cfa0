"""Minibatches and several processes: what they cost and what they gain.

    uv run python benchmarks/scaling.py memory       # peak memory of a fit in minibatches, as the number of images grows
    uv run python benchmarks/scaling.py online       # the bound of fits in minibatches, next to that of full-batch EM
    uv run python benchmarks/scaling.py processes    # an epoch by one process and by two, each pinned to a core

Images are generated from the model when they are asked for. Peak memory is that of a separate process, libraries included.
Timings need an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch

from pace import PACE, Observations
from pace.fitting.distributed import processes, torchrun_started_this
from pace.observations import Batch


class Drawn(Observations):
    """M images that exist only while they are used; image m is always the same."""

    def __init__(self, images: int, tokens: int, dim: int, concepts: int, classes: int = 10, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        facts = {"means": 2 * rng.normal(size=(concepts, dim)), "seed": seed, "grid": None, "prefix_tokens": 0}
        facts["head"] = rng.normal(size=(concepts, classes))
        shapes = {"embeddings": (tokens, dim), "attention": (tokens,), "predictions": (classes,)}
        facts |= {name: np.broadcast_to(np.float32(0), (images, *shape)) for name, shape in shapes.items()}
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    def prepare(self, images: slice | np.ndarray) -> Callable[[], Batch]:
        numbers = range(len(self))[images] if isinstance(images, slice) else images
        parts = [np.stack(part) for part in zip(*(self._draw(int(number)) for number in numbers), strict=True)]
        return lambda: Batch(*(torch.from_numpy(part.astype(np.float32)) for part in parts))

    def _draw(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng((self.seed, number))
        theta = rng.dirichlet(np.full(len(self.means), 0.3))
        chosen = rng.choice(len(self.means), self.n_tokens, p=theta)
        scores = np.exp(6 * theta @ self.head)
        embeddings = self.means[chosen] + rng.normal(size=(self.n_tokens, self.dim))
        return embeddings, rng.dirichlet(np.full(self.n_tokens, 2.0)), scores / scores.sum()

    def forget(self) -> None:
        """Nothing is kept."""

    def identity(self) -> str:
        return f"drawn {self.shape} {self.seed}"

    def batch(self, images: slice | np.ndarray, device: object = None, dtype: object = None) -> Batch:
        return Batch(*(part.to(device=device, dtype=dtype) for part in self.prepare(images)()))

    def __getitem__(self, images: slice | np.ndarray) -> Observations:
        return Observations(*self.batch(images))


def drawn(options: argparse.Namespace, images: int) -> Drawn:
    return Drawn(images, options.tokens, options.dim, options.concepts)


def peak() -> float:
    """Of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def again(*arguments: str, launcher: tuple[str, ...] = (), **changes: object) -> dict[str, float]:
    """Run this script in another process (or several), and read the JSON it prints."""
    options = [text for name, value in changes.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, *launcher, __file__, *arguments, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def sizes(options: argparse.Namespace) -> dict[str, object]:
    return {name: getattr(options, name) for name in ("tokens", "dim", "concepts", "covariance", "minibatch")}


def memory(options: argparse.Namespace) -> None:
    print("| images | seconds | images / s | peak MB | of which while learning |\n|---|---|---|---|---|")
    for images in options.images or [1_000, 10_000, 100_000]:
        found = again("one-memory", images=images, epochs=1, **sizes(options))
        rate = images / found["seconds"]
        print(
            f"| {images:,} | {found['seconds']:.0f} | {rate:.0f} | {found['peak']:.0f} | {found['grown']:.0f} |",
            flush=True,
        )


def one_memory(options: argparse.Namespace) -> None:
    warm = drawn(options, 200)
    fit(options, warm, max_iter=1, minibatch=100)  # libraries and caches
    before, began = peak(), time.perf_counter()
    fit(options, drawn(options, options.images[0]), max_iter=options.epochs, minibatch=options.minibatch)
    print(json.dumps({"seconds": time.perf_counter() - began, "peak": peak(), "grown": peak() - before}))


def fit(options: argparse.Namespace, observations: Observations, **parameters: object) -> PACE:
    chosen = {"n_concepts": options.concepts, "covariance": options.covariance, "parts": None, "n_init": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PACE(**chosen, device="cpu", **parameters).fit(observations)


def online(options: argparse.Namespace) -> None:
    images = (options.images or [5_000])[0]
    observations = drawn(options, images)[np.arange(images)]  # in memory, since every fit reads it often
    print("| minibatch | passes | seconds | bound per image | below full-batch EM |\n|---|---|---|---|---|")
    best = None
    for minibatch in (None, *(size for size in (64, 256, 1024) if size < images)):
        began = time.perf_counter()
        model = fit(options, observations, minibatch=minibatch)
        seconds, score = time.perf_counter() - began, model.score(observations)
        best = score if best is None else best
        passes = model.n_iter_ if minibatch is None else model.n_steps_ / -(-images // minibatch)
        name = "full batch" if minibatch is None else f"minibatches of {minibatch}"
        short = f"{100 * (best - score) / abs(best):.3f} %"
        print(f"| {name} | {passes:.0f} | {seconds:.1f} | {score:.3f} | {short} |", flush=True)


def by_processes(options: argparse.Namespace) -> None:
    print("| processes | seconds an epoch | efficiency |\n|---|---|---|")
    alone = None
    for number in range(1, options.processes + 1):
        images = (options.images or [400])[0]
        found = seconds_an_epoch(number, images=images, epochs=options.epochs, **sizes(options))
        alone = alone or found
        print(f"| {number} | {found:.2f} | {100 * alone / number / found:.0f} % |", flush=True)


def seconds_an_epoch(number: int, **changes: object) -> float:
    """With this many processes, each on its own core."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(number)) if number > 1 else ()
    return again("one-epoch", launcher=launcher, **changes)["seconds"]


def one_epoch(options: argparse.Namespace) -> None:
    """Seconds of an epoch: the difference between a long and a short fit, so that the start does not count."""
    core = int(os.environ.get("LOCAL_RANK", 0))
    os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[core]])
    torch.set_num_threads(1)
    images = options.images[0]
    observations = drawn(options, images)[np.arange(images)]

    def seconds(epochs: int) -> float:
        began = time.perf_counter()
        fit(options, observations, max_iter=epochs, distributed=torchrun_started_this())
        return time.perf_counter() - began

    def measure() -> None:
        seconds(1)
        few, many = seconds(1), seconds(1 + options.epochs)
        if core == 0:
            print(json.dumps({"seconds": (many - few) / options.epochs}), flush=True)

    if torchrun_started_this():
        with processes("cpu"):
            measure()
    else:
        measure()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    work = {
        "memory": memory,
        "online": online,
        "processes": by_processes,
        "one-memory": one_memory,
        "one-epoch": one_epoch,
    }
    parser.add_argument("what", choices=work, metavar="memory|online|processes")
    parser.add_argument("--images", type=int, nargs="+")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--dim", type=int)
    parser.add_argument("--concepts", type=int)
    parser.add_argument("--covariance")
    parser.add_argument("--minibatch", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    small = {"tokens": 17, "dim": 16, "concepts": 10, "covariance": "tied"}
    heavy = {"tokens": 50, "dim": 256, "concepts": 50, "covariance": "full"}  # so that arithmetic dominates
    for name, value in (heavy if "process" in options.what else small).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    work[options.what](options)


if __name__ == "__main__":
    main()
