"""What several kernels begin or end with: a tile's pieces, floats of other widths, random draws."""

from __future__ import annotations

import triton
import triton.language as tl

FIELDS = tl.constexpr(6)  # as in `places`
TINY = tl.constexpr(2.0**-120)  # as `SMALLEST` of `reference.quantize`


@triton.jit
def place(table, stretch, FIELD: tl.constexpr):
    return tl.load(table + stretch * FIELDS + FIELD)


@triton.jit
def cut(tile, length, first_tile, BLOCK: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """For every piece of a tile: its number in the stretch, its block's, its place in the block, the block's length."""
    piece = (tile - first_tile) * ROWS + tl.arange(0, ROWS)
    if BLOCK == 0:
        return piece, piece * 0, piece * WIDTH, piece * 0 + length
    PER: tl.constexpr = (BLOCK + WIDTH - 1) // WIDTH
    block = piece // PER
    return piece, block, (piece - block * PER) * WIDTH, tl.minimum(length - block * BLOCK, BLOCK)


@triton.jit
def finite(x):
    """By the bits: no compiler may assume that there are no NaN."""
    return (widened(x).to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000


@triton.jit
def widened(x):
    """float32 of any float of at most 32 bits."""
    if x.dtype == tl.bfloat16:  # by the bits, as in `narrowed`
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def narrowed(x, dtype: tl.constexpr):
    """float32 rounded to the nearest even of a dtype. bfloat16 by the bits: Triton's interpreter cuts them off."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def effective(ranges):
    """The ranges as they count: 0 where too small, NaN where not finite."""
    return tl.where(finite(ranges), tl.where(ranges < TINY, 0.0, ranges), float("nan"))


@triton.jit
def scrambled(key):
    """One round of splitmix64."""
    key = key.to(tl.uint64, bitcast=True) + 0x9E3779B97F4A7C15
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB
    return key ^ (key >> 31)


@triton.jit
def random_bits(key, counter):
    """`random_u32` of a scrambled key; counters are uint32."""
    x = counter * ((key >> 32).to(tl.uint32) | 1) + key.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def random_share(key, counter):
    """`random_unit`: float32 in [0, 1)."""
    return (random_bits(key, counter) >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def random_sign(key, counter):
    """+1 or -1 for each counter (int64): the rotation's."""
    bits = random_bits(key, (0xFFFFFFFF - (counter >> 5)).to(tl.uint32))
    return 1.0 - 2.0 * ((bits >> (counter & 31).to(tl.uint32)) & 1).to(tl.float32)
