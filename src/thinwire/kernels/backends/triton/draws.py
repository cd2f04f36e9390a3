"""The counter-based generator, for those who draw by themselves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.backends.memory import carried
from thinwire.kernels.backends.reference import draws as reference
from thinwire.kernels.backends.triton.launch import launch
from thinwire.kernels.backends.triton.pieces import place, random_bits, scrambled
from thinwire.kernels.backends.triton.places import kept, places

TILE = 1024


@triton.jit(do_not_specialize=["n", "low", "high"])
def _random(keys, low, high, counter, out, n, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    if keys is None:
        key = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    else:
        key = tl.load(keys + at, mask=at < n, other=0)
    bits = random_bits(scrambled(key), tl.load(counter + at, mask=at < n, other=0).to(tl.uint32))
    tl.store(out + at, bits.to(tl.int64), mask=at < n)


@triton.jit
def _draw_places(keys, table, stretch_of, starts, out, STRIDE: tl.constexpr, TILE: tl.constexpr):
    tile = tl.program_id(0)
    stretch = tl.load(stretch_of + tile)
    count, begin = place(table, stretch, 1), tl.load(starts + stretch * STRIDE)
    length = tl.load(starts + stretch * STRIDE + 1) - begin
    key = scrambled(tl.load(keys + stretch))
    number = (tile - place(table, stretch, 2)) * TILE + tl.arange(0, TILE)
    parts, ring = tl.maximum(count, 1), tl.maximum(length, 1)
    first, last = number * length // parts, (number + 1) * length // parts
    inside = (random_bits(key, number.to(tl.uint32)).to(tl.int64) * (last - first)) >> 32
    turn = (random_bits(key, count.to(tl.uint32)).to(tl.int64) * length) >> 32
    at = begin + (first + inside + turn) % ring
    tl.store(out + place(table, stretch, 0) + number, at.to(tl.int32), mask=number < count)


def random_u32(key: int | Tensor, counter: Tensor) -> Tensor:
    one = isinstance(key, int)
    if not counter.is_contiguous() or not (one or (key.shape == counter.shape and key.is_contiguous())):
        return reference.random_u32(key, counter)
    out, n = torch.empty_like(counter), counter.numel()
    low, high = (_signed(key), _signed(key >> 32)) if one else (0, 0)
    launch(_random, -(-n // TILE), None if one else key, low, high, counter, out, n, TILE=TILE)
    return out


def draw_places(starts: Tensor, few: Tensor, keys: Tensor, out: Tensor) -> None:
    where = places(few, 0, out.device, width=TILE, rows=1)
    there = carried(keys, out.device), where.table, where.stretch, kept(starts, out.device)
    launch(_draw_places, where.tiles if out.numel() else 0, *there, out, STRIDE=starts.dim(), TILE=TILE)


def _signed(number: int) -> int:
    """The int32 with the same low 32 bits: of one type for every key."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
