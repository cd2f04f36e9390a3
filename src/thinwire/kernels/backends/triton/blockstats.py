"""Statistics of blocks, and verdicts that stay on the device.

Sums are taken in float64, piece by piece and then over the pieces of a block, always in the same order: the same bits
in every run on the same kind of device, within one unit in the last place of the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.backends.reference import blockstats as reference
from thinwire.kernels.backends.triton.launch import launch
from thinwire.kernels.backends.triton.pieces import cut, finite, narrowed, place, widened
from thinwire.kernels.backends.triton.places import places

TILE = 2048
PARTS = 1024  # partial sums that are added at a time


@triton.jit(do_not_specialize=["pieces"])
def _statistics(
    x, owed, total, table, stretch_of, absmean, absmax, square, partial, pieces,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    stretch = tl.load(stretch_of + tile)
    length = place(table, stretch, 1)
    piece, block, inside, size = cut(tile, length, place(table, stretch, 2), BLOCK, WIDTH, ROWS)
    within = inside[:, None] + tl.arange(0, WIDTH)[None, :]
    there = within < size[:, None]
    at = place(table, stretch, 0) + (block * BLOCK)[:, None] + within
    value = tl.load(x + at, mask=there, other=0.0)
    if owed is not None:
        value += tl.load(owed + at, mask=there, other=0.0)
        tl.store(total + at, value, mask=there)
    WHOLE: tl.constexpr = partial is None
    number = place(table, stretch, 3) + block if WHOLE else place(table, stretch, 5) + piece
    real = inside < size
    if BLOCK == 0:
        real = real | (piece == 0)
    if absmean is not None:
        mean = tl.sum(tl.abs(value).to(tl.float64), axis=1)
        if WHOLE:
            tl.store(absmean + number, (mean / tl.maximum(size, 1).to(tl.float64)).to(tl.float32), mask=real)
        else:
            tl.store(partial + number, mean, mask=real)
    if absmax is not None:  # by the bits of |x|: a NaN is the largest
        most = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        if WHOLE:
            tl.store(absmax + number, most.to(tl.float32, bitcast=True), mask=real)
        else:
            tl.store(partial + pieces + number, most.to(tl.float64), mask=real)
    if square is not None:
        squares = tl.sum(value.to(tl.float64) * value.to(tl.float64), axis=1)
        if WHOLE:
            tl.store(square + number, squares.to(tl.float32), mask=real)
        else:
            tl.store(partial + 2 * pieces + number, squares, mask=real)


@triton.jit(do_not_specialize=["pieces"])
def _combine(
    partial, pieces, table, stretch_of, absmean, absmax, square,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program per block: its statistics from those of its pieces."""
    number = tl.program_id(0)
    stretch = tl.load(stretch_of + number)
    length, first = place(table, stretch, 1), place(table, stretch, 5)
    if BLOCK > 0:
        block = number - place(table, stretch, 3)
        first += block * ((BLOCK + WIDTH - 1) // WIDTH)
        length = tl.minimum(length - block * BLOCK, BLOCK)
    count = (length + WIDTH - 1) // WIDTH
    lane = tl.arange(0, PARTS)
    mean, most = tl.zeros((PARTS,), tl.float64), tl.zeros((PARTS,), tl.float64)
    squares = tl.zeros((PARTS,), tl.float64)
    for begin in range(0, count, PARTS):
        there = begin + lane < count
        at = partial + first + begin + lane
        if absmean is not None:
            mean += tl.load(at, mask=there, other=0.0)
        if absmax is not None:
            most = tl.maximum(most, tl.load(at + pieces, mask=there, other=0.0))
        if square is not None:
            squares += tl.load(at + 2 * pieces, mask=there, other=0.0)
    if absmean is not None:
        tl.store(absmean + number, (tl.sum(mean) / tl.maximum(length, 1).to(tl.float64)).to(tl.float32))
    if absmax is not None:
        tl.store(absmax + number, tl.max(most).to(tl.int32).to(tl.float32, bitcast=True))
    if square is not None:
        tl.store(square + number, tl.sum(squares).to(tl.float32))


def block_statistics(
    x: Tensor, starts: Tensor, block: int, *,
    absmean: Tensor | None = None, absmax: Tensor | None = None, square: Tensor | None = None,
    owed: Tensor | None = None, total: Tensor | None = None,
) -> None:  # fmt: skip
    if owed is None and absmean is absmax is square is None:
        return
    width = min(TILE, 1 << max(0, block - 1).bit_length()) if block else TILE
    rows, small = TILE // width, 0 < block <= TILE
    where = places(starts, block, x.device, width=width, rows=rows)
    partial = None if small else torch.empty(3 * where.pieces, dtype=torch.float64, device=x.device)
    outs = (absmean, absmax, square)
    launch(
        _statistics, where.tiles, x, owed, total if owed is not None else None, where.table, where.stretch, *outs,
        partial, where.pieces, BLOCK=block, WIDTH=width, ROWS=rows,
    )  # fmt: skip
    if not small and not absmean is absmax is square is None:
        launch(
            _combine, where.blocks, partial, where.pieces, where.table, where.block_stretch, *outs,
            BLOCK=block, WIDTH=width, PARTS=PARTS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def _judge(x, n, bad, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    fine = finite(tl.load(x + at, mask=at < n, other=0.0))
    if tl.min(fine.to(tl.int32), axis=0) == 0:
        tl.store(bad, 1)  # whoever writes writes the same


@triton.jit(do_not_specialize=["n"])
def _keep(kept, new, n, bad, TILE: tl.constexpr):
    if tl.load(bad) == 0:
        at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        value = widened(tl.load(new + at, mask=at < n, other=0.0))
        tl.store(kept + at, narrowed(value, kept.dtype.element_ty), mask=at < n)


def judged_bad(x: Tensor) -> Tensor:
    """int32[1] on the device: not 0 where x holds an Inf or a NaN."""
    bad = torch.zeros(1, dtype=torch.int32, device=x.device)
    launch(_judge, -(-x.numel() // TILE), x.contiguous(), x.numel(), bad, TILE=TILE)
    return bad


def all_finite(x: Tensor) -> bool:
    """The one operation that waits for the device."""
    return not bool(judged_bad(x).item())


def keep_finite_(kept: Tensor, new: Tensor, judged: Tensor) -> None:
    if not kept.is_contiguous():
        return reference.keep_finite_(kept, new, judged)
    n = kept.numel()
    launch(_keep, -(-n // TILE), kept, new.contiguous(), n, judged_bad(judged), TILE=TILE)
