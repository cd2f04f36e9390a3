"""Rotate and quantise, decode and rotate back: a row of a tile is a padded block. Blocks longer than a tile, which no
scheme asks for unless told to, run on the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.backends.memory import carried
from thinwire.kernels.backends.reference import rotated as reference
from thinwire.kernels.backends.triton.hadamard import butterflies, scale_of
from thinwire.kernels.backends.triton.launch import launch
from thinwire.kernels.backends.triton.pieces import cut, effective, finite, place, random_share, random_sign, scrambled
from thinwire.kernels.backends.triton.places import Places, kept, places, together
from thinwire.kernels.backends.triton.quantize import nearest_below, table_of
from thinwire.kernels.levels import Levels

TILE = 4096
LARGEST = 4096  # entries of a block


@triton.jit
def _rows(table, stretch_of, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """A tile's stretch; for every row: its block's number, its place in the stretch, how many entries are real, its
    padded length, and its place among padded entries."""
    tile = tl.program_id(0)
    stretch = tl.load(stretch_of + tile)
    _, block, _, size = cut(tile, place(table, stretch, 1), place(table, stretch, 2), BLOCK, BLOCK, ROWS)
    filled = tl.where(size > 0, 64 + size * 0, 0)
    for doubling in tl.static_range(6, 12):
        filled = tl.where(size > (1 << doubling), 2 << doubling, filled)
    return (
        stretch,
        place(table, stretch, 3) + block,
        block * BLOCK,
        size,
        filled,
        place(table, stretch, 4) + block * BLOCK,
    )


@triton.jit
def _rotate(x, key, counter, filled, LOG: tl.constexpr, INVERSE: tl.constexpr):
    diagonal = random_sign(key, counter) * scale_of(filled, LOG)[:, None]
    if not INVERSE:
        x = x * diagonal
    x = butterflies(x, filled[:, None], 1, LOG)
    if INVERSE:
        x = x * diagonal
    return x


@triton.jit
def _inverse(r):
    return tl.where(r > 0, tl.div_rn(1.0, tl.where(r > 0, r, 1.0)), 0.0)


@triton.jit
def _rotate_round(
    x, table, stretch_of, step, offset, low, high, signs, keys, counters, out, lost,
    BLOCK: tl.constexpr, LOG: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    stretch, number, inside, size, filled, padded = _rows(table, stretch_of, BLOCK, ROWS)
    lane = tl.arange(0, BLOCK)[None, :]
    at = place(table, stretch, 0) + inside[:, None] + lane
    there, present = lane < size[:, None], lane < filled[:, None]
    counter = tl.load(counters + stretch) + inside[:, None] + lane
    value = tl.load(x + at, mask=there, other=0.0)
    key = scrambled(tl.load(signs + stretch))
    y = _rotate(value, key, counter, filled, LOG, False)
    r = effective(tl.load(step + number, mask=size > 0, other=0.0))[:, None]
    draw = random_share(scrambled(tl.load(keys + stretch)), counter.to(tl.uint32))
    u = y * _inverse(r) - offset - draw
    q = tl.where((r > 0) & (u == u), u, low)
    q = tl.where(q < low, low, tl.where(q > high, high, q))
    floor = q.to(tl.int32).to(tl.float32)  # towards 0; a card's own ceil() takes denormals for 0
    q = tl.where(floor < q, floor + 1.0, floor)
    tl.store(out + padded[:, None] + lane, q.to(out.dtype.element_ty), mask=present)
    if lost is not None:
        said = _rotate(tl.where(present, r * (q + offset), 0.0), key, counter, filled, LOG, True)
        tl.store(lost + at, value - said, mask=there)


@triton.jit
def _unrotate_sum(
    total, table, stretch_of, scale, offset, signs, counters, out,
    BLOCK: tl.constexpr, LOG: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    stretch, number, inside, size, filled, padded = _rows(table, stretch_of, BLOCK, ROWS)
    lane = tl.arange(0, BLOCK)[None, :]
    there, present = lane < size[:, None], lane < filled[:, None]
    counter = tl.load(counters + stretch) + inside[:, None] + lane
    share = tl.load(scale + number, mask=size > 0, other=0.0)[:, None]
    sums = tl.load(total + padded[:, None] + lane, mask=present, other=0).to(tl.float32)
    y = sums * share + offset * share
    y = _rotate(y, scrambled(tl.load(signs + stretch)), counter, filled, LOG, True)
    tl.store(out + place(table, stretch, 0) + inside[:, None] + lane, y + 0.0, mask=there)


@triton.jit
def _squares(y):
    return tl.sum(y.to(tl.float64) * y.to(tl.float64), axis=1).to(tl.float32)


@triton.jit
def _estimate(energy, coded, error, deviation):
    """The scale that makes the decoded block an unbiased estimate."""
    product = (energy + coded - error) * 0.5
    corrected = tl.div_rn(deviation * energy, product)
    infinite = (corrected == corrected) & (finite(corrected) == 0)
    # deviation * energy is the gradient's third power: where float32 cannot hold it, divide first.
    corrected = tl.where(infinite & finite(energy), tl.div_rn(energy, product) * deviation, corrected)
    return tl.where(energy > 0, corrected, energy)


@triton.jit
def _pack(code, present, at, out, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
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
def _codes_at(codes, at, there, BITS: tl.constexpr):
    """The codes of entries among padded ones."""
    bit = at * BITS
    word = tl.load(codes + (bit >> 3), mask=there, other=0).to(tl.int32)
    if 8 % BITS != 0:  # only then a code reaches into the next byte
        next_byte = there & ((bit & 7) + BITS > 8)
        word = word | (tl.load(codes + (bit >> 3) + 1, mask=next_byte, other=0).to(tl.int32) << 8)
    return (word >> (bit & 7).to(tl.int32)) & ((1 << BITS) - 1)


@triton.jit
def _rotate_quantize(
    x, table, stretch_of, levels, signs, counters, scale, out, lost,
    BITS: tl.constexpr, BLOCK: tl.constexpr, LOG: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    stretch, number, inside, size, filled, padded = _rows(table, stretch_of, BLOCK, ROWS)
    lane = tl.arange(0, BLOCK)[None, :]
    at = place(table, stretch, 0) + inside[:, None] + lane
    there, present = lane < size[:, None], lane < filled[:, None]
    counter = tl.load(counters + stretch) + inside[:, None] + lane
    key = scrambled(tl.load(signs + stretch))
    value = tl.load(x + at, mask=there, other=0.0)
    y = _rotate(value, key, counter, filled, LOG, False)
    energy = _squares(y)
    deviation = tl.sqrt_rn(tl.div_rn(energy, tl.maximum(filled, 1).to(tl.float32)))
    r = effective(deviation)[:, None]
    u = y * _inverse(r)
    code = nearest_below(u, levels, BITS)
    share = (u - tl.load(levels + 2 * code)) * tl.load(levels + 2 * code + 1)
    code = tl.where(_inverse(r) > 0, code + (share > 0.5).to(tl.int32), 0)
    said = tl.where(present, r * tl.load(levels + 2 * code), 0.0)
    estimate = _estimate(energy, _squares(said), _squares(y - said), deviation)
    tl.store(scale + number, estimate, mask=size > 0)
    _pack(code, present, padded, out, BITS, BLOCK, ROWS)
    if lost is not None:
        decoded = tl.where(present, effective(estimate)[:, None] * tl.load(levels + 2 * code), 0.0)
        decoded = _rotate(decoded, key, counter, filled, LOG, True)
        tl.store(lost + at, value - decoded, mask=there)


@triton.jit(do_not_specialize=["count", "code_stride", "scale_stride", "sign_stride"])
def _unrotate_levels(
    codes, code_stride, count, table, stretch_of, levels, scale, scale_stride, weight, signs, sign_stride, counters,
    out, ADD: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, LOG: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    stretch, number, inside, size, filled, padded = _rows(table, stretch_of, BLOCK, ROWS)
    lane = tl.arange(0, BLOCK)[None, :]
    at = place(table, stretch, 0) + inside[:, None] + lane
    there, present = lane < size[:, None], lane < filled[:, None]
    counter = tl.load(counters + stretch) + inside[:, None] + lane
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    if ADD:
        total = tl.load(out + at, mask=there, other=0.0)
    for each in range(count):
        code = _codes_at(codes + each * code_stride.to(tl.int64), padded[:, None] + lane, present, BITS)
        r = effective(tl.load(scale + each * scale_stride.to(tl.int64) + number, mask=size > 0, other=0.0))[:, None]
        key = scrambled(tl.load(signs + each * sign_stride + stretch))
        y = tl.where(present, r * tl.load(levels + 2 * code), 0.0)
        total = total + weight * _rotate(y, key, counter, filled, LOG, True)
    tl.store(out + at, total, mask=there)


def _cut(starts: Tensor, block: int, like: Tensor) -> tuple[Places, dict[str, int]]:
    rows = TILE // block
    where = places(starts, block, like.device, width=block, rows=rows, padded=True)
    return where, {"BLOCK": block, "LOG": block.bit_length() - 1, "ROWS": rows}


def rotate_round(
    x: Tensor, starts: Tensor, block: int, step: Tensor, offset: float, low: int, high: int, *,
    signs: Tensor, keys: Tensor, counters: Tensor, out: Tensor, lost: Tensor | None = None,
) -> None:  # fmt: skip
    if block > LARGEST:
        how = {"signs": signs, "keys": keys, "counters": counters, "out": out, "lost": lost}
        return reference.rotate_round(x, starts, block, step, offset, low, high, **how)
    where, shape = _cut(starts, block, x)
    drawn = carried(torch.stack([signs, keys]), x.device)
    launch(
        _rotate_round, where.tiles, x, where.table, where.stretch, step, float(offset), float(low), float(high),
        drawn[0], drawn[1], kept(counters, x.device), out, lost, **shape, warps=8,
    )  # fmt: skip


def unrotate_sum(
    total: Tensor, starts: Tensor, block: int, scale: Tensor, offset: float, *,
    signs: Tensor, counters: Tensor, out: Tensor,
) -> None:  # fmt: skip
    if block > LARGEST:
        return reference.unrotate_sum(total, starts, block, scale, offset, signs=signs, counters=counters, out=out)
    where, shape = _cut(starts, block, out)
    launch(
        _unrotate_sum, where.tiles, total, where.table, where.stretch, scale, float(offset), carried(signs, out.device),
        kept(counters, out.device), out, **shape, warps=8,
    )  # fmt: skip


def rotate_quantize(
    x: Tensor, starts: Tensor, block: int, levels: Levels, *,
    signs: Tensor, counters: Tensor, scale: Tensor, out: Tensor, lost: Tensor | None = None,
) -> None:  # fmt: skip
    if block > LARGEST:
        how = {"signs": signs, "counters": counters, "scale": scale, "out": out, "lost": lost}
        return reference.rotate_quantize(x, starts, block, levels, **how)
    where, shape = _cut(starts, block, x)
    launch(
        _rotate_quantize, where.tiles, x, where.table, where.stretch, table_of(levels, x), carried(signs, x.device),
        kept(counters, x.device), scale, out, lost, BITS=levels.bits, **shape, warps=8,
    )  # fmt: skip


def unrotate_levels_sum(
    codes: Sequence[Tensor], starts: Tensor, block: int, levels: Levels, scale: Sequence[Tensor], weight: float, *,
    signs: Sequence[Tensor], counters: Tensor, out: Tensor, add: bool = False,
) -> None:  # fmt: skip
    if block > LARGEST:
        how = {"signs": signs, "counters": counters, "out": out, "add": add}
        return reference.unrotate_levels_sum(codes, starts, block, levels, scale, weight, **how)
    apart = together(codes, scale)
    if apart is None:
        for number, (each, own, turn) in enumerate(zip(codes, scale, signs, strict=True)):
            how = {"signs": [turn], "counters": counters, "out": out, "add": add or number > 0}
            unrotate_levels_sum([each], starts, block, levels, [own], weight, **how)
        return
    where, shape = _cut(starts, block, out)
    turns = carried(torch.stack(list(signs)), out.device) if signs else kept(counters, out.device)
    first = (codes[0], scale[0]) if codes else (out, out)
    launch(
        _unrotate_levels, where.tiles, first[0], apart[0], len(codes), where.table, where.stretch,
        table_of(levels, out), first[1], apart[1], float(weight), turns, counters.numel(),
        kept(counters, out.device), out, ADD=add, BITS=levels.bits, **shape, warps=8,
    )  # fmt: skip
