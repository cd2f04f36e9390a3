"""Rotate and quantise, decode and rotate back: a row of a tile is a padded block. Those longer than a tile, which no
scheme has unless told to, are `longblocks`'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.backends.memory import carried
from thinwire.kernels.backends.triton import longblocks
from thinwire.kernels.backends.triton.groups import TILE, Group, longer_than_a_tile
from thinwire.kernels.backends.triton.hadamard import butterflies, scale_of
from thinwire.kernels.backends.triton.launch import launch
from thinwire.kernels.backends.triton.pieces import cut, effective, place, random_share, random_sign, scrambled
from thinwire.kernels.backends.triton.places import Places, kept, places, together
from thinwire.kernels.backends.triton.quantize import table_of
from thinwire.kernels.backends.triton.rounding import codes_at, estimate_of, nearest_level, pack, rounded
from thinwire.kernels.levels import Levels


@triton.jit
def _rows(table, stretch_of, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """A tile's stretch; for every row: its block's number, its place in the stretch, how many elements are real, its
    padded length, and its place among padded elements."""
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
    q = rounded(y, r, offset, draw, low, high)
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
    code = nearest_level(y, r, levels, BITS)
    said = tl.where(present, r * tl.load(levels + 2 * code), 0.0)
    estimate = estimate_of(energy, _squares(said), _squares(y - said), deviation)
    tl.store(scale + number, estimate, mask=size > 0)
    pack(code, present, padded, out, BITS, BLOCK, ROWS)
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
        code = codes_at(codes + each * code_stride.to(tl.int64), padded[:, None] + lane, present, BITS)
        r = effective(tl.load(scale + each * scale_stride.to(tl.int64) + number, mask=size > 0, other=0.0))[:, None]
        key = scrambled(tl.load(signs + each * sign_stride + stretch))
        y = tl.where(present, r * tl.load(levels + 2 * code), 0.0)
        total = total + weight * _rotate(y, key, counter, filled, LOG, True)
    tl.store(out + at, total, mask=there)


class _Cut(NamedTuple):
    """Blocks that a program holds; and groups of longer ones."""

    where: Places | Group
    counters: Tensor
    shape: dict[str, int]
    longer: list[Group]

    def of(self, keys: Tensor) -> Tensor:
        """Out of a key for each stretch of the buffer those of the stretches here."""
        return self.where.of(keys) if isinstance(self.where, Group) else keys


def _cut(starts: Tensor, block: int, counters: Tensor, like: Tensor) -> _Cut:
    width = min(block, TILE)
    shape = {"BLOCK": width, "LOG": width.bit_length() - 1, "ROWS": TILE // width}
    if block > TILE:
        short, longer = longer_than_a_tile(starts, block, counters, like.device)
        return _Cut(short, short.counters_there, shape, longer)
    where = places(starts, block, like.device, width=block, rows=TILE // block, padded=True)
    return _Cut(where, kept(counters, like.device), shape, [])


def rotate_round(
    x: Tensor, starts: Tensor, block: int, step: Tensor, offset: float, low: int, high: int, *,
    signs: Tensor, keys: Tensor, counters: Tensor, out: Tensor, lost: Tensor | None = None,
) -> None:  # fmt: skip
    cut, ends = _cut(starts, block, counters, x), (float(offset), float(low), float(high))
    drawn = carried(torch.stack([signs, keys]), x.device)
    own = cut.of(drawn)
    launch(
        _rotate_round, cut.where.tiles, x, cut.where.table, cut.where.stretch, step, *ends, own[0], own[1],
        cut.counters, out, lost, **cut.shape, warps=8,
    )  # fmt: skip
    for room in longblocks.rooms(cut.longer, block, x, longblocks.apart(lost, x)):
        longblocks.rotate_round(room, x, step, ends, drawn[0], drawn[1], out, lost)


def unrotate_sum(
    total: Tensor, starts: Tensor, block: int, scale: Tensor, offset: float, *,
    signs: Tensor, counters: Tensor, out: Tensor,
) -> None:  # fmt: skip
    cut, turns = _cut(starts, block, counters, out), carried(signs, out.device)
    launch(
        _unrotate_sum, cut.where.tiles, total, cut.where.table, cut.where.stretch, scale, float(offset), cut.of(turns),
        cut.counters, out, **cut.shape, warps=8,
    )  # fmt: skip
    for room in longblocks.rooms(cut.longer, block, out, out):
        longblocks.unrotate_sum(room, total, scale, float(offset), turns, out)


def rotate_quantize(
    x: Tensor, starts: Tensor, block: int, levels: Levels, *,
    signs: Tensor, counters: Tensor, scale: Tensor, out: Tensor, lost: Tensor | None = None,
) -> None:  # fmt: skip
    cut, turns = _cut(starts, block, counters, x), carried(signs, x.device)
    table = table_of(levels, x)
    launch(
        _rotate_quantize, cut.where.tiles, x, cut.where.table, cut.where.stretch, table, cut.of(turns), cut.counters,
        scale, out, lost, BITS=levels.bits, **cut.shape, warps=8,
    )  # fmt: skip
    for room in longblocks.rooms(cut.longer, block, x, longblocks.apart(lost, x)):
        longblocks.rotate_quantize(room, x, table, levels.bits, turns, scale, out, lost)


def unrotate_levels_sum(
    codes: Sequence[Tensor], starts: Tensor, block: int, levels: Levels, scale: Sequence[Tensor], weight: float, *,
    signs: Sequence[Tensor], counters: Tensor, out: Tensor, add: bool = False,
) -> None:  # fmt: skip
    apart = together(codes, scale)
    if apart is None:
        for number, (each, own, turn) in enumerate(zip(codes, scale, signs, strict=True)):
            how = {"signs": [turn], "counters": counters, "out": out, "add": add or number > 0}
            unrotate_levels_sum([each], starts, block, levels, [own], weight, **how)
        return
    cut, table = _cut(starts, block, counters, out), table_of(levels, out)
    turns = carried(torch.stack(list(signs)), out.device) if signs else kept(counters, out.device)
    own = cut.of(turns)
    first = (codes[0], scale[0]) if codes else (out, out)
    launch(
        _unrotate_levels, cut.where.tiles, first[0], apart[0], len(codes), cut.where.table, cut.where.stretch, table,
        first[1], apart[1], float(weight), own, own.shape[-1], cut.counters, out, ADD=add, BITS=levels.bits,
        **cut.shape, warps=8,
    )  # fmt: skip
    for room in longblocks.rooms(cut.longer, block, out):
        longblocks.unrotate_levels_sum(room, codes, table, levels.bits, scale, weight, turns, out, add)
