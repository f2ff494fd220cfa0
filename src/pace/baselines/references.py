"""Concepts learned from patches, and reference methods that everybody understands, to read the other scores by.

Every token gets coefficients φ of K concepts. θ is their mean over the observed tokens, including CLS where it counts, each
weighted by its attention, w_mj = J a_mj, as in PACE. k-means, mixtures and autoencoders learn with these weights too.
"""

from __future__ import annotations

import math
import zlib
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
from pace.model.inference import Weights
from pace.observations import Batch, Observations

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

    offset_: Array | float = 0.0

    def __init__(self, n_concepts: int = 100, sample: int = SAMPLE) -> None:
        check_counts(n_concepts=n_concepts, sample=sample)
        self.n_concepts, self.sample = n_concepts, sample

    def _fit(self, backbone: Backbone, train: Observations, perturbed: Observations | None, seed: int) -> None:
        self._learn(*draw_patches(train, self.sample, self.n_concepts, seed, self.device_), seed)

    def _explain(self, observations: Observations, seed: int, patches: bool) -> Explanation:
        def find(batch: Batch, images: slice) -> Tensor:
            return self._coefficients(batch.embeddings.flatten(0, 1)).view(*batch.attention.shape, -1)

        return explain_tokens(observations, find, self.device_, patches)

    @abstractmethod
    def _learn(self, patches: Tensor, weights: Tensor, seed: int) -> None:
        """From patches (n, d) and how much each counts (n,)."""

    @abstractmethod
    def _coefficients(self, tokens: Tensor) -> Tensor:
        """φ (n, K) of tokens (n, d)."""


class KMeans(PatchConcepts):
    """A histogram over K centres: φ is 1 for the nearest, θ counts."""

    name = "kmeans"

    def _learn(self, patches: Tensor, weights: Tensor, seed: int) -> None:
        self.centres_ = self._place(patches, weights, seed)
        self.concepts_ = self.centres_.cpu().numpy()

    def _place(self, patches: Tensor, weights: Tensor, seed: int) -> Tensor:
        """The centres (K, d)."""
        return k_means(patches, weights, self.n_concepts, seed)

    def _coefficients(self, tokens: Tensor) -> Tensor:
        return one_hot(nearest(tokens, self.centres_), self.n_concepts).float()


class RandomCentres(KMeans):
    """Concepts that nobody learned: K training patches drawn by lot are the centres, and every patch goes to the nearest."""

    name = "random"

    def _place(self, patches: Tensor, weights: Tensor, seed: int) -> Tensor:
        drawn = np.random.default_rng(seed).choice(len(patches), self.n_concepts, replace=False)
        return patches[torch.from_numpy(drawn).to(patches.device)]


class ByLot(KMeans):
    """k-means with the patches of every image shuffled: the same θ, and nothing said about any patch.

    An image and its perturbed view get different draws, whatever the seed: it does not follow.
    """

    name = "lot"

    def _explain(self, observations: Observations, seed: int, patches: bool) -> Explanation:
        found = super()._explain(observations, seed, patches)
        if found.phi is None:
            return found
        first = observations.batch([0], "cpu", torch.float32).embeddings.numpy().tobytes()  # another view, another draw
        rng, start = np.random.default_rng([seed, zlib.crc32(first)]), observations.prefix_tokens
        for tokens in found.phi:
            tokens[start:] = rng.permutation(tokens[start:])
        return found


class GaussianMixture(PatchConcepts):
    """A plain mixture of K Gaussians with diagonal covariances over all patches: φ is the posterior, θ its mean.

    PACE without its image level, predictions and pairs. scikit-learn's knows no weights and runs on a CPU only.
    """

    name = "gmm"

    def _learn(self, patches: Tensor, weights: Tensor, seed: int) -> None:
        share = (weights / weights.sum())[:, None]
        self.centre_ = (share * patches).sum(0)
        variances = (share * (patches - self.centre_).square()).sum(0, dtype=torch.float64)
        variances = variances.clamp_min(variances.mean().clamp_min(1e-12) * 1e-6)
        prior = Prior(variances.diag(), _MIXTURE_PRIOR)
        means = k_means(patches, weights, self.n_concepts, seed) - self.centre_
        self.gaussians_ = DiagGaussians(means, variances.to(means.dtype).repeat(len(means), 1))
        self.log_shares_ = torch.full_like(means[:, 0], -np.log(self.n_concepts))
        last = -np.inf
        for _ in range(_MIXTURE_STEPS):
            sums, likelihood = self.gaussians_.empty_sums(), 0.0
            for rows in chunks(patches):
                scores, x = self._scores(patches[rows])
                likelihood += float((weights[rows] * scores.logsumexp(1)).sum(dtype=torch.float64))
                self.gaussians_.accumulate(x, scores.softmax(1) * weights[rows, None], sums)
            self.gaussians_ = self.gaussians_.maximise(sums, prior)
            shares = sums["weight"] + 1  # one extra patch for each, so that none dies
            self.log_shares_ = (shares / shares.sum()).log().to(patches.dtype)
            if likelihood - last < _MIXTURE_TOLERANCE * float(weights.sum()):
                break
            last = likelihood
        self.concepts_ = (self.gaussians_.means + self.centre_).cpu().numpy()

    def _coefficients(self, tokens: Tensor) -> Tensor:
        return self._scores(tokens)[0].softmax(1)

    def _scores(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """log share + log N (n, K), up to a constant, and the features that they are computed from."""
        x = self.gaussians_.features(patches, self.centre_)
        return self.log_shares_ - (self.gaussians_.log_det + self.gaussians_.mahalanobis(x)) / 2, x


class SemiNMF(PatchConcepts):
    """e ≈ mean + U W with U ≥ 0: CRAFT's factorisation without the rectification. φ is U."""

    name = "semi-nmf"

    def __init__(self, n_concepts: int = 100, sample: int = FACTOR_SAMPLE) -> None:
        super().__init__(n_concepts, sample)

    def _learn(self, patches: Tensor, weights: Tensor, seed: int) -> None:
        self.centre_ = patches.mean(0)
        self.dictionary_ = semi_nmf(patches - self.centre_, self.n_concepts, seed)
        self.concepts_, self.offset_ = self.dictionary_.cpu().numpy(), self.centre_.cpu().numpy()

    def _coefficients(self, tokens: Tensor) -> Tensor:
        return coefficients(tokens - self.centre_, self.dictionary_)


class Layout(Explainer):
    """Concepts that do not look at the embeddings: each patch gets one, and prefix tokens what the mean patch has."""

    def __init__(self, n_concepts: int = 100) -> None:
        check_counts(n_concepts=n_concepts)
        self.n_concepts = n_concepts

    def _explain(self, observations: Observations, seed: int, patches: bool) -> Explanation:
        start = observations.prefix_tokens

        def find(batch: Batch, images: slice) -> Tensor:
            found = one_hot(*self._lay_out(batch.attention[:, start:], observations.grid)).float()
            return torch.cat([found.mean(1, keepdim=True).expand(-1, start, -1), found], 1)

        return explain_tokens(observations, find, self.device_, patches)

    @abstractmethod
    def _lay_out(self, attention: Tensor, grid: tuple[int, int] | None) -> tuple[Tensor, int]:
        """The concept of every patch (B, patches), and how many concepts there are."""


class Position(Layout):
    """A concept is a cell of a regular grid over the picture, of K cells or a few less."""

    name = "position"

    def _lay_out(self, attention: Tensor, grid: tuple[int, int] | None) -> tuple[Tensor, int]:
        if grid is None:
            raise ValueError("position needs observations with a grid")
        rows = min(math.isqrt(self.n_concepts), grid[0])
        columns = min(self.n_concepts // rows, grid[1])
        row, column = (
            torch.arange(n, device=attention.device) * m // n for n, m in zip(grid, (rows, columns), strict=True)
        )
        cells = (row[:, None] * columns + column).flatten()
        return cells.expand(len(attention), -1), rows * columns


class AttentionRank(Layout):
    """A concept is a band of the patches' ranks by attention within their image: K bands, the most attended first."""

    name = "attention-rank"

    def _lay_out(self, attention: Tensor, grid: tuple[int, int] | None) -> tuple[Tensor, int]:
        patches = attention.shape[1]
        bands = min(self.n_concepts, patches)
        rank = attention.argsort(dim=1, descending=True, stable=True).argsort(1)
        return rank * bands // patches, bands


class MeanEmbedding(Explainer):
    """θ is the mean token itself, K = d: what there is to be had for any θ that is a mean over tokens."""

    name = "embedding"
    patch_level = False

    def _explain(self, observations: Observations, seed: int, patches: bool) -> Explanation:
        return explain_tokens(observations, lambda batch, images: batch.embeddings, self.device_, patches=False)


class Majority(Explainer):
    """θ is the same for all images: how often each class is predicted in training. It can only reveal the majority class."""

    name = "majority"
    patch_level = False

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


def draw_patches(
    train: Observations, sample: int, at_least: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """About `sample` patches (n, d), image by image, equally many from each, and their weights (n,)."""
    each = min(train.n_tokens, -(-sample // len(train)))
    if each * len(train) < at_least:
        raise ValueError(f"n_concepts={at_least} is more than the {each * len(train)} patches there are to learn from")
    order = np.random.default_rng(seed).random((len(train), train.n_tokens), dtype=np.float32)
    chosen = torch.from_numpy(order.argpartition(each - 1, axis=1)[:, :each]).to(device)
    patches, weights = [], []
    for images, batch in train.batches(_images_at_once(train, device), device, torch.float32):
        places = chosen[images]
        patches.append(batch.embeddings.gather(1, places[:, :, None].expand(-1, -1, train.dim)).flatten(0, 1))
        weights.append(Weights.of(batch.attention, "exact").count.gather(1, places).flatten())
    return torch.cat(patches), torch.cat(weights)


def explain_tokens(
    observations: Observations, find: Callable[[Batch, slice], Tensor], device: torch.device, patches: bool
) -> PointExplanation:
    """φ (B, J, K) by `find` from a batch and its place among the images; θ is its mean, weighted by attention."""
    theta, phi = [], []
    for images, batch in observations.batches(_images_at_once(observations, device), device, torch.float32):
        found = find(batch, images)
        share = batch.attention / batch.attention.sum(1, keepdim=True)
        theta.append(torch.einsum("bj,bjk->bk", share, found).cpu())
        if patches:
            phi.append(found.cpu())
    return point(torch.cat(theta).numpy(), torch.cat(phi).numpy() if patches else None, observations)


def _images_at_once(observations: Observations, device: torch.device) -> int:
    tokens = _TOKENS_AT_ONCE_CPU if device.type == "cpu" else _TOKENS_AT_ONCE
    return max(1, tokens // observations.n_tokens)
