"""Covariances with all their entries: one for every concept, or one for all."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from pace.model.gaussians.family import NOT_POSITIVE, Gaussians, Prior, Sums, slices, weighted_sums

# Rows, columns of one concept and columns in all that are worked on together: small enough to stay in a CPU's cache, large
# enough to fill a GPU.
_BLOCK = {"cpu": (1024, 32, 384), "cuda": (1 << 16, 256, 512)}

# The screen of `near_distances`: from how many dimensions it pays, up to which share of near entries, how far off the
# log-density of one may be (nats), and how many rows are screened at once by device.
_SCREEN_DIM, _SCREEN_SHARE, _SCREEN_ERROR = 256, 1 / 8, 2.0
_SCREEN_ROWS = {"cpu": 4096, "cuda": 1 << 16}


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
        return _triangular_distances(x, self.precision_cholesky, self._shift)

    def near_distances(self, x: Tensor, within: float) -> Tensor:
        """All distances in bfloat16 first, where that is quick; in full precision those which that cannot rule out."""
        rows_at_once = _SCREEN_ROWS.get(x.device.type, _SCREEN_ROWS["cuda"])
        worthwhile = len(x) >= 2 * rows_at_once and x.shape[1] >= _SCREEN_DIM and x.dtype == torch.float32
        if not (worthwhile and _quick_in_bfloat16(x.device)):
            return self.mahalanobis(x)
        probe = self._near(self.mahalanobis(x[:: len(x) // 256]), within)
        if int(probe.count_nonzero()) > _SCREEN_SHARE * probe.numel():
            return self.mahalanobis(x)
        out = x.new_empty(len(x), len(self.means))
        for rows in slices(len(x), rows_at_once):
            if not self._screen(x[rows], within, out[rows]):  # nor is it likely to work for the others
                out[rows.start :] = self.mahalanobis(x[rows.start :])
                break
        return out

    def _near(self, distances: Tensor, within: float) -> Tensor:
        surprise = distances + self.log_det  # -2 log N, but for a constant
        return surprise <= surprise.amin(1, keepdim=True) + 2 * within

    def _screen(self, x: Tensor, within: float, out: Tensor) -> bool:
        """Fill `out`, or say that bfloat16 was too far off."""
        common, factors, shift = self._relative
        out.copy_(_triangular_distances((x @ common).bfloat16(), factors, shift))
        worst = x.new_zeros(())
        for k, near in enumerate(self._near(out, within + 2 * _SCREEN_ERROR).T.contiguous()):
            rows = near.nonzero().squeeze(1)
            if len(rows) == 0:
                continue
            exact = torch.addmm(self._shift[k], x[rows], self.precision_cholesky[k], beta=-1).square_().sum(1)
            worst = torch.maximum(worst, (out[rows, k] - exact).abs_().max())
            out[rows, k] = exact
        return bool(worst <= 2 * _SCREEN_ERROR)

    @cached_property
    def _relative(self) -> tuple[Tensor, Tensor, Tensor]:
        """P̄, the mean of all P_k, and P̄⁻¹ P_k and the shifts in bfloat16.

        x P_k = (x P̄)(P̄⁻¹ P_k). The right factors are triangular as well, with the identity as their mean, and x P̄ has much the
        same spread in every direction: few digits are then enough, which is not so for P_k if x has wide and narrow directions.
        """
        common = self.precision_cholesky.mean(0)
        inverse = _inverse_of_lower(common.double().mT).mT.to(common.dtype)
        relative = torch.zeros_like(self.precision_cholesky, dtype=torch.bfloat16)
        for k, factor in enumerate(self.precision_cholesky):
            for columns in slices(len(factor), 128):
                above = slice(0, columns.stop)
                relative[k, above, columns] = inverse[above, above] @ factor[above, columns]
        return common, relative, self._shift.bfloat16()

    def empty_sums(self) -> Sums:
        k, d = self.means.shape
        return {"weight": self._zeros(k), "first": self._zeros(k, d), "second": self._zeros(k, d, d)}

    def _accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None:
        # Each concept's patches are centred on its present mean, since float32 products around a distant origin
        # would lose the covariance; the sums themselves are around the common origin and therefore add up.
        for k, weights in enumerate(r.T.contiguous()):
            rows = weights.nonzero().squeeze(1)
            if len(rows) == 0:
                continue
            root = weights[rows].sqrt()
            centred = x[rows].sub_(self.means[k]).mul_(root[:, None])
            mean, first = self.means[k].double(), (root @ centred).double()
            weight = root.double().square().sum()
            sums["weight"][k] += weight
            sums["first"][k] += first + weight * mean
            # Σ r x xᵀ = Σ r (x-μ)(x-μ)ᵀ + f μᵀ + μ fᵀ + n μ μᵀ, with f = Σ r (x-μ)
            half = first + weight / 2 * mean
            sums["second"][k].add_(centred.T @ centred).addr_(half, mean).addr_(mean, half)

    def maximise(self, sums: Sums, prior: Prior) -> FullGaussians:
        means = self._new_means(sums)
        factors = torch.empty_like(self.precision_cholesky)
        for k, weight in enumerate(sums["weight"]):
            if weight + prior.strength <= 0:
                factors[k] = self.precision_cholesky[k]
                continue
            covariance = prior.strength * prior.covariance
            if weight > 0:
                covariance.add_(sums["second"][k]).addr_(means[k], means[k], alpha=-float(weight))
            covariance.div_(weight + prior.strength)
            factors[k] = _precision_cholesky(covariance).to(factors.dtype)
        return FullGaussians(means.to(self.means.dtype), factors)

    def log_prior(self, prior: Prior) -> float:
        if not prior.strength:
            return 0.0
        root = torch.linalg.cholesky(prior.covariance).mT.to(self.means.dtype)
        spread = sum(float((root @ factor).square().sum()) for factor in self.precision_cholesky)
        return -prior.strength / 2 * (float(self.log_det.double().sum()) + spread)

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
        # Whitened distances by one product; taken from the concepts' own centre to keep the terms small.
        middle = centres.mean(0)
        white, centres = x @ self.precision_cholesky - middle, centres - middle
        squares = white.square().sum(1, keepdim=True) + centres.square().sum(1)
        return torch.addmm(squares, white, centres.T, alpha=-2).clamp_min_(0)

    def empty_sums(self) -> Sums:
        k, d = self.means.shape
        return {"weight": self._zeros(k), "first": self._zeros(k, d), "second": self._zeros(d, d)}

    def _accumulate(self, x: Tensor, r: Tensor, sums: Sums) -> None:
        sums["weight"].add_(r.sum(0))
        sums["first"].add_(weighted_sums(r, x))
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
    """P upper triangular with P Pᵀ = Σ⁻¹, float64; reads the lower half of Σ."""
    lower, failed = torch.linalg.cholesky_ex(covariance)
    if failed or not bool(torch.isfinite(lower[-1]).all()):
        raise ValueError(NOT_POSITIVE)
    return _inverse_of_lower(lower).mT.contiguous()


def _inverse_of_lower(lower: Tensor) -> Tensor:
    """L⁻¹ by halves, which spares the products with the zeros above the diagonal."""
    n = len(lower)
    if n <= 128:
        inverse: Tensor = torch.linalg.solve_triangular(
            lower, torch.eye(n, dtype=lower.dtype, device=lower.device), upper=False
        )
        return inverse
    half = n // 2
    first, second = _inverse_of_lower(lower[:half, :half]), _inverse_of_lower(lower[half:, half:])
    whole = torch.zeros_like(lower)
    whole[:half, :half], whole[half:, half:] = first, second
    whole[half:, :half] = -second @ (lower[half:, :half] @ first)
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
    height, width, together = _BLOCK.get(x.device.type, _BLOCK["cuda"])
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
                out[rows, concepts] += torch.linalg.vector_norm(parts, dim=2).square_()
    return out


def _quick_in_bfloat16(device: torch.device) -> bool:
    """Whether products in bfloat16 are much quicker than in float32: on tensor cores, and CPUs with instructions for them."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()  # older versions cannot tell
    return device.type == "cpu" and bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
