"""Concepts learned from patches, and reference methods that everybody understands, to read the other scores by.

Every token gets coefficients φ of K concepts, and θ is their mean over the observed tokens, including CLS where it counts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pace.backbones import Backbone
from pace.baselines.explainer import Explainer, PointExplanation, check_counts, point
from pace.baselines.factorization import chunks, coefficients, k_means, nearest, semi_nmf
from pace.baselines.head import predicted
from pace.explanation import Array, Explanation
from pace.model.gaussians import DiagGaussians, Prior
from pace.observations import Observations

# Patches to learn from: thousands for each of a hundred concepts. Fewer for factorisations, whose steps cost far more.
SAMPLE, FACTOR_SAMPLE = 300_000, 100_000
_TOKENS_AT_ONCE_CPU, _TOKENS_AT_ONCE = 1 << 14, 1 << 18
_MIXTURE_STEPS, _MIXTURE_TOLERANCE = 100, 1e-4  # EM steps at most, and the gain per patch below which they stop
_MIXTURE_PRIOR = 10.0  # pseudo-patches with the overall variance, in every component
_ALPHA = 0.1  # patches of every concept that PACE's default prior adds to an image


class PatchConcepts(Explainer):
    """A method that learns from patches alone and never runs the model.

    Parameters
    ----------
    n_concepts, sample
        K, and the number of patches to learn from, equally many from every training image.
    """

    def __init__(self, n_concepts: int = 100, sample: int = SAMPLE) -> None:
        check_counts(n_concepts=n_concepts, sample=sample)
        self.n_concepts, self.sample = n_concepts, sample

    def _fit(self, backbone: Backbone, train: Observations, perturbed: Observations | None, seed: int) -> None:
        self._learn(draw_patches(train, self.sample, self.n_concepts, seed, self.device_), seed)

    def _explain(self, observations: Observations, seed: int, patches: bool) -> Explanation:
        def find(tokens: Tensor, images: slice) -> Tensor:
            return self._coefficients(tokens.flatten(0, 1)).view(*tokens.shape[:2], -1)

        return explain_tokens(observations, find, self.device_, patches)

    @abstractmethod
    def _learn(self, patches: Tensor, seed: int) -> None:
        """From patches (n, d)."""

    @abstractmethod
    def _coefficients(self, tokens: Tensor) -> Tensor:
        """φ (n, K) of tokens (n, d)."""


class KMeans(PatchConcepts):
    """A histogram over K centres: φ is 1 for the nearest, θ counts."""

    name = "kmeans"

    def _learn(self, patches: Tensor, seed: int) -> None:
        self.centres_ = k_means(patches, self.n_concepts, seed)
        self.concepts_ = self.centres_.cpu().numpy()

    def _coefficients(self, tokens: Tensor) -> Tensor:
        return one_hot(nearest(tokens, self.centres_), self.n_concepts).float()


class GaussianMixture(PatchConcepts):
    """A plain mixture of K Gaussians with diagonal covariances over all patches: φ is the posterior, θ its mean.

    PACE without its image level, attention, predictions and pairs. scikit-learn's runs on a CPU only.
    """

    name = "gmm"

    def _learn(self, patches: Tensor, seed: int) -> None:
        self.offset_ = patches.mean(0)
        variances = patches.double().var(0, correction=0)
        variances = variances.clamp_min(variances.mean().clamp_min(1e-12) * 1e-6)
        prior = Prior(variances.diag(), _MIXTURE_PRIOR)
        means = k_means(patches, self.n_concepts, seed) - self.offset_
        self.gaussians_ = DiagGaussians(means, variances.to(means.dtype).repeat(len(means), 1))
        self.log_shares_ = torch.full_like(means[:, 0], -np.log(self.n_concepts))
        last = -np.inf
        for _ in range(_MIXTURE_STEPS):
            sums, likelihood = self.gaussians_.empty_sums(), 0.0
            for rows in chunks(patches):
                scores, x = self._scores(patches[rows])
                likelihood += float(scores.logsumexp(1).sum(dtype=torch.float64))
                self.gaussians_.accumulate(x, scores.softmax(1), sums)
            self.gaussians_ = self.gaussians_.maximise(sums, prior)
            shares = sums["weight"] + 1  # one extra patch for each, so that none dies
            self.log_shares_ = (shares / shares.sum()).log().to(patches.dtype)
            if likelihood - last < _MIXTURE_TOLERANCE * len(patches):
                break
            last = likelihood
        self.concepts_ = (self.gaussians_.means + self.offset_).cpu().numpy()

    def _coefficients(self, tokens: Tensor) -> Tensor:
        return self._scores(tokens)[0].softmax(1)

    def _scores(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """log share + log N (n, K), up to a constant, and the features that they are computed from."""
        x = self.gaussians_.features(patches, self.offset_)
        return self.log_shares_ - (self.gaussians_.log_det + self.gaussians_.mahalanobis(x)) / 2, x


class SemiNMF(PatchConcepts):
    """e ≈ mean + U W with U ≥ 0: CRAFT's factorisation without the rectification. φ is U."""

    name = "semi-nmf"

    def __init__(self, n_concepts: int = 100, sample: int = FACTOR_SAMPLE) -> None:
        super().__init__(n_concepts, sample)

    def _learn(self, patches: Tensor, seed: int) -> None:
        self.offset_ = patches.mean(0)
        self.dictionary_ = semi_nmf(patches - self.offset_, self.n_concepts, seed)
        self.concepts_ = self.dictionary_.cpu().numpy()

    def _coefficients(self, tokens: Tensor) -> Tensor:
        return coefficients(tokens - self.offset_, self.dictionary_)


class MeanEmbedding(Explainer):
    """θ is the mean token itself, K = d: a logistic regression on it is an upper bound for θ of any mean over tokens."""

    name = "embedding"

    def _explain(self, observations: Observations, seed: int, patches: bool) -> Explanation:
        return explain_tokens(observations, lambda tokens, images: tokens, self.device_, patches=False)


class Majority(Explainer):
    """θ is the same for all images: how often each class is predicted in training. It can only reveal the majority class."""

    name = "majority"

    def _fit(self, backbone: Backbone, train: Observations, perturbed: Observations | None, seed: int) -> None:
        if train.predictions is None:
            raise ValueError("the majority class needs observations with predictions")
        counts = torch.bincount(predicted(train.predictions[:]), minlength=train.n_classes)
        self.theta_ = (counts / len(train)).cpu().numpy()

    def _explain(self, observations: Observations, seed: int, patches: bool) -> Explanation:
        return point(np.tile(self.theta_, (len(observations), 1)), None, observations)


class TrueColors(Explainer):
    """The answer on Color: φ is 1 for a patch's true colour, θ counts, plus the prior of PACE's default.

    Prefix tokens have no colour; their φ is that of the mean patch.

    Parameters
    ----------
    known
        Pairs of observations and the true colours (M, rows, columns) of their patches, as `Color.patch_colors` numbers them.
    n_concepts
        K; the concepts beyond the colours stay empty, as a perfect method with K concepts would leave them.
    """

    name = "true-colors"

    def __init__(self, known: Sequence[tuple[Observations, Array]], n_concepts: int = 100) -> None:
        for observations, colors in known:
            expected = len(observations), *(observations.grid or ())
            if np.shape(colors) != expected:
                raise ValueError(f"known: expected colours of shape {expected}; found {np.shape(colors)}")
            if np.max(colors) >= n_concepts:
                raise ValueError(
                    f"n_concepts: expected more than {np.max(colors)}, the last colour; found {n_concepts}"
                )
        self.known, self.n_concepts = known, n_concepts

    def _explain(self, observations: Observations, seed: int, patches: bool) -> Explanation:
        found = [colors for known, colors in self.known if known is observations]
        if not found:
            raise ValueError("these are not among the observations whose true colours were given")
        of_patches = np.eye(self.n_concepts, dtype=np.float32)[np.reshape(found[0], (len(observations), -1))]
        counts = of_patches.sum(1) + _ALPHA
        prefix = np.repeat(of_patches.mean(1, keepdims=True), observations.prefix_tokens, axis=1)
        phi = np.concatenate([prefix, of_patches], axis=1) if patches else None
        return point(counts / counts.sum(1, keepdims=True), phi, observations)


def draw_patches(train: Observations, sample: int, at_least: int, seed: int, device: torch.device) -> Tensor:
    """About `sample` patches (n, d), image by image, equally many from each."""
    each = min(train.n_tokens, -(-sample // len(train)))
    if each * len(train) < at_least:
        raise ValueError(f"n_concepts={at_least} is more than the {each * len(train)} patches there are to learn from")
    order = np.random.default_rng(seed).random((len(train), train.n_tokens), dtype=np.float32)
    chosen = torch.from_numpy(order.argpartition(each - 1, axis=1)[:, :each]).to(device)
    found = []
    for images, batch in train.batches(_images_at_once(train, device), device, torch.float32):
        places = chosen[images, :, None].expand(-1, -1, train.dim)
        found.append(batch.embeddings.gather(1, places).flatten(0, 1))
    return torch.cat(found)


def explain_tokens(
    observations: Observations, find: Callable[[Tensor, slice], Tensor], device: torch.device, patches: bool
) -> PointExplanation:
    """φ (B, J, K) by `find` from the tokens (B, J, d) of a batch and its place among the images; θ is the mean over tokens."""
    theta, phi = [], []
    for images, batch in observations.batches(_images_at_once(observations, device), device, torch.float32):
        found = find(batch.embeddings, images)
        theta.append(found.mean(1).cpu())
        if patches:
            phi.append(found.cpu())
    return point(torch.cat(theta).numpy(), torch.cat(phi).numpy() if patches else None, observations)


def _images_at_once(observations: Observations, device: torch.device) -> int:
    tokens = _TOKENS_AT_ONCE_CPU if device.type == "cpu" else _TOKENS_AT_ONCE
    return max(1, tokens // observations.n_tokens)
