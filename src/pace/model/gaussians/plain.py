"""Distances and scatter of full covariances in torch: for CPUs, and for GPUs without Triton."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from pace.model.gaussians.family import by_concept, slices
from pace.model.gaussians.triangular import common_factor

# Rows, columns of one concept and columns in all that are worked on together: small enough for a CPU's cache, large enough to
# fill a GPU.
BLOCK = {"cpu": (1024, 32, 384), "cuda": (1 << 16, 256, 512)}

# Distances from products of pairs of dimensions: up to so many dimensions, so many patches at once, and as long as no
# log-density is off by so much (nats).
_PAIRS_DIM, _PAIRS_ROWS, _PAIRS_ERROR = 96, 512, 1e-3


class Distances:
    """‖x P_k - s_k‖² of patches x, with s_k = μ_kᵀ P_k; `rough` has fewer digits."""

    screened_from = 8192  # patches, from which `rough` pays

    def __init__(self, means: Tensor, factors: Tensor):
        self._means, self._factors = means, factors
        self._shift = torch.bmm(means[:, None], factors).squeeze(1)
        on_cpu = means.device.type == "cpu"
        self.rows_at_once = 4096 if on_cpu else 1 << 16
        self.quick_when_rough = on_cpu and means.dtype == torch.float32 and _cpu_has_bfloat16()

    def read(self, x: Tensor) -> Tensor:
        """Patches as the other methods take them."""
        return x

    def precise(self, x: Tensor) -> Tensor:
        many = x.device.type == "cpu" and x.dtype == torch.float32 and len(x) >= _PAIRS_ROWS
        found = self._from_pairs(x) if many and x.shape[1] <= _PAIRS_DIM else None
        return triangular_distances(x, self._factors, self._shift) if found is None else found

    def rough(self, x: Tensor) -> Tensor:
        common, factors = self._bfloat16
        return triangular_distances((x @ common).bfloat16(), factors, self._shift.bfloat16())

    def precise_at(self, x: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        """Of the first counts[0] `rows` under concept 0, the next counts[1] under concept 1, …"""
        parts = zip(torch.split(rows, counts.tolist()), self._factors, self._shift, strict=True)
        return torch.cat([torch.addmm(s, x[some], p, beta=-1).square_().sum(1) for some, p, s in parts])

    def scatter(self, x: Tensor, r: Tensor, out: Tensor) -> Tensor:
        """Add Σ_i r_ik (x_i - μ_k)(x_i - μ_k)ᵀ to out (K, d, d); returns Σ_i r_ik (x_i - μ_k), float64."""
        rows, concepts, counts = by_concept(r != 0)
        weights = r[rows, concepts]
        first = self._means.new_zeros(self._means.shape, dtype=torch.float64)
        parts = zip(torch.split(rows, counts.tolist()), torch.split(weights, counts.tolist()), strict=True)
        for k, (some, part) in enumerate(parts):
            if len(some):
                root = part.sqrt()
                centred = x[some].sub_(self._means[k]).mul_(root[:, None])
                first[k] = root @ centred
                out[k].add_(centred.T @ centred)
        return first

    def _from_pairs(self, x: Tensor) -> Tensor | None:
        """One product in place of K narrow ones: every distance is linear in the pairs x_i x_j and in x.

        Nothing if rounding, which grows with |x|² instead of |x|, would show.
        """
        common, coefficients, constant, amplified, farthest = self._pairs
        white = torch.mm(common.T, x.T)  # patches as columns
        if torch.finfo(x.dtype).eps * amplified * float(white.square().sum(0).max() + farthest) > 2 * _PAIRS_ERROR:
            return None
        d, n = white.shape
        out = constant[:, None].repeat(1, n)
        room = x.new_empty(coefficients.shape[1], min(n, _PAIRS_ROWS))
        for rows in slices(n, _PAIRS_ROWS):
            some = white[:, rows]
            pairs = room[:, : some.shape[1]]
            for i, part in enumerate(torch.split(pairs[:-d], list(range(d, 0, -1)))):
                torch.mul(some[i:], some[i], out=part)
            pairs[-d:] = some
            out[:, rows].addmm_(coefficients, pairs)
        return out.T.clamp_min_(0)

    @cached_property
    def _pairs(self) -> tuple[Tensor, Tensor, Tensor, float, float]:
        """P̄, coefficients of pairs and of single dimensions, constants; and what multiplies a rounding error at most.

        With y = x P̄, m_k = μ_k P̄ and Q_k = P̄⁻¹ P_k P_kᵀ P̄⁻ᵀ a distance is (y - m_k) Q_k (y - m_k)ᵀ.
        """
        common, inverse = common_factor(self._factors)
        factors = inverse @ self._factors.double()
        precision = factors @ factors.mT
        centres = self._means.double() @ common
        scaled = torch.einsum("kd,kde->ke", centres, precision)
        i, j = torch.triu_indices(*precision.shape[1:])
        coefficients = torch.cat([precision[:, i, j] * torch.where(i == j, 1.0, 2.0), -2 * scaled], 1)
        # Σ_ij |y_i Q_ij y_j| ≤ |y|² · the largest row sum of |Q|, and (|y| + |m|)² ≤ 2 |y|² + 2 |m|².
        amplified, farthest = 2 * float(precision.abs().sum(2).max()), float(centres.square().sum(1).max())
        common, coefficients, constant = (
            part.to(self._means.dtype) for part in (common, coefficients, (scaled * centres).sum(1))
        )
        return common, coefficients, constant, amplified, farthest

    @cached_property
    def _bfloat16(self) -> tuple[Tensor, Tensor]:
        """P̄, and P̄⁻¹ P_k in bfloat16."""
        common, inverse = (part.to(self._means.dtype) for part in common_factor(self._factors))
        relative = torch.zeros_like(self._factors, dtype=torch.bfloat16)
        for k, factor in enumerate(self._factors):
            for columns in slices(len(factor), 128):
                above = slice(0, columns.stop)
                relative[k, above, columns] = inverse[above, above] @ factor[above, columns]
        return common, relative


def triangular_distances(x: Tensor, factors: Tensor, shifts: Tensor) -> Tensor:
    """‖x P_k - s_k‖² as (n, K), added up in float32 or better.

    P_k is upper triangular: a block of columns needs only the rows above its end, about half the product. One concept's
    narrow blocks would be slow, so several concepts' are taken side by side.
    """
    k, d = shifts.shape
    height, width, together = BLOCK.get(x.device.type, BLOCK["cuda"])
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
