"""Reference lines: what the scores are worth is seen beside methods that everybody understands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from pace.baselines.explainer import SplitModel, check_counts, point
from pace.baselines.factorization import coefficients, k_means, nearest, semi_nmf
from pace.baselines.head import predicted
from pace.baselines.patches import FACTOR_SAMPLE, PatchConcepts
from pace.explanation import Array, Explanation
from pace.model.gaussians import Prior
from pace.model.gaussians.diagonal import DiagGaussians
from pace.model.gaussians.family import slices
from pace.observations import Observations

_MIXTURE_STEPS, _MIXTURE_TOLERANCE, _MIXTURE_PRIOR = 100, 1e-4, 10.0


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

    PACE without its image level, attention, predictions and pairs.
    """

    name = "gmm"

    def _learn(self, patches: Tensor, seed: int) -> None:
        self.offset_ = patches.mean(0)
        variances = patches.double().var(0, correction=0)
        floor = variances.mean().clamp_min(1e-12) * 1e-6
        prior = Prior(torch.diag(variances.clamp_min(floor)), _MIXTURE_PRIOR)
        means = k_means(patches, self.n_concepts, seed) - self.offset_
        self.gaussians_ = DiagGaussians.seed(means, prior.covariance, 0)
        self.log_shares_ = torch.full_like(means[:, 0], -np.log(self.n_concepts))
        last = -np.inf
        for _ in range(_MIXTURE_STEPS):
            sums, total = self.gaussians_.empty_sums(), 0.0
            for part in slices(len(patches), self.gaussians_.tokens_at_once()):
                features = self.gaussians_.features(patches[part], self.offset_)
                scores = self._scores(features)
                total += float(scores.logsumexp(1).sum(dtype=torch.float64))
                self.gaussians_.accumulate(features, scores.softmax(1), sums)
            self.gaussians_ = self.gaussians_.maximise(sums, prior)
            shares = (sums["weight"] + 1) / (sums["weight"] + 1).sum()  # one patch more for each, so that none dies
            self.log_shares_ = shares.log().to(means.dtype)
            if total - last < _MIXTURE_TOLERANCE * len(patches):
                break
            last = total
        self.concepts_ = (self.gaussians_.means + self.offset_).cpu().numpy()

    def _coefficients(self, tokens: Tensor) -> Tensor:
        return self._scores(self.gaussians_.features(tokens, self.offset_)).softmax(1)

    def _scores(self, features: Tensor) -> Tensor:
        return self.log_shares_ - (self.gaussians_.mahalanobis(features) + self.gaussians_.log_det) / 2


class SemiNMF(PatchConcepts):
    """e ≈ mean + U W with U ≥ 0: CRAFT's factorisation without its rectification. φ is U."""

    name = "semi-nmf"

    def __init__(self, n_concepts: int = 100, sample: int = FACTOR_SAMPLE, batch_size: int | None = None) -> None:
        super().__init__(n_concepts, sample, batch_size)

    def _learn(self, patches: Tensor, seed: int) -> None:
        self.offset_ = patches.mean(0)
        self.dictionary_ = semi_nmf(patches - self.offset_, self.n_concepts, seed)
        self.concepts_ = self.dictionary_.cpu().numpy()

    def _coefficients(self, tokens: Tensor) -> Tensor:
        return coefficients(tokens - self.offset_, self.dictionary_)


class MeanEmbedding:
    """θ is the mean token as it is, K = d: what a logistic regression makes of it bounds what θ of any mean can hold."""

    name = "embedding"
    repeats = 1
    concepts_: Array | None = None

    def __init__(self, batch_size: int = 256) -> None:
        check_counts(batch_size=batch_size)
        self.batch_size = batch_size

    def fit(
        self,
        backbone: SplitModel,
        train: Observations,
        *,
        perturbed: Observations | None = None,
        seed: int = 0,
        device: Any = None,
    ) -> Self:
        return self

    def explain(self, observations: Observations, *, seed: int = 0, patches: bool = True) -> Explanation:
        batches = observations.batches(self.batch_size)
        theta = torch.cat([batch.embeddings.mean(1, dtype=torch.float32).cpu() for _, batch in batches])
        return point(theta.numpy(), None, observations)


class Majority:
    """θ is the same for all images, how often each class is predicted in training: a reader can only name the majority."""

    name = "majority"
    repeats = 1
    concepts_: Array | None = None
    theta_: Array

    def fit(
        self,
        backbone: SplitModel,
        train: Observations,
        *,
        perturbed: Observations | None = None,
        seed: int = 0,
        device: Any = None,
    ) -> Self:
        if train.predictions is None:
            raise ValueError("the majority class needs observations with predictions")
        counts = torch.bincount(predicted(train.predictions[:]), minlength=train.n_classes)
        self.theta_ = (counts / len(train)).cpu().numpy()
        return self

    def explain(self, observations: Observations, *, seed: int = 0, patches: bool = True) -> Explanation:
        return point(np.tile(self.theta_, (len(observations), 1)), None, observations)


class TrueColors:
    """The answer on Color: φ is 1 for a patch's true colour, θ counts, with α patches of every concept beforehand.

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
    repeats = 1
    concepts_: Array | None = None

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

    def fit(
        self,
        backbone: SplitModel,
        train: Observations,
        *,
        perturbed: Observations | None = None,
        seed: int = 0,
        device: Any = None,
    ) -> Self:
        return self

    def explain(self, observations: Observations, *, seed: int = 0, patches: bool = True) -> Explanation:
        found = [colors for known, colors in self.known if known is observations]
        if not found:
            raise ValueError("these are not among the observations whose true colours were given")
        of_patches = np.asarray(found[0]).reshape(len(observations), -1)
        of_patches = np.eye(self.n_concepts, dtype=np.float32)[of_patches]
        counts = of_patches.sum(1) + self.alpha
        prefix = np.repeat(of_patches.mean(1, keepdims=True), observations.prefix_tokens, axis=1)
        phi = np.concatenate([prefix, of_patches], axis=1) if patches else None
        return point(counts / counts.sum(1, keepdims=True), phi, observations)
