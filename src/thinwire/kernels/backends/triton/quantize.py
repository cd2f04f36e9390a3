"""Quantise and pack, unpack and add. A piece is eight elements of a block: so many bytes as an element has bits."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.backends.memory import carried
from thinwire.kernels.backends.triton.launch import launch
from thinwire.kernels.backends.triton.pieces import cut, effective, place, random_share, scrambled
from thinwire.kernels.backends.triton.places import Places, kept, places, together
from thinwire.kernels.levels import Levels

ROWS = 128  # pieces of a tile: 1,024 elements


@triton.jit
def code_of(x, r, draw, table, BITS: tl.constexpr):
    """The code of every element, and what it stands for in units of its range: without a table on even levels."""
    LAST: tl.constexpr = (1 << BITS) - 1
    if table is None:
        slope = tl.where(r > 0, tl.div_rn(LAST / 2, tl.where(r > 0, r, 1.0)), 0.0)
        u = x * slope + LAST / 2 + draw
        u = tl.where((u > 0) & (slope > 0), tl.where(u > LAST, LAST * 1.0, u), 0.0)
        code = u.to(tl.int32)
    else:
        inverse = tl.where(r > 0, tl.div_rn(1.0, tl.where(r > 0, r, 1.0)), 0.0)
        code = nearest_below(x * inverse, table, BITS)
        share = (x * inverse - tl.load(table + 2 * code)) * tl.load(table + 2 * code + 1)
        code = tl.where(inverse > 0, code + (draw < share).to(tl.int32), 0)
    return code, level_of(code, table, BITS)


@triton.jit
def nearest_below(y, table, BITS: tl.constexpr):
    """The interval of a sorted table that y is in, by halving; the first of it for a NaN."""
    LAST: tl.constexpr = (1 << BITS) - 1
    below = tl.zeros(y.shape, tl.int32)
    for step in tl.static_range(BITS):
        probe = below + (1 << (BITS - 1 - step))
        level = tl.load(table + 2 * tl.minimum(probe, LAST))
        below = tl.where((probe < LAST) & (level <= y), probe, below)
    return below


@triton.jit
def level_of(code, table, BITS: tl.constexpr):
    if table is None:  # noqa: SIM108 - known when it is compiled
        level = code.to(tl.float32) * (2.0 / ((1 << BITS) - 1)) - 1.0
    else:
        level = tl.load(table + 2 * code)
    return level


@triton.jit
def own_levels(levels, row_of, rows, stretch, r, BITS: tl.constexpr):
    """A stretch's own table, out of a bank of so many rows; its range is NaN where it has none."""
    if row_of is not None:
        row = tl.load(row_of + stretch)
        r = tl.where((row >= 0) & (row < rows), r, float("nan"))
        levels = levels + tl.minimum(tl.maximum(row, 0), rows - 1) * (2 << BITS)
    return levels, r


@triton.jit(do_not_specialize=["rows"])
def _quantize(
    x, table, stretch_of, ranges, keys, counters, levels, row_of, rows, out, lost,
    BLOCK: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    stretch = tl.load(stretch_of + tile)
    length = place(table, stretch, 1)
    _, block, inside, size = cut(tile, length, place(table, stretch, 2), BLOCK, 8, ROWS)
    lane = tl.arange(0, 8)[None, :]
    there = inside[:, None] + lane < size[:, None]
    entry = (block * BLOCK + inside)[:, None] + lane
    at = place(table, stretch, 0) + entry
    value = tl.load(x + at, mask=there, other=0.0)
    r = effective(tl.load(ranges + place(table, stretch, 3) + block, mask=size > 0, other=0.0))[:, None]
    draw = 0.5
    if keys is not None:
        counter = (tl.load(counters + stretch) + entry).to(tl.uint32)
        draw = random_share(scrambled(tl.load(keys + stretch)), counter)
    levels, r = own_levels(levels, row_of, rows, stretch, r, BITS)
    code, level = code_of(value, r, draw, levels, BITS)
    if lost is not None:
        tl.store(lost + at, value - r * level, mask=there)
    word = tl.sum(tl.where(there, code, 0).to(tl.int64) << (lane * BITS).to(tl.int64), axis=1)
    inside_bytes = (inside // 8) * BITS
    block_bytes = (BLOCK * BITS + 7) // 8
    byte = place(table, stretch, 4) + block * block_bytes + inside_bytes
    written = (lane < BITS) & (inside_bytes[:, None] + lane < ((size * BITS + 7) // 8)[:, None])
    tl.store(out + byte[:, None] + lane, (word[:, None] >> (8 * lane).to(tl.int64)).to(tl.uint8), mask=written)


@triton.jit(do_not_specialize=["count", "code_stride", "range_stride", "rows"])
def _dequantize(
    codes, code_stride, count, table, stretch_of, ranges, range_stride, levels, row_of, rows, weight, out,
    ADD: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    stretch = tl.load(stretch_of + tile)
    length = place(table, stretch, 1)
    _, block, inside, size = cut(tile, length, place(table, stretch, 2), BLOCK, 8, ROWS)
    lane = tl.arange(0, 8)[None, :]
    there = inside[:, None] + lane < size[:, None]
    at = place(table, stretch, 0) + (block * BLOCK + inside)[:, None] + lane
    inside_bytes = (inside // 8) * BITS
    byte = place(table, stretch, 4) + block * ((BLOCK * BITS + 7) // 8) + inside_bytes
    read = (lane < BITS) & (inside_bytes[:, None] + lane < ((size * BITS + 7) // 8)[:, None])
    number = place(table, stretch, 3) + block
    total = tl.zeros((ROWS, 8), tl.float32)
    if ADD:
        total = tl.load(out + at, mask=there, other=0.0)
    for each in range(count):
        data = tl.load(codes + each * code_stride.to(tl.int64) + byte[:, None] + lane, mask=read, other=0)
        word = tl.sum(data.to(tl.int64) << (8 * lane).to(tl.int64), axis=1)
        code = ((word[:, None] >> (lane * BITS).to(tl.int64)) & ((1 << BITS) - 1)).to(tl.int32)
        r = weight * effective(tl.load(ranges + each * range_stride.to(tl.int64) + number, mask=size > 0, other=0.0))
        own, r = own_levels(levels, row_of, rows, stretch, r, BITS)
        total = total + r[:, None] * level_of(code, own, BITS)
    tl.store(out + at, total, mask=there)


def _cut(starts: Tensor, block: int, bits: int, like: Tensor) -> Places:
    return places(starts, block, like.device, width=8, rows=ROWS, bits=bits)


def _encode(x, starts, block, bits, ranges, levels, keys, counters, out, lost, row=None, rows=0) -> None:
    where = _cut(starts, block, bits, x)
    launch(
        _quantize, where.tiles, x, where.table, where.stretch, ranges,
        None if keys is None else carried(keys, x.device), None if keys is None else kept(counters, x.device),
        levels, row, rows, out, lost, BLOCK=block, BITS=bits, ROWS=ROWS,
    )  # fmt: skip


def _decode(codes, starts, block, bits, ranges, levels, weight, add, out, row=None, rows=0) -> None:
    apart = together(codes, ranges)
    if apart is None:
        for number, (each, own) in enumerate(zip(codes, ranges, strict=True)):
            _decode([each], starts, block, bits, [own], levels, weight, add or number > 0, out)
        return
    if not codes:
        out.zero_()
        return
    where = _cut(starts, block, bits, out)
    launch(
        _dequantize, where.tiles, codes[0], apart[0], len(codes), where.table, where.stretch, ranges[0], apart[1],
        levels, row, rows, float(weight), out, ADD=add, BLOCK=block, BITS=bits, ROWS=ROWS, warps=8,
    )  # fmt: skip


def table_of(levels: Levels, like: Tensor) -> Tensor:
    """Each level, and 1 / the gap above it."""
    return kept(levels.interval.view(-1), like.device)


def quantize_uniform(
    x: Tensor, starts: Tensor, block: int, bits: int, radius: Tensor, *,
    keys: Tensor | None, counters: Tensor, out: Tensor, lost: Tensor | None = None,
) -> None:  # fmt: skip
    _encode(x, starts, block, bits, radius, None, keys, counters, out, lost)


def quantize_levels(
    x: Tensor, starts: Tensor, block: int, levels: Levels, scale: Tensor, *,
    keys: Tensor | None, counters: Tensor, out: Tensor, lost: Tensor | None = None,
) -> None:  # fmt: skip
    _encode(x, starts, block, levels.bits, scale, table_of(levels, x), keys, counters, out, lost)


def dequantize_uniform_add(
    codes: Tensor, starts: Tensor, block: int, bits: int, radius: Tensor, weight: float, *, out: Tensor
) -> None:
    _decode([codes], starts, block, bits, [radius], None, weight, True, out)


def dequantize_uniform_sum(
    codes: Sequence[Tensor], starts: Tensor, block: int, bits: int, radius: Sequence[Tensor], weight: float, *,
    out: Tensor,
) -> bool:  # fmt: skip
    _decode(codes, starts, block, bits, radius, None, weight, False, out)
    return False  # nobody waits for a device to be sure


def dequantize_levels_add(
    codes: Tensor, starts: Tensor, block: int, levels: Levels, scale: Tensor, weight: float, *, out: Tensor
) -> None:
    _decode([codes], starts, block, levels.bits, [scale], table_of(levels, out), weight, True, out)


def dequantize_levels_sum(
    codes: Sequence[Tensor], starts: Tensor, block: int, levels: Levels, scale: Sequence[Tensor], weight: float, *,
    out: Tensor,
) -> bool:  # fmt: skip
    _decode(codes, starts, block, levels.bits, scale, table_of(levels, out), weight, False, out)
    return False


def quantize_bank(
    x: Tensor, starts: Tensor, bank: Tensor, row: Tensor, scale: Tensor, *,
    keys: Tensor | None, counters: Tensor, out: Tensor, lost: Tensor | None = None,
) -> None:  # fmt: skip
    bits = bank.shape[1].bit_length() - 1
    _encode(x, starts, 0, bits, scale, bank, keys, counters, out, lost, row, len(bank))


def dequantize_bank_add(
    codes: Tensor, starts: Tensor, bank: Tensor, row: Tensor, scale: Tensor, weight: float, *, out: Tensor
) -> None:
    bits = bank.shape[1].bit_length() - 1
    _decode([codes], starts, 0, bits, [scale], bank, weight, True, out, row, len(bank))
