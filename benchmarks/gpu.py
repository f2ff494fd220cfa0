"""What a fit and an explanation of the paper's model, without parts, cost on a GPU.

    uv run python benchmarks/gpu.py [--parts fit small explain] [--quick]

Images are generated on the GPU: a few concepts per image, each with its own covariance, and channels of unequal spread.

    fit      Flower's size (7,169 images, two views, 197 tokens, d = 768, K = 100): ten epochs and four starts
    small    the same with d = 25, one start, as images per second
    explain  θ of 2,000 images, next to the forward pass of a ViT-S/16 (d = 384) and a ViT-B/16 (d = 768) with random weights

`--quick` is a little of everything, to see that it runs on a CPU.
"""

import argparse
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from common import patches, seconds, synchronise, tf32, views
from sklearn.exceptions import ConvergenceWarning

from pace import PACE, Observations

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VITS = {384: "vit_small_patch16_224", 768: "vit_base_patch16_224"}


@dataclass(frozen=True)
class Size:
    images: int = 7169
    tokens: int = 197
    classes: int = 102
    dim: int = 768
    concepts: int = 100
    epochs: int = 10
    explained: int = 2000
    explained_dims: tuple[int, ...] = (384, 768)


QUICK = Size(images=48, tokens=17, classes=3, dim=64, concepts=8, epochs=2, explained=32, explained_dims=(16,))


def generated(size: Size, images: int, dim: int) -> tuple[Observations, Observations]:
    return views(*patches(images, size.tokens, dim, size.concepts, DEVICE), size.concepts, size.classes)


def fit_rate(size: Size, covariance: str, both: tuple[Observations, Observations], **options: int) -> str:
    """EM with the search for a start; a short fit before it compiles the kernels. Tied ones see the second view at the end."""
    for epochs in (1, size.epochs):
        synchronise()
        start = time.perf_counter()
        how: Any = {"parts": None, "prune": False, **options}
        model = PACE(size.concepts, covariance=covariance, max_iter=epochs, **how)
        model.fit(both[0], perturbed=both[1])
        synchronise()
        took = time.perf_counter() - start
    rate = model.n_iter_ * len(both[0]) / took
    return f"  {covariance}: {model.n_iter_} epochs and the start in {took:.1f} s, {rate:,.0f} images a second"


def fit(size: Size) -> None:
    print(f"# fit: {size.images} images, two views, {size.tokens} tokens, d = {size.dim}, K = {size.concepts}")
    both = generated(size, size.images, size.dim)
    for covariance in ("full", "tied"):
        print(fit_rate(size, covariance, both), flush=True)


def small(size: Size) -> None:
    print(
        f"# small: d = 25, K = {size.concepts}, {size.images} images, two views; the authors' code: 6 images a second"
    )
    both = generated(size, size.images, 25)
    for covariance in ("diag", "tied", "full"):
        print(fit_rate(size, covariance, both, n_init=1), flush=True)


def explain(size: Size) -> None:
    print(f"# explain: {size.explained} images of {size.tokens} tokens, K = {size.concepts}")
    for dim in size.explained_dims:
        observations, _ = generated(size, size.explained, dim)
        forward = forward_seconds(VITS[dim]) if dim in VITS else {}
        for covariance in ("tied", "full"):
            model = PACE(size.concepts, parts=None, covariance=covariance, n_init=1, max_iter=2, prune=False)
            model.fit(observations[: size.explained // 2])
            took = seconds(lambda m=model, o=observations: m.explain(o, patches=False)) / size.explained
            shares = ", ".join(f"{took / each:.0%} of a {name} forward pass" for name, each in forward.items())
            print(f"  d = {dim}, {covariance}: θ of {1 / took:,.0f} images a second; {shares}", flush=True)


def forward_seconds(name: str) -> dict[str, float]:
    """Of an image, by precision."""
    import timm

    net = timm.create_model(name, num_classes=102).to(DEVICE).eval()
    batch, found = torch.rand(256, 3, 224, 224, device=DEVICE), {}
    with torch.no_grad():
        found["float32"] = seconds(lambda: net(batch)) / len(batch)
        with tf32(True):
            found["TF32"] = seconds(lambda: net(batch)) / len(batch)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            found["bfloat16"] = seconds(lambda: net(batch)) / len(batch)
    return found


def main() -> None:
    parts = {"fit": fit, "small": small, "explain": explain}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--quick", action="store_true", help="a little of everything")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)
    print(f"{torch.cuda.get_device_name() if DEVICE.type == 'cuda' else 'CPU'}, torch {torch.__version__}")
    for part in arguments.parts:
        parts[part](QUICK if arguments.quick else Size())
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
