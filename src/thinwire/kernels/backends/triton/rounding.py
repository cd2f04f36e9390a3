"""What rotated elements are rounded to, and how that is packed: shared by blocks of a tile and by longer ones."""

from __future__ import annotations

import triton
import triton.language as tl

from thinwire.kernels.backends.triton.pieces import finite
from thinwire.kernels.backends.triton.quantize import nearest_below


@triton.jit
def _inverse(r):
    return tl.where(r > 0, tl.div_rn(1.0, tl.where(r > 0, r, 1.0)), 0.0)


@triton.jit
def rounded(y, r, offset, draw, low, high):
    """ceil(y / r - offset - draw), kept to low..high; `low` without a range."""
    u = y * _inverse(r) - offset - draw
    q = tl.where((r > 0) & (u == u), u, low)
    q = tl.where(q < low, low, tl.where(q > high, high, q))
    floor = q.to(tl.int32).to(tl.float32)  # towards 0; a card's own ceil() takes denormals for 0
    return tl.where(floor < q, floor + 1.0, floor)


@triton.jit
def nearest_level(y, r, levels, BITS: tl.constexpr):
    """The code of the level nearest to y / r; 0 without a range."""
    u = y * _inverse(r)
    code = nearest_below(u, levels, BITS)
    share = (u - tl.load(levels + 2 * code)) * tl.load(levels + 2 * code + 1)
    return tl.where(_inverse(r) > 0, code + (share > 0.5).to(tl.int32), 0)


@triton.jit
def estimate_of(energy, coded, error, deviation):
    """The scale that makes the decoded block an unbiased estimate."""
    product = (energy + coded - error) * 0.5
    corrected = tl.div_rn(deviation * energy, product)
    infinite = (corrected == corrected) & (finite(corrected) == 0)
    # deviation * energy is the gradient's third power: where float32 cannot hold it, divide first.
    corrected = tl.where(infinite & finite(energy), tl.div_rn(energy, product) * deviation, corrected)
    return tl.where(energy > 0, corrected, energy)


@triton.jit
def pack(code, present, at, out, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Eight codes are BITS bytes; rows begin at multiples of eight."""
    lane = tl.arange(0, 8)[None, :]
    eights = tl.reshape(tl.where(present, code, 0), (ROWS * BLOCK // 8, 8)).to(tl.int64)
    word = tl.sum(eights << (lane * BITS).to(tl.int64), axis=1)
    first = tl.broadcast_to(at[:, None] // 8 + tl.arange(0, BLOCK // 8)[None, :], (ROWS, BLOCK // 8))
    written = tl.reshape(tl.broadcast_to(present, (ROWS, BLOCK)).to(tl.int32), (ROWS * BLOCK // 8, 8))
    byte = tl.reshape(first, (ROWS * BLOCK // 8,))[:, None] * BITS + lane
    mask = (tl.max(written, axis=1) > 0)[:, None] & (lane < BITS)
    tl.store(out + byte, (word[:, None] >> (8 * lane).to(tl.int64)).to(tl.uint8), mask=mask)


@triton.jit
def codes_at(codes, at, there, BITS: tl.constexpr):
    """The codes of elements among padded ones."""
    bit = at * BITS
    word = tl.load(codes + (bit >> 3), mask=there, other=0).to(tl.int32)
    if 8 % BITS != 0:  # only then a code reaches into the next byte
        next_byte = there & ((bit & 7) + BITS > 8)
        word = word | (tl.load(codes + (bit >> 3) + 1, mask=next_byte, other=0).to(tl.int32) << 8)
    return (word >> (bit & 7).to(tl.int32)) & ((1 << BITS) - 1)
