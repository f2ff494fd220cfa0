"""How close extraction comes to the model's own forward rate, and what else could set the pace.

    python benchmarks/extraction.py                                        # CPU
    python benchmarks/extraction.py --device cuda --dtype bfloat16         # ViT-S/16 on a GPU
    python benchmarks/extraction.py --device cuda --dtype bfloat16 --model vit_base_patch16_224

The bare forward sees one batch again and again that lies on the device in the model's own type: nothing is copied,
converted or kept. Extraction starts from uint8 images and ends with all results in fresh main memory or in a store, and is
measured from images on the device, from images in main memory (the copy to the device then counts) and from JPEG files.
Three rates without a model say how fast its surroundings are: how fast files decode, how fast fresh main memory takes
as many bytes, and how fast the disk takes a store's. `limit` is the slowest thing that a way of extracting needs, the
bare forward included.

Each round measures everything once, one right after the other, so that a machine whose speed changes changes both
sides of a ratio; ratios are medians over the rounds. Weights are random: speed does not depend on them.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pace.atomic import write_atomically
from pace.backbones import Backbone
from pace.images import Folder, ImageSet, PreprocessingLike
from pace.images.loading import decoded
from pace.observing.extract import new_memory, observe
from pace.observing.store import SHARD_BYTES

_DIFFERENT = 64  # pictures; a decoder does not mind seeing one again
_BARE, _MEMORY, _DECODING, _DISK = "bare forward", "fresh memory alone", "decoding alone", "disk alone"


@dataclass(frozen=True)
class Way:
    """`run(n)` handles the first n of `images`; it cannot be faster than any of `needs` in the same round."""

    images: int
    run: Callable[[int], object]
    needs: tuple[str, ...] = ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch16_224", help="a timm model, such as vit_base_patch16_224")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--images", type=int, help="from tensors to memory; 256, or 8192 on a GPU")
    parser.add_argument("--files", type=int, help="from files or to a store; 256, or 4096 on a GPU")
    parser.add_argument("--batch-size", type=int, help="64, or 256 on a GPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=None, help="decoding threads or processes")
    parser.add_argument("--jpeg-size", type=int, default=256, help="side of the JPEG files in pixels")
    parser.add_argument("--layer", type=int, default=-1)
    options = parser.parse_args()
    gpu = options.device.startswith("cuda")
    images = options.images or (8192 if gpu else 256)
    files = options.files or (4096 if gpu else 256)
    batch_size = options.batch_size or (256 if gpu else 64)

    import timm

    torch.manual_seed(0)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    model = timm.create_model(options.model, pretrained=False).eval().to(device, dtype)
    backbone = Backbone(model, layer=options.layer)
    height, width = backbone.preprocessing.size
    pixels = torch.randint(0, 256, (max(images, files), 3, height, width), dtype=torch.uint8)
    rows, columns = backbone.grid(height, width)
    tokens = (rows * columns + backbone.prefix_tokens, backbone.dim)  # of an image

    with tempfile.TemporaryDirectory() as scratch:
        write_jpegs(Path(scratch) / "jpeg", files, options.jpeg_size)
        pictures = Folder(Path(scratch) / "jpeg")  # listing a folder is not decoding it
        store = Path(scratch) / "store"

        def extract(source: Tensor | ImageSet, kept: Path | None = None) -> Callable[[int], object]:
            def run(count: int) -> object:
                part = source[:count] if isinstance(source, Tensor) else source.subset(range(count))
                settings = {"batch_size": batch_size, "workers": options.workers, "progress": False}
                return observe(backbone, part, store=kept, **settings)

            return run

        ways = {
            _BARE: Way(images, lambda count: forward(model, count, batch_size, (height, width))),
            _MEMORY: Way(images, lambda count: fill(count, batch_size, tokens, dtype)),
            _DECODING: Way(
                files, lambda count: decode(pictures, count, backbone.preprocessing, batch_size, options.workers, gpu)
            ),
            _DISK: Way(files, lambda count: write(Path(scratch) / "blob", 2 * count * tokens[0] * tokens[1])),
        }
        if gpu:
            ways["images on the device"] = Way(images, extract(pixels[:images].to(device)), (_BARE, _MEMORY))
        ways |= {
            "images in main memory": Way(images, extract(pixels), (_BARE, _MEMORY)),
            "JPEG files": Way(files, extract(pictures), (_BARE, _MEMORY, _DECODING)),
            "images in memory, to a store": Way(files, extract(pixels, store), (_BARE, _DISK)),
            "JPEG files, to a store": Way(files, extract(pictures, store), (_BARE, _DECODING, _DISK)),
        }
        for way in ways.values():  # warms up
            seconds(lambda: way.run(min(way.images, 4 * batch_size)), device)  # noqa: B023
            shutil.rmtree(store, ignore_errors=True)
        rounds: list[dict[str, float]] = []
        for number in range(options.rounds):
            rounds.append({})
            for name, way in ways.items():
                rounds[-1][name] = way.images / seconds(lambda: way.run(way.images), device)  # noqa: B023
                print(f"round {number + 1}, {name}: {rounds[-1][name]:.1f} images/s", file=sys.stderr)
                shutil.rmtree(store, ignore_errors=True)

    print(
        f"{options.model}, {options.dtype}, {device}, batches of {batch_size}, {images} images ({files} from files or to"
    )
    print(f"a store), {options.rounds} rounds, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"{'':30}{'images/s':>10}{'of bare':>10}{'limit':>10}{'of limit':>10}  limited by")
    for name, way in ways.items():
        print(f"{name:30}" + "".join(columns_of(name, way, rounds)))


def columns_of(name: str, way: Way, rounds: list[dict[str, float]]) -> Iterator[str]:
    def median(value: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(value(found) for found in rounds)

    yield f"{median(lambda found: found[name]):10.1f}"
    yield f"{median(lambda found: found[name] / found[_BARE]):10.1%}"
    if way.needs:
        yield f"{median(lambda found: min(found[need] for need in way.needs)):10.1f}"
        yield f"{median(lambda found: found[name] / min(found[need] for need in way.needs)):10.1%}"
        yield f"  {min(way.needs, key=lambda need: median(lambda found: found[need]))}"


def forward(model: torch.nn.Module, images: int, batch_size: int, size: tuple[int, int]) -> None:
    """The model alone, on a batch that lies on its device already."""
    weight = next(model.parameters())
    batch = torch.rand(batch_size, 3, *size, device=weight.device, dtype=weight.dtype)
    with torch.inference_mode():
        for start in range(0, images, batch_size):
            model(batch[: images - start])


def fill(images: int, batch_size: int, tokens: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """One batch of embeddings into memory again and again, as extraction does it, without a model."""
    batch = torch.zeros(batch_size, *tokens, dtype=dtype)
    room = new_memory((images, *tokens), dtype)
    for part in room.split(batch_size):
        part.copy_(batch[: len(part)])
    return room


def decode(
    images: ImageSet,
    count: int,
    preprocessing: PreprocessingLike,
    batch_size: int,
    workers: int | None,
    for_gpu: bool,
) -> None:
    """The files alone."""
    chunks = [range(start, min(start + batch_size, count)) for start in range(0, count, batch_size)]
    for _ in decoded(images, chunks, preprocessing, workers, for_gpu):
        pass


def write(file: Path, size: int) -> None:
    """As many bytes as a store of these images has, as safely as a store writes them."""
    for start in range(0, size, SHARD_BYTES):
        write_atomically(file, bytes(min(SHARD_BYTES, size - start)))


def seconds(run: Callable[[], object], device: torch.device) -> float:
    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    settle()
    begin = time.perf_counter()
    kept = run()  # whoever asked for it has it now; giving its memory back is not counted
    settle()
    taken = time.perf_counter() - begin
    del kept
    return taken


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
