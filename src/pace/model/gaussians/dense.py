"""Covariances with all their entries: one for every concept, or one for all."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pace.model.gaussians.family import (
    Gaussians,
    Prior,
    Sums,
    by_concept,
    common_factor,
    covariance_of,
    precision_cholesky,
    slices,
    weighted_sums,
)

# The screen of distances: from how many dimensions it pays, up to which share of near entries, and how far off a rough
# log-density may be (nats).
_SCREEN_DIM, _SCREEN_SHARE, _SCREEN_ERROR = 256, 1 / 8, 2.0

_FUSED_DIM = 128  # from so many dimensions the kernels in fused.py fill their tiles

# Rows, columns of one concept and columns in all that are worked on together: small enough for a CPU's cache, large enough to
# fill a GPU.
_BLOCK = {"cpu": (1024, 32, 384), "cuda": (1 << 16, 256, 512)}

# Distances from products of pairs of dimensions: up to so many dimensions, so many patches at once, and as long as no
# log-density is off by so much (nats).
_PAIRS_DIM, _PAIRS_ROWS, _PAIRS_ERROR = 96, 256, 1e-3


class FullGaussians(Gaussians):
    """A covariance of its own for every concept; θ is then unchanged by any rotation of the embeddings."""

    name = "full"
    parts = ("means", "precision_cholesky")

    def __init__(self, means: Tensor, precision_cholesky: Tensor):
        self.means = means
        self.precision_cholesky = precision_cholesky  # P_k (K, d, d)
        self.log_det = -2 * precision_cholesky.diagonal(dim1=1, dim2=2).double().log().sum(1).to(means.dtype)

    @classmethod
    def seed(cls, means: Tensor, covariance: Tensor, rank: int) -> FullGaussians:
        factor = precision_cholesky(covariance).to(means.dtype)
        return cls(means, factor.expand(len(means), -1, -1).contiguous())

    @cached_property
    def _distances(self) -> Any:
        """`Distances` of fused.py where its kernels can run and pay, else the one below; both have the same methods."""
        kernels = _kernels(self.means)
        return (kernels.Distances if kernels else Distances)(self.means, self.precision_cholesky)

    def _precise(self, x: Tensor) -> Tensor:
        found: Tensor = self._distances.precise(self._distances.read(x))
        return found

    def mahalanobis(self, x: Tensor, within: float = math.inf, relative: bool = False) -> Tensor:
        """All distances in 16 bits first, where that is quick, then in full precision those that may matter."""
        screen = within < math.inf and len(x) >= self._distances.screened_from and x.shape[1] >= _SCREEN_DIM
        if screen:
            probe = self._near(self._precise(x[:: -(-len(x) // 256)]), within)
            screen = int(probe.count_nonzero()) <= _SCREEN_SHARE * probe.numel()
        parts = torch.split(x, 4096 if x.device.type == "cpu" else 1 << 16)
        return torch.cat([self._screened(part, within) if screen else self._precise(part) for part in parts])

    def _near(self, distances: Tensor, within: float) -> Tensor:
        surprise = distances + self.log_det  # -2 log N, up to a constant
        return surprise <= surprise.amin(1, keepdim=True) + 2 * within

    def _screened(self, x: Tensor, within: float) -> Tensor:
        patches = self._distances.read(x)
        out: Tensor = self._distances.rough(patches)
        rows, concepts, counts = by_concept(self._near(out, within + 2 * _SCREEN_ERROR))
        exact = self._distances.precise_at(patches, rows, counts)
        off = (out[rows, concepts] - exact).abs_() > 2 * _SCREEN_ERROR
        out[rows, concepts] = exact
        wrong = torch.unique(rows[off])  # 16 bits were too few: mostly patches far from all concepts
        if len(wrong) > 0:
            out[wrong] = self._precise(x[wrong])
        return out

    def _accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None:
        # Each concept's patches are centred on its present mean, since float32 products around a distant origin would lose
        # the covariance. The sums themselves are around the common origin and therefore add up.
        means, weight = self.means.double(), r.sum(0, dtype=torch.float64)
        first = self._distances.scatter(x, r, sums["second"])
        sums["weight"].add_(weight)
        sums["first"].add_(first + weight[:, None] * means)
        # Σ r x xᵀ = Σ r (x-μ)(x-μ)ᵀ + f μᵀ + μ fᵀ + n μ μᵀ, with f = Σ r (x-μ)
        half = first + weight[:, None] / 2 * means
        sums["second"].baddbmm_(torch.stack([half, means], 2), torch.stack([means, half], 1))

    def maximise(self, sums: Sums, prior: Prior) -> FullGaussians:
        means = self._new_means(sums)
        factors = torch.empty_like(self.precision_cholesky)
        total = (sums["weight"] + prior.strength)[:, None, None]
        # One covariance fills a CPU; a GPU would mostly wait between small steps.
        for some in slices(len(means), 1 if means.device.type == "cpu" else 100):
            weighted = means[some] * sums["weight"][some, None]
            covariance = torch.baddbmm(sums["second"][some], weighted[:, :, None], means[some][:, None], alpha=-1)
            covariance.add_(prior.covariance, alpha=prior.strength).div_(total[some])
            factors[some] = precision_cholesky(covariance).to(factors.dtype)
        return FullGaussians(means.to(self.means.dtype), factors)

    def log_prior(self, prior: Prior) -> float:
        root = torch.linalg.cholesky(prior.covariance).mT.to(self.means.dtype)
        spread = self.log_det.sum(dtype=torch.float64)
        for factor in self.precision_cholesky:
            spread = spread + (root @ factor).square_().sum(dtype=torch.float64)
        return -prior.strength / 2 * float(spread)

    def covariances(self) -> Tensor:
        return torch.stack([covariance_of(factor) for factor in self.precision_cholesky])


class TiedGaussians(Gaussians):
    """One covariance shared by all concepts.

    Learning whitens no patch and multiplies no d × d matrix for one: Σ_ik r_ik x_i x_iᵀ is the same in every epoch, and
    distances are linear in x up to |x P|², whose sum follows from it.
    """

    name = "tied"
    fixed = ("second",)
    parts = ("means", "precision_cholesky")

    def __init__(self, means: Tensor, precision_cholesky: Tensor):
        self.means = means
        self.precision_cholesky = precision_cholesky  # P (d, d)
        log_det = -2 * precision_cholesky.diagonal().double().log().sum()
        self.log_det = log_det.to(means.dtype).expand(len(means))

    @classmethod
    def seed(cls, means: Tensor, covariance: Tensor, rank: int) -> TiedGaussians:
        return cls(means, precision_cholesky(covariance).to(means.dtype))

    def mahalanobis(self, x: Tensor, within: float = math.inf, relative: bool = False) -> Tensor:
        if relative:
            constant, coefficients = self._linear
            return torch.addmm(constant, x, coefficients, alpha=-2)
        # Whitened distances by one product, seen from a concept in the middle to keep the terms small. Not from the mean of
        # all concepts: empty ones may be far away.
        centres = self.means @ self.precision_cholesky
        middle = centres[centres.square().sum(1).argmin()]
        white, centres = x @ self.precision_cholesky - middle, centres - middle
        squares = white.square().sum(1, keepdim=True) + centres.square().sum(1)
        return torch.addmm(squares, white, centres.T, alpha=-2).clamp_min_(0)

    @cached_property
    def _linear(self) -> tuple[Tensor, Tensor]:
        """|(x - μ_k) P|² - |x P|² = constant_k - 2 x Σ⁻¹ μ_k."""
        factor = self.precision_cholesky.double()
        centres = self.means.double() @ factor
        return centres.square().sum(1).to(self.means.dtype), (factor @ centres.T).to(self.means.dtype)

    def left_out(self, sums: Sums) -> float:
        factor = self.precision_cholesky.double()
        return -float((factor * (sums["second"] @ factor)).sum()) / 2

    def accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None:
        if "second" in sums:  # before anything is left out, so that it fits whatever is left out in other epochs
            rooted = x * r.sum(1, keepdim=True).sqrt()
            sums["second"].add_(rooted.T @ rooted)
        super().accumulate(x, r, sums)

    def _accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None:
        sums["weight"].add_(r.sum(0))
        sums["first"].add_(weighted_sums(r, x.shape[1])(x))

    def maximise(self, sums: Sums, prior: Prior) -> TiedGaussians:
        means, weight = self._new_means(sums), sums["weight"]
        used = torch.where(weight[:, None] > 0, means, 0.0)
        scatter = sums["second"] - (used * weight[:, None]).T @ used
        strength = len(means) * prior.strength
        covariance = (scatter + strength * prior.covariance) / (weight.sum() + strength)
        return TiedGaussians(means.to(self.means.dtype), precision_cholesky(covariance).to(self.means.dtype))

    def log_prior(self, prior: Prior) -> float:
        factor = self.precision_cholesky.double()
        spread = torch.einsum("de,df,fe->", factor, prior.covariance, factor)
        return -prior.strength / 2 * float(self.log_det.double().sum() + len(self.means) * spread)

    def covariances(self) -> Tensor:
        return covariance_of(self.precision_cholesky)


class Distances:
    """‖x P_k - s_k‖² of patches x, with s_k = μ_kᵀ P_k, in torch: for CPUs, and for GPUs without Triton."""

    def __init__(self, means: Tensor, factors: Tensor):
        self._means, self._factors = means, factors
        self._shift = torch.bmm(means[:, None], factors).squeeze(1)
        self._on_cpu = means.device.type == "cpu" and means.dtype == torch.float32
        # Patches, from which `rough` pays.
        self.screened_from = 8192 if self._on_cpu and _cpu_has_bfloat16() else math.inf

    def read(self, x: Tensor) -> Tensor:
        """Patches as the other methods take them."""
        return x

    def precise(self, x: Tensor) -> Tensor:
        few = self._on_cpu and len(x) >= 2 * _PAIRS_ROWS and x.shape[1] <= _PAIRS_DIM
        found = self._from_pairs(x) if few else None
        return _triangular_distances(x, self._factors, self._shift) if found is None else found

    def rough(self, x: Tensor) -> Tensor:
        """With fewer digits."""
        common, factors = self._bfloat16
        return _triangular_distances((x @ common).bfloat16(), factors, self._shift.bfloat16())

    def precise_at(self, x: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        """Of the first counts[0] `rows` under concept 0, the next counts[1] under concept 1, …"""
        parts = zip(torch.split(rows, counts.tolist()), self._factors, self._shift, strict=True)
        return torch.cat([torch.addmm(s, x[some], p, beta=-1).square_().sum(1) for some, p, s in parts])

    def scatter(self, x: Tensor, r: Tensor, out: Tensor) -> Tensor:
        """Add Σ_i r_ik (x_i - μ_k)(x_i - μ_k)ᵀ to out (K, d, d); returns Σ_i r_ik (x_i - μ_k), float64."""
        rows, _, counts = by_concept(r != 0)
        first = self._means.new_zeros(self._means.shape, dtype=torch.float64)
        for k, some in enumerate(torch.split(rows, counts.tolist())):
            if len(some):
                root = r[some, k].sqrt()
                centred = x[some].sub_(self._means[k]).mul_(root[:, None])
                first[k] = root @ centred
                out[k].add_(centred.T @ centred)
        return first

    def _from_pairs(self, x: Tensor) -> Tensor | None:
        """One product in place of K narrow ones: every distance is linear in the pairs x_i x_j and in x.

        Nothing if rounding, which grows with |x|² instead of |x|, would show.
        """
        common, coefficients, constant, farthest = self._pairs
        white = torch.mm(common.T, x.T)  # patches as columns
        if float(white.square().sum(0).max()) > farthest:
            return None
        parts = []
        for some in torch.split(white, _PAIRS_ROWS, 1):
            pairs = torch.cat([*(some[i:] * some[i] for i in range(len(some))), some])
            parts.append(torch.addmm(constant, coefficients, pairs))
        return torch.cat(parts, 1).T.clamp_min_(0)

    @cached_property
    def _pairs(self) -> tuple[Tensor, Tensor, Tensor, float]:
        """P̄, coefficients of pairs and of single dimensions, constants; and the |y|² from which rounding would show.

        With y = x P̄, m_k = μ_k P̄ and Q_k = P̄⁻¹ P_k P_kᵀ P̄⁻ᵀ a distance is (y - m_k) Q_k (y - m_k)ᵀ.
        """
        common, inverse = common_factor(self._factors)
        factors = inverse @ self._factors.double()
        precision = factors @ factors.mT
        centres = self._means.double() @ common
        scaled = torch.einsum("kd,kde->ke", centres, precision)
        i, j = torch.triu_indices(*precision.shape[1:])
        coefficients = torch.cat([precision[:, i, j] * torch.where(i == j, 1.0, 2.0), -2 * scaled], 1)
        constant = (scaled * centres).sum(1, keepdim=True)
        # Σ_ij |y_i Q_ij y_j| ≤ |y|² · the largest row sum of |Q|, and (|y| + |m|)² ≤ 2 |y|² + 2 |m|².
        dtype, largest = self._means.dtype, float(precision.abs().sum(2).max())
        farthest = _PAIRS_ERROR / torch.finfo(dtype).eps / largest - float(centres.square().sum(1).max())
        return common.to(dtype), coefficients.to(dtype), constant.to(dtype), farthest

    @cached_property
    def _bfloat16(self) -> tuple[Tensor, Tensor]:
        """P̄, and P̄⁻¹ P_k in bfloat16."""
        common, inverse = (part.to(self._means.dtype) for part in common_factor(self._factors))
        relative = torch.zeros_like(self._factors, dtype=torch.bfloat16)
        for columns in slices(len(common), 128):
            above = slice(0, columns.stop)
            relative[:, above, columns] = (inverse[above, above] @ self._factors[:, above, columns]).bfloat16()
        return common, relative


def _triangular_distances(x: Tensor, factors: Tensor, shifts: Tensor) -> Tensor:
    """‖x P_k - s_k‖² as (n, K), added up in float32 or better.

    P_k is upper triangular: a block of columns needs only the rows above its end, about half the product. One concept's
    narrow blocks would be slow, so several concepts' are taken side by side.
    """
    k, d = shifts.shape
    height, width, together = _BLOCK["cpu" if x.device.type == "cpu" else "cuda"]
    total = torch.promote_types(x.dtype, torch.float32)
    out = x.new_zeros(len(x), k, dtype=total)
    for concepts in slices(k, max(1, together // min(width, d))):
        for columns in slices(d, width):
            factor = factors[concepts, : columns.stop, columns].transpose(0, 1).flatten(1)
            shift = shifts[concepts, columns].flatten()
            room = x.new_empty(min(height, len(x)), len(shift))
            for rows in slices(len(x), height):
                block = room[: rows.stop - rows.start]
                torch.addmm(shift, x[rows, : columns.stop], factor, beta=-1, out=block)
                parts = block.view(len(block), -1, columns.stop - columns.start).to(total)
                out[rows, concepts].add_(torch.linalg.vector_norm(parts, dim=2).square_())
    return out


def _cpu_has_bfloat16() -> bool:
    """Whether bfloat16 products are much quicker than float32."""
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # older versions cannot tell
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _kernels(x: Tensor) -> Any:
    """The module fused.py, where its kernels can run on this input and pay."""
    if x.device.type != "cuda" or x.dtype != torch.float32 or x.shape[1] < _FUSED_DIM:
        return None
    try:
        from pace.model.gaussians import fused
    except ImportError:  # torch comes without Triton on some platforms
        return None
    return fused if torch.cuda.get_device_capability(x.device) >= (8, 0) and fused.usable(x.device) else None
