r"""What the commands cost beside the bare model: fit, evaluate, report and explain of the same photos, each in its own process.

    uv run python benchmarks/main_job.py --images photos --limit 300 \
        --model FILE --architecture NAME --image-size 224 --head probe

`--images` is a folder with train/ and test/, or with --data-root a dataset's name; `--limit` images of each are used, 0 for all
(and 200 in the report). All options that are not named here go to `pace fit`. The bare model runs on the same images and their
perturbed views, decoded before, in the same run of this script: a command's multiple is its time over that of the passes it
cannot do without. explain is compared with importing torch and timm, loading the model and one pass. Where others use the
machine, the multiples of CPU time say more than those of the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Cost:
    seconds: float
    cpu: float
    memory: float  # MB of the process
    gpu: float = 0.0  # MB
    stages: dict[str, float] = field(default_factory=dict)


def spawn(arguments: list[str], folder: Path) -> tuple[Cost, str]:
    """Run this script as `--child`; what it cost, and what it said on standard error."""
    with (folder / f"{arguments[0]}.txt").open("w+") as errors:
        began = time.perf_counter()
        child = subprocess.Popen([sys.executable, __file__, "--child", *arguments], stdout=errors, stderr=errors)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - began
        errors.seek(0)
        said = errors.read()
    if status:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{said}")
    scale = 1 << (20 if sys.platform == "darwin" else 10)
    return Cost(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / scale), said


def run(arguments: list[str], folder: Path) -> Cost:
    """A command of `pace`, or "bare"."""
    cost, said = spawn(arguments, folder)
    cost.stages = {name: float(seconds) for name, seconds in re.findall(r"^- (.+): ([\d.]+) s$", said, re.MULTILINE)}
    cost.gpu = float((re.findall(r"^gpu ([\d.]+)$", said, re.MULTILINE) or [0])[-1])
    return cost


def child(arguments: list[str]) -> None:
    """In a process of its own: the command, and then the peak of the GPU's memory."""
    if arguments[0] == "bare":
        bare(*arguments[1:])
    else:
        from pace.cli import main

        sys.argv[1:] = arguments
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
    import torch

    peak = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0
    print(f"gpu {peak:.1f}", file=sys.stderr)


def bare(fit: str, split: str, limit: str, batch_size: str, views: str) -> None:
    """The model of a run of `pace fit` on its own, on images as they are and perturbed, which wait on its device."""
    import torch

    from pace.backbones import Backbone, ModelChoice, open_model
    from pace.images import Perturbation, normalize, open_images, to_float
    from pace.images.loading import decoded

    record = json.loads((Path(fit) / "run.json").read_bytes())
    about, size = record["model"], int(batch_size)
    device = torch.device(record["device"].split(": ")[0])
    names = ("name", "architecture", "image_size", "normalize")
    model, _ = open_model(ModelChoice(*(about[name] for name in names)))
    model = model.float().to(device)
    how = Backbone(model).preprocessing
    seen = open_images(record["images"]["images"], record["images"]["data_root"], split)
    seen = seen.subset(range(min(int(limit) or len(seen), len(seen))))
    chunks = [range(len(seen))[start : start + size] for start in range(0, len(seen), size)]
    batches = []
    for rows, pixels in decoded(seen, chunks, how, for_gpu=device.type == "cuda"):
        whole = to_float(pixels.to(device))
        batches.append(normalize(whole, how))
        if views == "2":
            batches.append(normalize(Perturbation()(whole, rows), how))
    if device.type == "cuda":
        model(batches[0])  # compiles, and loads libraries
        torch.cuda.synchronize()
    used, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    with torch.inference_mode():
        for batch in batches:
            model(batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    print(f"- passes: {seconds:.3f} s", file=sys.stderr)
    print(f"- passes on CPU: {after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime:.3f} s", file=sys.stderr)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", required=True)
    parser.add_argument("--data-root")
    parser.add_argument("--limit", type=int, default=300, help="0 for all")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", help="keep the runs in this folder")
    options, fitting = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch:
        measure(options, fitting, Path(options.out or scratch))


def measure(options: Any, fitting: list[str], folder: Path) -> None:
    from pace.images import open_images

    folder.mkdir(parents=True, exist_ok=True)
    fit, evaluation = str(folder / "fit"), str(folder / "evaluate")
    size = ["--batch-size", str(options.batch_size)]
    limit = ["--limit", str(options.limit)] if options.limit else []
    there = [*size, "--device", options.device]
    root = ["--data-root", options.data_root] if options.data_root else []
    test: Any = open_images(options.images, options.data_root, "test")
    again = ["--run", fit, *there]
    commands = {
        "fit": ["fit", "--images", options.images, *root, *limit, *there, "--out", fit, *fitting],
        "evaluate": ["evaluate", *again, *limit, "--out", evaluation],
        "report": ["report", *again, *limit, "--evaluation", evaluation, "--out", str(folder / "report")],
        "explain": ["explain", str(test.path(test.names[0])), *again, "--out", str(folder / "explain")],
    }
    found = {}
    for name, arguments in commands.items():
        found[name] = cost = run(arguments, folder)
        used = f"{cost.cpu:.1f} s of CPU, {cost.memory:.0f} MB, {cost.gpu:.0f} MB on the GPU"
        print(f"{name}: {cost.seconds:.1f} s, {used}", file=sys.stderr, flush=True)
    passes = [
        run(["bare", fit, split, str(number), str(options.batch_size), views], folder)
        for split, number, views in (("train", options.limit, "2"), ("test", options.limit, "2"), ("test", 1, "1"))
    ]
    for both, one in zip(passes, ("train", "test", "one picture"), strict=True):
        print(f"bare model, {one}: {both.stages['passes']:.1f} s, {both.stages['passes on CPU']:.1f} s of CPU")
    start = passes[2].seconds, passes[2].cpu
    bases = {
        "fit": (passes[0].stages["passes"], passes[0].stages["passes on CPU"]),
        "evaluate": (passes[1].stages["passes"], passes[1].stages["passes on CPU"]),
        "explain": start,
    }
    print("\n| command | seconds | of bare | CPU seconds | of bare | memory | GPU memory | stages |")
    print("|---|---|---|---|---|---|---|---|")
    for name, cost in found.items():
        base = bases.get(name)  # report has no new images
        wall, cpu = ("–", "–") if base is None else (f"{cost.seconds / base[0]:.2f}", f"{cost.cpu / base[1]:.2f}")
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in cost.stages.items())
        memory = f"{cost.memory:.0f} MB | {cost.gpu:.0f} MB"
        print(f"| {name} | {cost.seconds:.1f} | {wall} | {cost.cpu:.1f} | {cpu} | {memory} | {stages} |")


if __name__ == "__main__":
    main()
