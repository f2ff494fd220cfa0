"""What one pass over a very large set of images takes, bottleneck by bottleneck, from rates measured elsewhere.

    uv run python benchmarks/internet_scale.py --forward 11354 --learn 17833 --decode 203 --m-step 0.12

Rates are those of one GPU (and one core for decoding); `benchmarks/extraction.py`, `em_pass.py` and `scaling.py` measure them.
Nothing here is measured: it multiplies.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

FLOAT16, FLOAT32, FLOAT64 = 2, 4, 8


class Row(NamedTuple):
    what: str
    amount: str
    hours: float  # on the machines asked for
    money: float | None  # of one pass; None where it is part of another row's machines


def rows(o: argparse.Namespace) -> Iterator[Row]:
    views = o.images * o.views
    yield Row(
        "reading the images",
        size(o.images * o.image_bytes),
        hours(o.images * o.image_bytes / (o.read * 1e9 * o.machines)),
        None,
    )
    cores = o.machines * o.cores
    yield Row(
        "decoding them", f"{o.images / o.decode / 3600:,.0f} core hours", hours(o.images / o.decode / cores), None
    )
    gpus = o.machines * o.gpus
    yield gpu_row("forward passes of the transformer", views, o.forward, gpus, o)
    yield gpu_row("E-steps: concepts of every patch", views, o.learn, gpus, o)
    steps = o.images / o.minibatch
    statistics = o.concepts * o.dim * (o.dim if o.covariance == "full" else 1) * FLOAT64
    if o.covariance == "tied":
        statistics += o.dim**2 * FLOAT64
    yield Row(
        "M-steps, on every GPU alike",
        f"{steps:,.0f}",
        hours(steps * o.m_step),
        gpus * hours(steps * o.m_step) * o.price,
    )
    moved = 2 * statistics * steps  # a ring sends and receives about everything twice
    wait = hours(moved / (o.network * 1e9))
    yield Row("adding up statistics over machines", f"{size(statistics)} a step", wait, gpus * wait * o.price)


def gpu_row(what: str, number: float, rate: float, gpus: int, o: argparse.Namespace) -> Row:
    alone = hours(number / rate)
    return Row(what, f"{alone:,.0f} GPU hours", alone / gpus, alone * o.price)


def hours(seconds: float) -> float:
    return seconds / 3600


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measured = parser.add_argument_group("measured rates")
    measured.add_argument("--forward", type=float, required=True, help="image views a second through the transformer")
    measured.add_argument("--learn", type=float, required=True, help="image views a second through the E-step")
    measured.add_argument("--decode", type=float, required=True, help="images a second that one core decodes")
    measured.add_argument("--m-step", type=float, required=True, help="seconds of an M-step")
    job = parser.add_argument_group("the job")
    job.add_argument("--images", type=float, default=1e9)
    job.add_argument("--image-bytes", type=float, default=110e3, help="of a compressed image")
    job.add_argument("--views", type=int, default=2)
    job.add_argument("--tokens", type=int, default=197)
    job.add_argument("--dim", type=int, default=768)
    job.add_argument("--concepts", type=int, default=100)
    job.add_argument("--covariance", choices=("full", "tied", "diag"), default="full")
    job.add_argument("--minibatch", type=float, default=65536)
    machines = parser.add_argument_group("the machines")
    machines.add_argument("--machines", type=int, default=8)
    machines.add_argument("--gpus", type=int, default=8, help="of a machine")
    machines.add_argument("--cores", type=int, default=128, help="of a machine")
    machines.add_argument(
        "--price", type=float, default=3.0, help="dollars for an hour of a GPU and its share of the machine"
    )
    machines.add_argument("--read", type=float, default=5.0, help="GB a second that a machine reads from storage")
    machines.add_argument("--network", type=float, default=40.0, help="GB a second between machines")
    machines.add_argument("--storage", type=float, default=20.0, help="dollars for a TB in a month")
    o = parser.parse_args()
    print(
        f"One pass over {o.images:.3g} images, {o.views} views each, on {o.machines} machines "
        f"with {o.gpus} GPUs and {o.cores} cores:\n"
    )
    print("| what | how much | hours | dollars |\n|---|---|---|---|")
    found = list(rows(o))
    for row in found:
        print(f"| {row.what} | {row.amount} | {row.hours:,.3g} | {'–' if row.money is None else f'{row.money:,.0f}'} |")
    beside, gpu = [row for row in found if row.money is None], [row for row in found if row.money is not None]
    slowest = max([*beside, Row("the GPUs", "", sum(row.hours for row in gpu), 0.0)], key=lambda row: row.hours)
    bill = slowest.hours * o.machines * o.gpus * o.price
    print(
        f"\nReading and decoding go on beside the GPUs. The pass takes {slowest.hours:,.3g} hours and {bill:,.0f} dollars; "
        f"the bottleneck is {slowest.what}."
    )
    kept = o.images * o.views * o.tokens * o.dim * FLOAT16
    print(f"Stored embeddings would take {size(kept)} and {kept / 1e12 * o.storage:,.0f} dollars a month.")
    remembered = o.images * o.views * o.concepts * 2 * FLOAT32
    print(f"Full-batch EM would remember {size(remembered)} about the images; minibatches remember nothing.")


if __name__ == "__main__":
    main()
