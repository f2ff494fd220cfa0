"""Covariances with all their entries: one for every concept, or one for all."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from pace.model.gaussians.family import NOT_POSITIVE, Gaussians, Prior, Sums, slices, weighted_sums

T = TypeVar("T")

# Rows, columns of one concept and columns in all that are worked on together: small enough to stay in a CPU's cache, large
# enough to fill a GPU.
_BLOCK = {"cpu": (1024, 32, 384), "cuda": (1 << 16, 256, 512)}

# The screen of `near_distances`: from how many dimensions it pays, up to which share of near entries, how far off the
# log-density of one may be (nats), and by device from how many rows it pays and how many are screened at once.
_SCREEN_DIM, _SCREEN_SHARE, _SCREEN_ERROR = 256, 1 / 8, 2.0
_SCREEN_ROWS = {"cpu": (8192, 4096), "cuda": (4096, 1 << 16)}

# Distances through products of pairs of dimensions, on a CPU: up to so many dimensions, so many patches at once, and as long
# as no log-density is off by so much (nats).
_PAIRED_DIM, _PAIRED_ROWS, _PAIRED_ERROR = 96, 512, 1e-3

_FUSED_DIM = 128  # from so many dimensions the kernels in fused.py fill their tiles

# Covariances factorised together: one fills a CPU; a GPU would mostly wait between small steps.
_FACTORED = {"cpu": 1, "cuda": 100}

_WIDENED = (
    1e-7,
    1e-6,
    1e-5,
    1e-4,
)  # of the mean variance, where rounding left a covariance that is not positive definite


class FullGaussians(Gaussians):
    """A covariance of its own for every concept; θ is then unchanged by any rotation of the embeddings."""

    name = "full"

    def __init__(self, means: Tensor, precision_cholesky: Tensor):
        self.means = means
        self.precision_cholesky = precision_cholesky  # P_k (K, d, d)
        self.log_det = -2 * precision_cholesky.diagonal(dim1=1, dim2=2).double().log().sum(1).to(means.dtype)
        self._shift = torch.bmm(means[:, None], precision_cholesky).squeeze(1)  # μ_kᵀ P_k

    @classmethod
    def seed(cls, means: Tensor, covariance: Tensor, rank: int) -> FullGaussians:
        factor = _precision_cholesky(covariance).to(means.dtype)
        return cls(means, factor.expand(len(means), -1, -1).contiguous())

    def mahalanobis(self, x: Tensor) -> Tensor:
        kernels = _kernels(x)
        if kernels is None:
            worthwhile = len(x) >= _PAIRED_ROWS and x.shape[1] <= _PAIRED_DIM and x.dtype == torch.float32
            if worthwhile and x.device.type == "cpu":
                return self._paired_distances(x)
            return _triangular_distances(x, self.precision_cholesky, self._shift)
        common, factors = self._halves
        out = x.new_empty(len(x), len(self.means))
        for rows in slices(len(x), _for(_SCREEN_ROWS, x)[1]):
            whitened = kernels.Halves.of(x[rows] @ common)
            out[rows] = kernels.distances(whitened, factors, self._shift, precise=True)
        return out

    def _paired_distances(self, x: Tensor) -> Tensor:
        """One product in place of K narrow ones: every distance is linear in the pairs x_i x_j and in x.

        Its rounding grows with |x|² instead of |x|: patches for which that would show are left to the factors P_k.
        """
        common, coefficients, constant, amplified, farthest = self._pairs
        white = torch.mm(common.T, x.T)  # patches as columns
        error = torch.finfo(x.dtype).eps * amplified * (white.square().sum(0) + farthest)
        rough = (error > 2 * _PAIRED_ERROR).nonzero().squeeze(1)
        if len(rough) > _SCREEN_SHARE * len(x):
            return _triangular_distances(x, self.precision_cholesky, self._shift)
        d, n = white.shape
        out = constant[:, None].repeat(1, n)
        room = x.new_empty(coefficients.shape[1], min(n, _PAIRED_ROWS))
        for rows in slices(n, _PAIRED_ROWS):
            some = white[:, rows]
            pairs = room[:, : some.shape[1]]
            for i, part in enumerate(torch.split(pairs[:-d], list(range(d, 0, -1)))):
                torch.mul(some[i:], some[i], out=part)
            pairs[-d:] = some
            out[:, rows].addmm_(coefficients, pairs)
        out = out.T.clamp_min_(0)
        if len(rough) > 0:
            out[rough] = _triangular_distances(x[rough], self.precision_cholesky, self._shift)
        return out

    def near_distances(self, x: Tensor, within: float) -> Tensor:
        """All distances in 16 bits first, where that is quick; in full precision those which that cannot rule out."""
        least, at_once = _for(_SCREEN_ROWS, x)
        worthwhile = len(x) >= least and x.shape[1] >= _SCREEN_DIM and x.dtype == torch.float32
        if not (worthwhile and _quick_in_bfloat16(x.device)):
            return self.mahalanobis(x)
        probe = self._near(self.mahalanobis(x[:: len(x) // 256]), within)
        if int(probe.count_nonzero()) > _SCREEN_SHARE * probe.numel():
            return self.mahalanobis(x)
        out = x.new_empty(len(x), len(self.means))
        for rows in slices(len(x), at_once):
            if not self._screen(x[rows], within, out[rows]):  # nor is it likely to work for the others
                out[rows.start :] = self.mahalanobis(x[rows.start :])
                break
        return out

    def _near(self, distances: Tensor, within: float) -> Tensor:
        surprise = distances + self.log_det  # -2 log N, but for a constant
        return surprise <= surprise.amin(1, keepdim=True) + 2 * within

    def _screen(self, x: Tensor, within: float, out: Tensor) -> bool:
        """Fill `out`, or say that 16 bits were too few."""
        kernels = _kernels(x)
        common, factors = self._bfloat16 if kernels is None else self._halves
        white = x @ common
        if kernels is None:
            out.copy_(_triangular_distances(white.bfloat16(), factors, self._shift.bfloat16()))
        else:
            white = kernels.Halves.of(white)
            out.copy_(kernels.distances(white, factors, self._shift, precise=False))
        rows, concepts, counts = _by_concept(self._near(out, within + 2 * _SCREEN_ERROR))
        if kernels is None:
            parts = zip(torch.split(rows, counts.tolist()), self.precision_cholesky, self._shift, strict=True)
            exact = torch.cat([torch.addmm(s, x[some], p, beta=-1).square_().sum(1) for some, p, s in parts])
        else:
            exact = kernels.distances_at(white, factors, self._shift, rows, counts)
        off = (out[rows, concepts] - exact).abs_() > 2 * _SCREEN_ERROR
        out[rows, concepts] = exact
        wrong = torch.unique(rows[off])  # patches far from all concepts, mostly
        if len(wrong) > _SCREEN_SHARE * len(x):
            return False
        if len(wrong) > 0:
            out[wrong] = self.mahalanobis(x[wrong])
        return True

    # x P_k = (x P̄)(P̄⁻¹ P_k) with P̄ the mean of all P_k. The right factors are triangular as well, with the identity as their
    # mean, and x P̄ has much the same spread in every direction: few digits are then enough, which is not so for P_k if x has
    # wide and narrow directions.

    @cached_property
    def _common(self) -> tuple[Tensor, Tensor]:
        """P̄ and its inverse, float64."""
        common = self.precision_cholesky.mean(0, dtype=torch.float64)
        return common, _inverse_of_lower(common.mT).mT

    @cached_property
    def _pairs(self) -> tuple[Tensor, Tensor, Tensor, float, float]:
        """P̄, coefficients of pairs and of single dimensions, constants; and what an error is at most multiplied by.

        With y = x P̄, m_k = μ_k P̄ and Q_k = P̄⁻¹ P_k P_kᵀ P̄⁻ᵀ a distance is (y - m_k) Q_k (y - m_k)ᵀ.
        """
        common, inverse = self._common
        factors = inverse @ self.precision_cholesky.double()
        precision = factors @ factors.mT
        centres = self.means.double() @ common
        scaled = torch.einsum("kd,kde->ke", centres, precision)
        i, j = torch.triu_indices(*precision.shape[1:])
        coefficients = torch.cat([precision[:, i, j] * torch.where(i == j, 1.0, 2.0), -2 * scaled], 1)
        # Σ_ij |y_i Q_ij y_j| ≤ |y|² · the largest row sum of |Q|, and (|y| + |m|)² ≤ 2 |y|² + 2 |m|².
        amplified = 2 * float(precision.abs().sum(2).max())
        dtype = self.means.dtype
        return (
            common.to(dtype), coefficients.to(dtype), (scaled * centres).sum(1).to(dtype),
            amplified, float(centres.square().sum(1).max()),
        )  # fmt: skip

    @cached_property
    def _bfloat16(self) -> tuple[Tensor, Tensor]:
        """P̄, and P̄⁻¹ P_k in bfloat16."""
        common, inverse = (part.to(self.means.dtype) for part in self._common)
        relative = torch.zeros_like(self.precision_cholesky, dtype=torch.bfloat16)
        for k, factor in enumerate(self.precision_cholesky):
            for columns in slices(len(factor), 128):
                above = slice(0, columns.stop)
                relative[k, above, columns] = inverse[above, above] @ factor[above, columns]
        return common, relative

    @cached_property
    def _halves(self) -> tuple[Tensor, Any]:
        """P̄, and P̄⁻¹ P_k as the kernels read them."""
        kernels, (common, inverse) = _kernels(self.means), self._common
        assert kernels is not None
        some = slices(len(self.means), _for(_FACTORED, common))
        parts = [kernels.triangles(inverse @ self.precision_cholesky[concepts].double()) for concepts in some]
        high, low = (torch.cat(half) for half in zip(*parts, strict=True))
        return common.to(self.means.dtype), kernels.Halves(high, low)

    def empty_sums(self) -> Sums:
        k, d = self.means.shape
        return {"weight": self._zeros(k), "first": self._zeros(k, d), "second": self._zeros(k, d, d)}

    def _accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None:
        # Each concept's patches are centred on its present mean, since float32 products around a distant origin
        # would lose the covariance; the sums themselves are around the common origin and therefore add up.
        kernels = _kernels(x)
        rows, concepts, counts = _by_concept(r != 0)
        weights, means = r[rows, concepts], self.means.double()
        weight = r.sum(0, dtype=torch.float64)
        if kernels is None:
            first = torch.zeros_like(means)
            parts = zip(torch.split(rows, counts.tolist()), torch.split(weights, counts.tolist()), strict=True)
            for k, (some, part) in enumerate(parts):
                if len(some) == 0:
                    continue
                root = part.sqrt()
                centred = x[some].sub_(self.means[k]).mul_(root[:, None])
                first[k] = root @ centred
                sums["second"][k].add_(centred.T @ centred)
        else:
            first = torch.mm(r.T, x).double() - weight[:, None] * means
            kernels.add_scatter(x, self.means, rows, concepts, counts, weights, sums["second"])
        sums["weight"].add_(weight)
        sums["first"].add_(first + weight[:, None] * means)
        # Σ r x xᵀ = Σ r (x-μ)(x-μ)ᵀ + f μᵀ + μ fᵀ + n μ μᵀ, with f = Σ r (x-μ)
        half = first + weight[:, None] / 2 * means
        sums["second"].baddbmm_(torch.stack([half, means], 2), torch.stack([means, half], 1))

    def maximise(self, sums: Sums, prior: Prior) -> FullGaussians:
        means = self._new_means(sums)
        factors = torch.empty_like(self.precision_cholesky)
        total = (sums["weight"] + prior.strength)[:, None, None]
        for some in slices(len(means), _for(_FACTORED, means)):
            weighted = means[some] * sums["weight"][some, None]
            covariance = torch.baddbmm(sums["second"][some], weighted[:, :, None], means[some][:, None], alpha=-1)
            covariance.add_(prior.covariance, alpha=prior.strength).div_(total[some])
            known = total[some] > 0
            if not bool(known.all()):  # neither patches nor a prior: such a concept stays as it is
                covariance = torch.where(known, covariance, torch.eye(means.shape[1]).to(covariance))
            fresh = _precision_cholesky(covariance).to(factors.dtype)
            factors[some] = torch.where(known, fresh, self.precision_cholesky[some])
        return FullGaussians(means.to(self.means.dtype), factors)

    def log_prior(self, prior: Prior) -> float:
        if not prior.strength:
            return 0.0
        root = torch.linalg.cholesky(prior.covariance).mT.to(self.means.dtype)
        spread = self.log_det.sum(dtype=torch.float64)
        for some in slices(len(self.means), _for(_FACTORED, root)):
            spread = spread + (root @ self.precision_cholesky[some]).square_().sum(dtype=torch.float64)
        return -prior.strength / 2 * float(spread)

    def covariances(self) -> Tensor:
        return torch.stack([_covariance(factor) for factor in self.precision_cholesky])

    def tensors(self) -> dict[str, Tensor]:
        return {"means": self.means, "precision_cholesky": self.precision_cholesky}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> FullGaussians:
        return cls(tensors["means"], tensors["precision_cholesky"])


class TiedGaussians(Gaussians):
    """One covariance shared by all concepts."""

    name = "tied"

    def __init__(self, means: Tensor, precision_cholesky: Tensor):
        self.means = means
        self.precision_cholesky = precision_cholesky  # P (d, d)
        log_det = -2 * precision_cholesky.diagonal().double().log().sum()
        self.log_det = log_det.to(means.dtype).expand(len(means))

    @classmethod
    def seed(cls, means: Tensor, covariance: Tensor, rank: int) -> TiedGaussians:
        return cls(means, _precision_cholesky(covariance).to(means.dtype))

    def mahalanobis(self, x: Tensor) -> Tensor:
        centres = self.means @ self.precision_cholesky
        # Whitened distances by one product; taken from a concept in the middle to keep the terms small. Not from the mean of
        # all: empty ones may be far away.
        middle = centres[centres.square().sum(1).argmin()]
        white, centres = x @ self.precision_cholesky - middle, centres - middle
        squares = white.square().sum(1, keepdim=True) + centres.square().sum(1)
        return torch.addmm(squares, white, centres.T, alpha=-2).clamp_min_(0)

    def contrasts(self, x: Tensor, within: float) -> Tensor:
        """|P x - P μ_k|² - |P x|² is linear in x: no patch has to be whitened."""
        coefficients, constant = self._linear
        return torch.addmm(constant, x, coefficients, alpha=-2)

    @cached_property
    def _linear(self) -> tuple[Tensor, Tensor]:
        """Σ⁻¹ (μ_k - μ) (d, K) and the constants that go with it, both seen from a concept μ in the middle."""
        factor = self.precision_cholesky.double()
        centres = self.means.double() @ factor
        middle = centres[centres.square().sum(1).argmin()]
        constant = centres.square().sum(1) - middle.square().sum()
        return (factor @ (centres - middle).T).to(self.means.dtype), constant.to(self.means.dtype)

    def empty_sums(self) -> Sums:
        k, d = self.means.shape
        return {"weight": self._zeros(k), "first": self._zeros(k, d), "second": self._zeros(d, d)}

    def _accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None:
        sums["weight"].add_(r.sum(0))
        sums["first"].add_(weighted_sums(r, x.shape[1])(x))
        rooted = x * r.sum(1, keepdim=True).sqrt()
        sums["second"].add_(rooted.T @ rooted)

    def maximise(self, sums: Sums, prior: Prior) -> TiedGaussians:
        means, weight = self._new_means(sums), sums["weight"]
        used = torch.where(weight[:, None] > 0, means, torch.zeros_like(means))
        scatter = sums["second"] - (used * weight[:, None]).T @ used
        strength = len(means) * prior.strength
        covariance = (scatter + strength * prior.covariance) / (weight.sum() + strength)
        return TiedGaussians(means.to(self.means.dtype), _precision_cholesky(covariance).to(self.means.dtype))

    def log_prior(self, prior: Prior) -> float:
        factor = self.precision_cholesky.double()
        spread = torch.einsum("de,df,fe->", factor, prior.covariance, factor)
        return -prior.strength / 2 * float(self.log_det.double().sum() + len(self.means) * spread)

    def covariances(self) -> Tensor:
        return _covariance(self.precision_cholesky)

    def tensors(self) -> dict[str, Tensor]:
        return {"means": self.means, "precision_cholesky": self.precision_cholesky}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> TiedGaussians:
        return cls(tensors["means"], tensors["precision_cholesky"])


def _precision_cholesky(covariance: Tensor) -> Tensor:
    """P upper triangular with P Pᵀ = Σ⁻¹, float64; reads the lower half of Σ. One matrix, or several.

    Sums of float32 products can leave less than nothing of a direction that is much narrower than the others. Such a Σ is
    widened by as little as makes it positive.
    """
    lower, failed = torch.linalg.cholesky_ex(covariance)
    for least in _WIDENED if bool(failed.any()) else ():
        ridge = torch.where(failed > 0, least * covariance.diagonal(dim1=-2, dim2=-1).mean(-1), 0.0)
        wider = covariance + torch.diag_embed(ridge[..., None].expand(covariance.shape[:-1]))
        lower, failed = torch.linalg.cholesky_ex(wider)
        if not bool(failed.any()):
            break
    if bool(failed.any()) or not bool(torch.isfinite(lower[..., -1, :]).all()):
        raise ValueError(NOT_POSITIVE)
    return _inverse_of_lower(lower).mT.contiguous()


def _inverse_of_lower(lower: Tensor) -> Tensor:
    """L⁻¹ by halves, which spares the products with the zeros above the diagonal."""
    n = lower.shape[-1]
    if n <= 128:
        inverse: Tensor = torch.linalg.solve_triangular(
            lower, torch.eye(n, dtype=lower.dtype, device=lower.device), upper=False
        )
        return inverse
    half = n // 2
    first, second = _inverse_of_lower(lower[..., :half, :half]), _inverse_of_lower(lower[..., half:, half:])
    whole = torch.zeros_like(lower)
    whole[..., :half, :half], whole[..., half:, half:] = first, second
    whole[..., half:, :half] = -second @ (lower[..., half:, :half] @ first)
    return whole


def _covariance(precision_cholesky: Tensor) -> Tensor:
    """Σ = (P Pᵀ)⁻¹ = P⁻ᵀ P⁻¹."""
    inverse = _inverse_of_lower(precision_cholesky.double().mT)
    return inverse @ inverse.mT


def _triangular_distances(x: Tensor, factors: Tensor, shifts: Tensor) -> Tensor:
    """‖x P_k - s_k‖² as (n, K), by blocks of columns, added up in float32 or better.

    P_k is upper triangular: a block needs only the rows above its end, about half the product. One concept's narrow blocks
    would be slow; several concepts' are taken side by side.
    """
    k, d = shifts.shape
    height, width, together = _for(_BLOCK, x)
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


def _by_concept(chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns of the entries of (n, K) that are true, by column, and how many there are of each."""
    places = chosen.T.flatten().nonzero().squeeze(1)
    return places % len(chosen), places // len(chosen), chosen.sum(0)


def _for(table: Mapping[str, T], tensor: Tensor) -> T:
    return table.get(tensor.device.type, table["cuda"])


def _quick_in_bfloat16(device: torch.device) -> bool:
    """Whether such products are much quicker than float32: on tensor cores, and CPUs with instructions for bfloat16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # older versions cannot tell
    return device.type == "cpu" and bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _kernels(x: Tensor) -> ModuleType | None:
    """The kernels in fused.py, where they can run and pay."""
    if (
        x.device.type != "cuda"
        or x.dtype != torch.float32
        or x.shape[1] < _FUSED_DIM
        or not _quick_in_bfloat16(x.device)
    ):
        return None
    try:
        from pace.model.gaussians import fused
    except ImportError:  # torch comes without Triton on some platforms
        return None
    return fused if fused.usable(x.device) else None
