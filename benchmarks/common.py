"""What several of these scripts need: generated images, a clock, and the same start for PACE and what it is compared with."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from sklearn.mixture import GaussianMixture
from torch import Tensor

from pace import PACE, Observations
from pace.fitting.arguments import RANK, alpha_of, prior_strength_of
from pace.model.concepts import Concepts
from pace.model.gaussians import Prior
from pace.model.seeding import draw_sample, place, within_covariance
from pace.model.settings import Settings


def synchronise() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def timed(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    synchronise()
    start = clock()
    work()
    synchronise()
    return clock() - start


def seconds(work: Callable[[], object], least: float = 0.2, clock: Callable[[], float] = time.perf_counter) -> float:
    """The fastest of as many runs as fit in this time, at least three, after one to warm up."""
    work()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < least and len(times) < 50):
        times.append(timed(work, clock))
    return min(times)


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if on else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def patches(
    images: int, tokens: int, dim: int, concepts: int, device: torch.device, per_image: int = 6, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """(images, tokens, dim) of a mixture, and the concept of each patch."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    means = normal(concepts, dim) * 3 * (16 / dim) ** 0.5
    spread = 0.6 + 0.8 * torch.rand(concepts, dim, generator=generator, device=device)
    turn = torch.eye(dim, device=device) + normal(dim, dim) / (2 * dim**0.5)
    turn[:, : max(1, dim // 100)] *= 10  # a few channels are much wider than the others
    chosen = torch.rand(images, concepts, generator=generator, device=device).topk(min(per_image, concepts), 1).indices
    owner = chosen.gather(1, torch.randint(chosen.shape[1], (images, tokens), generator=generator, device=device))
    x = torch.empty(images, tokens, dim, device=device)
    for start in range(0, images, 512):
        some = owner[start : start + 512]
        x[start : start + 512] = (means[some] + spread[some] * normal(*some.shape, dim)) @ turn
    return x, owner


def views(x: Tensor, owner: Tensor, concepts: int, classes: int) -> tuple[Observations, Observations]:
    """These images, and perturbed views of them: the same with a tenth of the patches' spread added."""
    share = torch.nn.functional.one_hot(owner, concepts).float().mean(1)
    predictions = (share @ torch.randn(concepts, classes, device=x.device) * 5).softmax(1)
    attention = torch.rand(owner.shape, device=x.device) + 0.1
    attention /= attention.sum(1, keepdim=True)
    other = x.clone()
    for start in range(0, len(x), 512):
        other[start : start + 512] += torch.randn_like(x[start : start + 512]) * x[:512].std() / 10
    return Observations(x, attention, predictions), Observations(other, attention, predictions)


def start_at(means: Tensor, observations: Observations, model: PACE, settings: Settings) -> tuple[Concepts, Prior]:
    """Concepts with these means (K, d), as a fit would start with them, and their prior."""
    sample = draw_sample(observations, len(means), settings, np.random.default_rng(0))
    centred = means.to(settings.device, settings.dtype) - sample.offset
    prior = Prior(within_covariance(sample, centred), prior_strength_of(model, observations, settings))
    alpha = alpha_of(model, len(means), observations, settings)
    return place(centred, sample, prior, alpha, observations.n_classes, model.covariance, RANK), prior


def mixture_at(concepts: Concepts) -> GaussianMixture:
    """scikit-learn's mixture with these means and covariances, and equal weights."""
    gaussians, family = concepts.gaussians, concepts.gaussians.name
    mixture = GaussianMixture(len(concepts), covariance_type=family, reg_covar=1e-2)
    mixture.weights_ = np.full(len(concepts), 1 / len(concepts), np.float32)
    mixture.means_ = (gaussians.means + concepts.offset).cpu().numpy()
    parts = gaussians.tensors()
    factor = parts["variances"].rsqrt() if family == "diag" else parts["precision_cholesky"]
    mixture.precisions_cholesky_ = factor.cpu().numpy()
    return mixture
