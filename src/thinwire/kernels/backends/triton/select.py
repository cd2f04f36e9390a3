"""Top-k, exact: the k-th largest magnitude by three histograms over its bits, then the chosen places in order.

A magnitude is its 31 bits as an integer, all NaN one that is above Inf. Every count is an integer, so no order shows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.backends.memory import or_empty
from thinwire.kernels.backends.reference import sparse as reference
from thinwire.kernels.backends.triton.launch import launch

TILE = 2048
SPAN = 16  # tiles that a program counts before it adds to the histogram of all
DIGITS = ((20, 11), (10, 10), (0, 10))  # shift and bits of every pass, from the highest
STATE = 2  # the bits of the k-th magnitude that are known, and how many equals of it are still to be chosen


@triton.jit
def _magnitude(x, weight, at, n):
    value = tl.load(x + at, mask=at < n, other=0.0)
    if weight is not None:
        value = value * tl.load(weight + at, mask=at < n, other=0.0)
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(bits > 0x7F800000, 0x7FFFFFFF, bits)


@triton.jit(do_not_specialize=["n"])
def _count(
    x, weight, n, state, histogram, SHIFT: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr
):
    """How many magnitudes with the known high bits have each value of the next."""
    counts = tl.zeros((1 << BITS,), tl.int32)
    known = tl.load(state)
    for part in range(SPAN):
        at = (tl.program_id(0).to(tl.int64) * SPAN + part) * TILE + tl.arange(0, TILE)
        bits = _magnitude(x, weight, at, n)
        mine = at < n
        if SHIFT + BITS < 31:
            mine = mine & ((bits >> (SHIFT + BITS)) == (known >> (SHIFT + BITS)))
        counts += tl.histogram((bits >> SHIFT) & ((1 << BITS) - 1), 1 << BITS, mask=mine)
    tl.atomic_add(histogram + tl.arange(0, 1 << BITS), counts, mask=counts > 0)


@triton.jit
def _choose(histogram, state, SHIFT: tl.constexpr, BITS: tl.constexpr):
    """The next bits of the k-th magnitude: the highest bin that with all above it holds as many as are wanted."""
    bins = tl.arange(0, 1 << BITS)
    counts = tl.load(histogram + bins)
    wanted = tl.load(state + 1)
    above = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0)
    chosen = tl.max(tl.where(above + counts >= wanted, bins, 0), axis=0)
    taken = tl.sum(tl.where(bins == chosen, above, 0), axis=0)
    tl.debug_barrier()
    tl.store(state, tl.load(state) | (chosen << SHIFT))
    tl.store(state + 1, wanted - taken)


@triton.jit(do_not_specialize=["n"])
def _tally(x, weight, n, state, tallies, TILE: tl.constexpr):
    """How many of a tile are above the k-th magnitude, and how many equal it."""
    tile = tl.program_id(0).to(tl.int64)
    at = tile * TILE + tl.arange(0, TILE)
    bits, kth = _magnitude(x, weight, at, n), tl.load(state)
    tl.store(tallies + 2 * tile, tl.sum(((bits > kth) & (at < n)).to(tl.int32), axis=0))
    tl.store(tallies + 2 * tile + 1, tl.sum(((bits == kth) & (at < n)).to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["tiles"])
def sums_before(tallies, tiles, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """Each column of int32[tiles, COLUMNS] becomes the sums of what stood before; one program."""
    for column in tl.static_range(COLUMNS):
        total = tl.zeros((), tl.int32)
        for begin in range(0, tiles, PARTS):
            number = begin + tl.arange(0, PARTS)
            counts = tl.load(tallies + number * COLUMNS + column, mask=number < tiles, other=0)
            tl.store(tallies + number * COLUMNS + column, total + tl.cumsum(counts, 0) - counts, mask=number < tiles)
            total += tl.sum(counts, axis=0)


@triton.jit(do_not_specialize=["n"])
def _write(x, weight, n, state, tallies, out, TILE: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    at = tile * TILE + tl.arange(0, TILE)
    bits, kth, equals = _magnitude(x, weight, at, n), tl.load(state), tl.load(state + 1)
    above, equal = (bits > kth) & (at < n), (bits == kth) & (at < n)
    earlier = tl.load(tallies + 2 * tile + 1) + tl.cumsum(equal.to(tl.int32), 0) - equal.to(tl.int32)
    chosen = above | (equal & (earlier < equals))
    place = tl.load(tallies + 2 * tile) + tl.cumsum(above.to(tl.int32), 0) - above.to(tl.int32)
    tl.store(out + place + tl.minimum(earlier, equals), at.to(tl.int32), mask=chosen)


def top_k(
    x: Tensor, k: int, weight: Tensor | None = None, *, starts: Tensor | None = None,
    out: Tensor | None = None, owed: Tensor | None = None, total: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if starts is not None and starts.dim() == 2:  # what travels from a device has no gaps
        return reference.top_k(x, k, weight, starts=starts, out=out, owed=owed, total=total)
    if owed is not None:
        x = torch.add(x, owed, out=total)
    out, n = or_empty(out, k, torch.int32, like=x), x.numel()
    if k == 0:
        return out
    state = torch.zeros(STATE, dtype=torch.int32, device=x.device)
    state[1:].fill_(k)
    for shift, bits in DIGITS:
        histogram = torch.zeros(1 << bits, dtype=torch.int32, device=x.device)
        how = {"SHIFT": shift, "BITS": bits}
        launch(_count, -(-n // (TILE * SPAN)), x, weight, n, state, histogram, **how, TILE=TILE, SPAN=SPAN)
        launch(_choose, 1, histogram, state, **how)
    tiles = -(-n // TILE)
    tallies = torch.empty(2 * tiles, dtype=torch.int32, device=x.device)
    launch(_tally, tiles, x, weight, n, state, tallies, TILE=TILE)
    launch(sums_before, 1, tallies, tiles, COLUMNS=2, PARTS=1024)
    launch(_write, tiles, x, weight, n, state, tallies, out, TILE=TILE)
    return out
