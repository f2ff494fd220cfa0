"""How close extraction comes to the model's own forward rate.

    python benchmarks/extraction.py                    # CPU
    python benchmarks/extraction.py --device cuda --images 8192 --batch-size 256 --dtype bfloat16

Each round times the bare model and every way of extracting, one right after the other, so that a machine whose speed
changes changes both; the ratios are medians over the rounds. Weights are random: speed does not depend on them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from pace.atomic import write_atomically
from pace.backbones import Backbone
from pace.extract import observe
from pace.images import Folder, ImageSet, PreprocessingLike
from pace.pipeline import decoded
from pace.store import SHARD_BYTES

_DIFFERENT = 64  # pictures; a decoder does not mind seeing one again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch16_224", help="a timm model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=None, help="decoding threads")
    parser.add_argument("--jpeg-size", type=int, default=256, help="side of the JPEG files in pixels")
    parser.add_argument("--layer", type=int, default=-1)
    options = parser.parse_args()

    import timm

    torch.manual_seed(0)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    model = timm.create_model(options.model, pretrained=False).eval().to(device, dtype)
    backbone = Backbone(model, layer=options.layer)
    height, width = backbone.preprocessing.size
    pixels = torch.randint(0, 256, (options.images, 3, height, width), dtype=torch.uint8)
    settings = {"batch_size": options.batch_size, "workers": options.workers, "progress": False}

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "jpeg"
        write_jpegs(folder, options.images, options.jpeg_size)
        stores = (Path(scratch) / f"store-{number}" for number in range(10**6))
        rows, columns = backbone.grid(height, width)
        size = 2 * (rows * columns + backbone.prefix_tokens) * backbone.dim  # bytes an image takes in a store
        decoding = (Folder(folder), backbone.preprocessing, options.batch_size, options.workers, device.type == "cuda")
        ways: dict[str, Callable[[], object]] = {
            "decoding alone": lambda: decode(*decoding),
            "disk alone": lambda: write(Path(scratch) / "blob", options.images * size),
            "bare forward": lambda: forward(model, options.images, options.batch_size, (height, width)),
            "from tensors": lambda: observe(backbone, pixels, **settings),
            "from tensors, to a store": lambda: observe(backbone, pixels, store=next(stores), **settings),
            "from JPEG files": lambda: observe(backbone, folder, **settings),
            "from JPEG files, to a store": lambda: observe(backbone, folder, store=next(stores), **settings),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for current in range(options.rounds + 1):
            for name, way in ways.items():
                rate = options.images / seconds(way, device)
                print(f"round {current}, {name}: {rate:.1f} images/s", file=sys.stderr)
                if current:  # the first round warms up
                    rates[name].append(rate)

    bare = rates["bare forward"]
    print(f"{options.model}, {options.dtype}, {device}, batches of {options.batch_size}, {options.images} images,")
    print(f"{options.rounds} rounds, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'':30}{'images/s':>10}{'of bare':>10}")
    for name, found in rates.items():
        ratio = statistics.median(rate / other for rate, other in zip(found, bare, strict=True))
        print(f"{name:30}{statistics.median(found):10.1f}{ratio:10.1%}")


def forward(model: torch.nn.Module, images: int, batch_size: int, size: tuple[int, int]) -> None:
    """The model alone, on a batch that lies on its device already."""
    weight = next(model.parameters())
    batch = torch.rand(batch_size, 3, *size, device=weight.device, dtype=weight.dtype)
    with torch.inference_mode():
        for start in range(0, images, batch_size):
            model(batch[: images - start])


def decode(
    images: ImageSet, preprocessing: PreprocessingLike, batch_size: int, workers: int | None, for_gpu: bool
) -> None:
    """The files alone, without a model."""
    chunks = [range(start, min(start + batch_size, len(images))) for start in range(0, len(images), batch_size)]
    for _ in decoded(images, chunks, preprocessing, workers, for_gpu):
        pass


def write(file: Path, size: int) -> None:
    """As many bytes as a store of these images has, as safely as a store writes them."""
    for start in range(0, size, SHARD_BYTES):
        write_atomically(file, bytes(min(SHARD_BYTES, size - start)))


def seconds(way: Callable[[], object], device: torch.device) -> float:
    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    settle()
    begin = time.perf_counter()
    way()
    settle()
    return time.perf_counter() - begin


def write_jpegs(folder: Path, images: int, side: int) -> None:
    """Smooth noise: files of about the size that photographs have."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(images):
        file = folder / f"{number:06d}.jpg"
        if number >= _DIFFERENT:
            file.write_bytes((folder / f"{number % _DIFFERENT:06d}.jpg").read_bytes())
            continue
        coarse = Image.fromarray(random.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8))
        coarse.resize((side, side), Image.Resampling.BICUBIC).save(file, quality=90)


if __name__ == "__main__":
    main()
