"""Reference methods that everybody understands, to read the other scores by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pace.baselines.explainer import Explainer, SplitModel, check_counts, point
from pace.baselines.factorization import chunks, coefficients, k_means, nearest, semi_nmf
from pace.baselines.head import predicted
from pace.baselines.patches import FACTOR_SAMPLE, PatchConcepts
from pace.explanation import Array, Explanation
from pace.observations import Observations

_MIXTURE_STEPS, _MIXTURE_TOLERANCE = 100, 1e-4  # EM steps at most, and the gain per patch below which they stop
_MIXTURE_PRIOR = 10.0  # pseudo-patches with the overall variance, in every component


class KMeans(PatchConcepts):
    """A histogram over K centres: φ is 1 for the nearest, θ counts."""

    name = "kmeans"

    def _learn(self, patches: Tensor, seed: int) -> None:
        self.centres_ = k_means(patches, self.n_concepts, seed)
        self.concepts_ = self.centres_.cpu().numpy()

    def _coefficients(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(nearest(tokens, self.centres_), self.n_concepts).float()


class GaussianMixture(PatchConcepts):
    """A plain mixture of K Gaussians with diagonal covariances over all patches: φ is the posterior, θ its mean.

    PACE without its image level, attention, predictions and pairs. scikit-learn's runs on a CPU only.
    """

    name = "gmm"

    def _learn(self, patches: Tensor, seed: int) -> None:
        self.offset_ = patches.mean(0)
        overall = patches.double().var(0, correction=0)
        overall = overall.clamp_min(overall.mean().clamp_min(1e-12) * 1e-6)
        self.means_ = k_means(patches, self.n_concepts, seed) - self.offset_
        self.variances_ = overall.to(patches.dtype).expand_as(self.means_)
        self.log_shares_ = torch.full_like(self.means_[:, 0], -np.log(self.n_concepts))
        last = -np.inf
        for _ in range(_MIXTURE_STEPS):
            likelihood = self._step(patches, overall)
            if likelihood - last < _MIXTURE_TOLERANCE * len(patches):
                break
            last = likelihood
        self.concepts_ = (self.means_ + self.offset_).cpu().numpy()

    def _step(self, patches: Tensor, overall: Tensor) -> float:
        """One step of EM; returns the log-likelihood before it."""
        weight = torch.zeros(len(self.means_), 1, dtype=torch.float64, device=patches.device)
        first = torch.zeros_like(self.means_, dtype=torch.float64)
        second, likelihood = torch.zeros_like(first), 0.0
        for rows in chunks(patches):
            x = patches[rows] - self.offset_
            scores = self._scores(x)
            likelihood += float(scores.logsumexp(1).sum(dtype=torch.float64))
            share = scores.softmax(1).T
            weight += share.sum(1, keepdim=True, dtype=torch.float64)
            first += share @ x
            second += share @ x.square()
        means = torch.where(weight > 0, first / weight.clamp_min(1e-300), self.means_.double())
        scatter = (second - weight * means.square()).clamp_min(0)
        variances = (scatter + _MIXTURE_PRIOR * overall) / (weight + _MIXTURE_PRIOR)
        shares = (weight[:, 0] + 1) / (weight + 1).sum()  # one extra patch for each, so that none dies
        dtype = patches.dtype
        self.means_, self.variances_, self.log_shares_ = means.to(dtype), variances.to(dtype), shares.log().to(dtype)
        return likelihood

    def _coefficients(self, tokens: Tensor) -> Tensor:
        return self._scores(tokens - self.offset_).softmax(1)

    def _scores(self, x: Tensor) -> Tensor:
        """log share + log N(x; μ, σ²) (n, K), up to a constant."""
        precision = 1 / self.variances_
        linear = self.means_ * precision
        constant = self.log_shares_ - (self.variances_.log() + self.means_ * linear).sum(1) / 2
        return constant + x @ linear.T - x.square() @ precision.T / 2


class SemiNMF(PatchConcepts):
    """e ≈ mean + U W with U ≥ 0: CRAFT's factorisation without the rectification. φ is U."""

    name = "semi-nmf"

    def __init__(self, n_concepts: int = 100, sample: int = FACTOR_SAMPLE, batch_size: int | None = None) -> None:
        super().__init__(n_concepts, sample, batch_size)

    def _learn(self, patches: Tensor, seed: int) -> None:
        self.offset_ = patches.mean(0)
        self.dictionary_ = semi_nmf(patches - self.offset_, self.n_concepts, seed)
        self.concepts_ = self.dictionary_.cpu().numpy()

    def _coefficients(self, tokens: Tensor) -> Tensor:
        return coefficients(tokens - self.offset_, self.dictionary_)


class MeanEmbedding(Explainer):
    """θ is the mean token itself, K = d: a logistic regression on it is an upper bound for θ of any mean over tokens."""

    name = "embedding"

    def __init__(self, batch_size: int = 256) -> None:
        check_counts(batch_size=batch_size)
        self.batch_size = batch_size

    def _explain(self, observations: Observations, seed: int, patches: bool) -> Explanation:
        batches = observations.batches(self.batch_size)
        theta = torch.cat([batch.embeddings.mean(1, dtype=torch.float32).cpu() for _, batch in batches])
        return point(theta.numpy(), None, observations)


class Majority(Explainer):
    """θ is the same for all images: how often each class is predicted in training. It can only reveal the majority class."""

    name = "majority"
    theta_: Array

    def _fit(self, backbone: SplitModel, train: Observations, perturbed: Observations | None, seed: int) -> None:
        if train.predictions is None:
            raise ValueError("the majority class needs observations with predictions")
        counts = torch.bincount(predicted(train.predictions[:]), minlength=train.n_classes)
        self.theta_ = (counts / len(train)).cpu().numpy()

    def _explain(self, observations: Observations, seed: int, patches: bool) -> Explanation:
        return point(np.tile(self.theta_, (len(observations), 1)), None, observations)


class TrueColors(Explainer):
    """The answer on Color: φ is 1 for a patch's true colour, θ counts, plus α patches of every concept.

    Prefix tokens have no colour; their φ is that of the mean patch.

    Parameters
    ----------
    known
        Pairs of observations and the true colours (M, rows, columns) of their patches, as `Color.patch_colors` numbers them.
    n_concepts
        K; the concepts beyond the colours stay empty, as a perfect method with K concepts would leave them.
    alpha
        The prior of PACE's default.
    """

    name = "true-colors"

    def __init__(self, known: Sequence[tuple[Observations, Array]], n_concepts: int = 100, alpha: float = 0.1) -> None:
        for observations, colors in known:
            if observations.grid is None or np.shape(colors) != (len(observations), *observations.grid):
                expected = f"({len(observations)}, rows, columns) as the grid {observations.grid} has them"
                raise ValueError(f"known: expected colours of shape {expected}; found {np.shape(colors)}")
            if np.min(colors) < 0 or np.max(colors) >= n_concepts:
                raise ValueError(
                    f"known: expected colours from 0 to {n_concepts - 1}; found {np.min(colors)} to {np.max(colors)}"
                )
        self.known, self.n_concepts, self.alpha = known, n_concepts, alpha

    def _explain(self, observations: Observations, seed: int, patches: bool) -> Explanation:
        found = [colors for known, colors in self.known if known is observations]
        if not found:
            raise ValueError("these are not among the observations whose true colours were given")
        of_patches = np.eye(self.n_concepts, dtype=np.float32)[np.reshape(found[0], (len(observations), -1))]
        counts = of_patches.sum(1) + self.alpha
        prefix = np.repeat(of_patches.mean(1, keepdims=True), observations.prefix_tokens, axis=1)
        phi = np.concatenate([prefix, of_patches], axis=1) if patches else None
        return point(counts / counts.sum(1, keepdims=True), phi, observations)
