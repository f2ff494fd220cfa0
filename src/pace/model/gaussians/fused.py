"""Distances and scatter of full covariances as Triton kernels, for NVIDIA GPUs.

What torch would write to memory between a product and the sum over it stays on the chip, and halves of matrices that are zero
or known by symmetry are not computed.

Products are float16 with float32 sums. Numbers are scaled to about 1 first, so float16 has the digits of TF32 at twice its
speed. Where that is too few, a number is the sum of two: `high`, and in `low` the remainder, 22 bits together. In 768
dimensions a log-density is off by up to 0.07 nats with `high` alone and by less than 0.001 with both, as in float32; an entry
of a scatter by at most 2⁻¹¹ of the product of its standard deviations, and by less the more patches it sums.
"""

from __future__ import annotations

from functools import cache
from math import gcd

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn.functional import pad

from pace.model.gaussians.family import by_concept, common_factor, slices
from pace.model.triton_support import on_its_gpu, succeeds

TILE = 128  # columns in a tile; matrices are padded with zeros to whole tiles
LARGEST = torch.finfo(torch.float16).max

# Rows, columns and depth of a tile of distances, warps and stages: with `high` alone, and with both.
DISTANCES = {False: (128, 256, 64, 8, 4), True: (128, 256, 32, 8, 3)}
_BAND = 128  # tiles of rows that meet all concepts before the next ones do: about what the second-level cache holds

# Rows a scatter prepares at once, how many it sums up before their sum is rounded, depth, warps and stages. Tensor cores cut
# digits off where other sums round, which would add up.
SCATTER = (1 << 20, 4096, 64, 8, 4)
_PREPARED = 32  # rows of a block in which they are prepared


Halves = tuple[Tensor, Tensor]  # high and low: two of float16 that add up to a matrix, or to several


@cache
def usable(device: torch.device) -> bool:
    """Whether Triton can compile for this GPU, which also takes a C compiler; warns if it cannot."""

    def work() -> None:
        zeros = torch.zeros(1, TILE, device=device)
        distances = Distances(zeros, torch.eye(TILE, device=device)[None])
        distances.precise(distances.read(zeros))

    return succeeds(work, f"full covariances are slower on {device} than they could be")


def _halves(values: Tensor) -> Halves:
    """Pads the last dimension to whole tiles. What float16 cannot hold is cut off at its largest number."""
    values = pad(values.clamp(-LARGEST, LARGEST), (0, -values.shape[-1] % TILE))
    high = values.half()
    return high, (values - high).half()


class Distances:
    """‖x P_k - s_k‖² of patches x, with s_k = μ_kᵀ P_k. The same methods as in dense.py; `rough` uses `high` alone."""

    screened_from = 4096  # patches, from which `rough` pays

    def __init__(self, means: Tensor, factors: Tensor):
        below = -means.shape[1] % TILE
        self._means = means.contiguous()
        self._shift = pad(torch.bmm(means[:, None], factors).squeeze(1), (0, below))
        common, inverse = common_factor(factors)
        self._common = common.to(means.dtype)
        relative = [_halves(pad(inverse @ some.double(), (0, 0, 0, below))) for some in torch.split(factors, 100)]
        self._factors = [torch.cat(half) for half in zip(*relative, strict=True)]

    def read(self, x: Tensor) -> Halves:
        return _halves(x @ self._common)

    def precise(self, x: Halves) -> Tensor:
        return self._all(x, precise=True)

    def rough(self, x: Halves) -> Tensor:
        return self._all(x, precise=False)

    def _all(self, x: Halves, precise: bool) -> Tensor:
        n, k = len(x[0]), len(self._means)
        out = torch.empty(n, k, device=self._means.device)
        tiles = triton.cdiv(n, DISTANCES[precise][0])
        band = min(_BAND, tiles)
        self._launch(triton.cdiv(tiles, band) * band * k, x, out, precise, band)
        return out

    def precise_at(self, x: Halves, rows: Tensor, counts: Tensor) -> Tensor:
        out = torch.empty(len(rows), device=self._means.device)
        tiles = _tiles(counts, len(rows), DISTANCES[True][0])
        self._launch(len(tiles[0]), x, out, True, 1, (rows, *tiles))
        return out

    def _launch(
        self, grid: int, x: Halves, out: Tensor, precise: bool, band: int, listed: tuple[Tensor, ...] = ()
    ) -> None:
        height, width, depth, warps, stages = DISTANCES[precise]
        n, wide = x[0].shape
        width = gcd(width, wide)
        stages = _fitting(stages, (height + width) * depth * (2 if precise else 1), out)
        with on_its_gpu(out):
            _distances_kernel[(grid,)](
                *x, *self._factors, self._shift, out, *(listed or (out,) * 4), n, len(self._means), band,
                WIDE=wide, PRECISE=precise, LISTED=bool(listed), HEIGHT=height, WIDTH=width, DEPTH=depth,
                num_warps=warps, num_stages=stages,
            )  # fmt: skip

    def scatter(self, x: Tensor, r: Tensor, out: Tensor) -> Tensor:
        rows, concepts, counts = by_concept(r != 0)
        if len(rows):
            out.add_(self._scatter(x.contiguous(), rows, concepts, counts, r[rows, concepts].sqrt()))
        return torch.mm(r.T, x).double() - r.sum(0, dtype=torch.float64)[:, None] * self._means.double()

    def _scatter(self, x: Tensor, rows: Tensor, concepts: Tensor, counts: Tensor, roots: Tensor) -> Tensor:
        at_once, run, depth, warps, stages = SCATTER
        means, (n, d) = self._means, x.shape
        wide = d + -d % TILE
        # No entry is then above √n + 256 times the root of a weight, which float16 holds.
        scale = torch.maximum(torch.linalg.vector_norm(x, dim=0) / n**0.5, means.abs().amax(0) / 256).clamp_min_(1e-30)
        scale = pad(scale, (0, wide - d), value=1.0)
        room = torch.empty(min(at_once, len(rows)), wide, dtype=torch.float16, device=x.device)
        out = torch.empty(len(means), wide, wide, device=x.device)
        stages = _fitting(stages, 2 * TILE * depth, x)
        left, right = torch.triu_indices(wide // TILE, wide // TILE, device=x.device).to(torch.int32)
        stops = counts.cumsum(0)
        for some in slices(len(rows), at_once):
            size = some.stop - some.start
            first, last = ((place - some.start).clamp_(0, size) for place in (stops - counts, stops))
            with on_its_gpu(x):
                _prepare_kernel[(triton.cdiv(size, _PREPARED), wide // TILE)](
                    x, means, scale, roots[some], rows[some], concepts[some], room, size, d,
                    WIDE=wide, ROWS=_PREPARED, TILE=TILE,
                )  # fmt: skip
                _scatter_kernel[(len(left), len(counts))](
                    room, scale, left, right, first, last, out, FRESH=some.start == 0,
                    WIDE=wide, RUN=run, TILE=TILE, DEPTH=depth, num_warps=warps, num_stages=stages,
                )  # fmt: skip
        return out[:, :d, :d]


def _fitting(stages: int, numbers: int, tensor: Tensor) -> int:
    """As many of the stages, each with so many float16, as the GPU's shared memory holds."""
    if not tensor.is_cuda:
        return stages
    room = torch.cuda.get_device_properties(tensor.device).shared_memory_per_block_optin
    return max(1, min(stages, room // (2 * numbers)))


def _tiles(counts: Tensor, total: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Concept, start and stop of pieces of at most `size` rows of one concept; as many as there could be, the last ones empty.

    How many there are would be known only after waiting for the GPU.
    """
    pieces, stops = (counts + size - 1) // size, counts.cumsum(0)
    last = pieces.cumsum(0)
    number = torch.arange(total // size + len(counts), device=counts.device)
    concept = torch.searchsorted(last, number, right=True).clamp_max_(len(counts) - 1)
    start = (stops - counts)[concept] + (number - (last - pieces)[concept]) * size
    return concept, start, torch.minimum(start + size, stops[concept])


# Row counts change from call to call and are not worth a compilation each.
@triton.jit(do_not_specialize=["n", "n_concepts", "band"])  # type: ignore[untyped-decorator]
def _distances_kernel(  # type: ignore[no-untyped-def]
    high, low, factor_high, factor_low, shifts, out, rows, concepts, starts, stops, n, n_concepts, band,
    WIDE: tl.constexpr, PRECISE: tl.constexpr, LISTED: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Some rows under one concept: one tile of columns after the other, a product with what is above its end, then squares."""
    program = tl.program_id(0)
    if LISTED:
        concept = tl.load(concepts + program)
        start, stop = tl.load(starts + program), tl.load(stops + program)
        place = start + tl.arange(0, HEIGHT)
        row = tl.load(rows + place, mask=place < stop, other=0)
        target = out + place
    else:
        concept = (program % (band * n_concepts) // band).to(tl.int64)
        start, stop = (program // (band * n_concepts) * band + program % band).to(tl.int64) * HEIGHT, n
        place = start + tl.arange(0, HEIGHT)
        row = tl.minimum(place, n - 1)
        target = out + place * n_concepts + concept
    if start >= stop:
        return
    total = tl.zeros((HEIGHT,), tl.float32)
    for first in range(0, WIDE, WIDTH):
        columns = first + tl.arange(0, WIDTH)
        z = tl.zeros((HEIGHT, WIDTH), tl.float32)
        for above in range(0, first + WIDTH, DEPTH):
            inner = above + tl.arange(0, DEPTH)
            at = row[:, None] * WIDE + inner[None, :]
            of = concept * WIDE * WIDE + inner[:, None] * WIDE + columns[None, :]
            patches, factor = tl.load(high + at), tl.load(factor_high + of)
            z = tl.dot(patches, factor, z)
            if PRECISE:
                z = tl.dot(patches, tl.load(factor_low + of), z)
                z = tl.dot(tl.load(low + at), factor, z)
        z -= tl.load(shifts + concept * WIDE + columns)[None, :]
        total += tl.sum(z * z, 1)
    tl.store(target, total, mask=place < stop)


@triton.jit(do_not_specialize=["size"])  # type: ignore[untyped-decorator]
def _prepare_kernel(  # type: ignore[no-untyped-def]
    x, means, scale, roots, rows, concepts, room, size, d, WIDE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):
    """(x_i - μ_k) √w_i / scale, as float16."""
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside, known = place < size, columns < d
    row, concept = tl.load(rows + place, mask=inside, other=0), tl.load(concepts + place, mask=inside, other=0)
    both = inside[:, None] & known[None, :]
    values = tl.load(x + row[:, None] * d + columns[None, :], mask=both, other=0.0)
    values -= tl.load(means + concept[:, None] * d + columns[None, :], mask=both, other=0.0)
    values /= tl.load(scale + columns)[None, :]
    values *= tl.load(roots + place, mask=inside, other=0.0)[:, None]
    tl.store(room + place[:, None] * WIDE + columns[None, :], values.to(tl.float16), mask=inside[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _scatter_kernel(  # type: ignore[no-untyped-def]
    room, scale, lefts, rights, starts, stops, out,
    FRESH: tl.constexpr, WIDE: tl.constexpr, RUN: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile of one concept's scatter, on or above the diagonal, and its mirror image; added up unless `FRESH`."""
    concept = tl.program_id(1).to(tl.int64)
    start, stop = tl.load(starts + concept), tl.load(stops + concept)
    left, right = tl.load(lefts + tl.program_id(0)), tl.load(rights + tl.program_id(0))
    across, down = left * TILE + tl.arange(0, TILE), right * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    for begin in range(start, stop, RUN):
        end = tl.minimum(begin + RUN, stop)
        part = tl.zeros((TILE, TILE), tl.float32)
        for first in range(begin, end, DEPTH):
            row = first + tl.arange(0, DEPTH)
            at, inside = room + row[:, None] * WIDE, row[:, None] < end
            one = tl.load(at + across[None, :], mask=inside, other=0.0)
            other = tl.load(at + down[None, :], mask=inside, other=0.0)
            part = tl.dot(tl.trans(one), other, part)
        total += part
    total *= tl.load(scale + across)[:, None] * tl.load(scale + down)[None, :]
    out += concept * WIDE * WIDE
    target = out + (across[:, None] * WIDE + down[None, :])
    if not FRESH:
        total += tl.load(target)
    tl.store(target, total)
    if left != right:
        tl.store(out + (down[:, None] * WIDE + across[None, :]), tl.trans(total))
