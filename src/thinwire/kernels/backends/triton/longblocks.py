"""Rotated blocks that are longer than a tile: in passes over memory, with the rotation itself by `hadamard`.

Between two passes a block is held whole, in float32: where the result will be, or else in fresh memory, 4 bytes for
every element of the longest block, or of a 40th of the buffer where that is more. Blocks are taken in groups that fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.backends.triton.groups import TILE, Group
from thinwire.kernels.backends.triton.hadamard import hadamard_
from thinwire.kernels.backends.triton.launch import launch
from thinwire.kernels.backends.triton.pieces import effective, place, random_share, scrambled
from thinwire.kernels.backends.triton.rounding import codes_at, estimate_of, nearest_level, pack, rounded

PARTS = 1024  # sums of tiles that are added at a time


@triton.jit
def _tile(table, stretch_of, TILE: tl.constexpr):
    """A tile of the room: its stretch, its block's number, and of its elements where they are in the stretch, in the
    buffer, among padded elements and in the room, and which are real."""
    first = tl.program_id(0).to(tl.int64) * TILE
    stretch = tl.load(stretch_of + tl.program_id(0))
    begin = first - place(table, stretch, 2)
    inside = begin + tl.arange(0, TILE)[None, :]
    return (
        stretch, place(table, stretch, 3) + begin // place(table, stretch, 5) + tl.arange(0, 1), inside,
        place(table, stretch, 0) + inside, place(table, stretch, 4) + inside, first + tl.arange(0, TILE)[None, :],
        inside < place(table, stretch, 1),
    )  # fmt: skip


@triton.jit
def _fill(x, table, stretch_of, room, TILE: tl.constexpr):
    _, _, _, at, _, own, there = _tile(table, stretch_of, TILE)
    tl.store(room + own, tl.load(x + at, mask=there, other=0.0))


@triton.jit
def _give(room, table, stretch_of, x, weight, out, ADD: tl.constexpr, TILE: tl.constexpr):
    """out = x - what is in the room; without x, 0 or what was there plus `weight` times that."""
    _, _, _, at, _, own, there = _tile(table, stretch_of, TILE)
    y = tl.load(room + own)
    if x is not None:
        y = tl.load(x + at, mask=there, other=0.0) - y
    elif ADD:
        y = tl.load(out + at, mask=there, other=0.0) + weight * y
    else:
        y = weight * y + 0.0
    tl.store(out + at, y, mask=there)


@triton.jit
def _round(
    room, table, stretch_of, step, offset, low, high, keys, counters, out, LOST: tl.constexpr, TILE: tl.constexpr
):
    stretch, number, inside, _, padded, own, _ = _tile(table, stretch_of, TILE)
    counter = tl.load(counters + stretch) + inside
    r = effective(tl.load(step + number))[:, None]
    draw = random_share(scrambled(tl.load(keys + stretch)), counter.to(tl.uint32))
    q = rounded(tl.load(room + own), r, offset, draw, low, high)
    tl.store(out + padded, q.to(out.dtype.element_ty))
    if LOST:
        tl.store(room + own, r * (q + offset))


@triton.jit
def _unround(total, table, stretch_of, scale, offset, room, TILE: tl.constexpr):
    _, number, _, _, padded, own, _ = _tile(table, stretch_of, TILE)
    share = tl.load(scale + number)[:, None]
    tl.store(room + own, tl.load(total + padded).to(tl.float32) * share + offset * share)


@triton.jit
def _square(room, sums, TILE: tl.constexpr):
    y = tl.load(room + tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)).to(tl.float64)
    tl.store(sums + tl.program_id(0), tl.sum(y * y, axis=0))


@triton.jit
def _total(sums, first, count, PARTS: tl.constexpr):
    """In float64, always in the same order."""
    lane = tl.arange(0, PARTS)
    total = tl.zeros((PARTS,), tl.float64)
    for begin in range(0, count, PARTS):
        total += tl.load(sums + first + begin + lane, mask=begin + lane < count, other=0.0)
    return tl.sum(total, axis=0).to(tl.float32)


@triton.jit
def _deviation(energy, size):
    return tl.sqrt_rn(tl.div_rn(energy, size.to(tl.float32)))


@triton.jit(do_not_specialize=["tiles"])
def _weigh(sums, tiles, table, stretch_of, scale, ESTIMATE: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr):
    """A block's energy, where its scale will be; then its scale. Of a block's programs the first does it."""
    tile = tl.program_id(0)
    stretch = tl.load(stretch_of + tile)
    size, begin = place(table, stretch, 5), tile.to(tl.int64) * TILE - place(table, stretch, 2)
    if begin % size == 0:
        number, count = place(table, stretch, 3) + begin // size + tl.arange(0, 1), (size // TILE).to(tl.int32)
        if ESTIMATE:
            energy = tl.load(scale + number)
            coded, error = _total(sums, tile, count, PARTS), _total(sums + tiles, tile, count, PARTS)
            tl.store(scale + number, estimate_of(energy, coded, error, _deviation(energy, size)))
        else:
            tl.store(scale + number, _total(sums, tile, count, PARTS))


@triton.jit(do_not_specialize=["tiles"])
def _code(room, table, stretch_of, levels, scale, out, sums, tiles, BITS: tl.constexpr, TILE: tl.constexpr):
    stretch, number, _, _, padded, own, _ = _tile(table, stretch_of, TILE)
    y = tl.load(room + own)
    r = effective(_deviation(tl.load(scale + number), place(table, stretch, 5)))[:, None]
    code = nearest_level(y, r, levels, BITS)
    pack(code, code >= 0, tl.min(padded, axis=1), out, BITS, TILE, 1)
    said = r * tl.load(levels + 2 * code)
    error = (y - said).to(tl.float64)
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(said.to(tl.float64) * said.to(tl.float64), axis=1), axis=0))
    tl.store(sums + tiles + tl.program_id(0), tl.sum(tl.sum(error * error, axis=1), axis=0))


@triton.jit
def _uncode(codes, table, stretch_of, levels, scale, room, BITS: tl.constexpr, TILE: tl.constexpr):
    _, number, _, _, padded, own, _ = _tile(table, stretch_of, TILE)
    code = codes_at(codes, padded, own >= 0, BITS)
    tl.store(room + own, effective(tl.load(scale + number))[:, None] * tl.load(levels + 2 * code))


@dataclass(frozen=True)
class Room:
    """A group of blocks, and the memory that holds them between two passes."""

    group: Group
    memory: Tensor
    block: int

    def run(self, kernel: object, *arguments: object, **constants: object) -> None:
        launch(kernel, self.group.tiles, *arguments, **constants, TILE=TILE, warps=8)

    @property
    def where(self) -> tuple[Tensor, Tensor]:
        return self.group.table, self.group.stretch

    def rotate(self, signs: Tensor, *, inverse: bool = False) -> None:
        how = {"keys": self.group.of(signs), "counters": self.group.counters, "inverse": inverse}
        hadamard_(self.memory, self.group.starts, self.block, **how)

    def fill(self, x: Tensor, signs: Tensor) -> None:
        self.run(_fill, x, *self.where, self.memory)
        self.rotate(signs)

    def give(self, signs: Tensor, out: Tensor, x: Tensor | None = None, weight: float = 1.0, add: bool = False) -> None:
        self.rotate(signs, inverse=True)
        self.run(_give, self.memory, *self.where, x, float(weight), out, ADD=add)


def rooms(groups: Sequence[Group], block: int, like: Tensor, spare: Tensor | None = None) -> Iterator[Room]:
    """One after the other: in `spare`, memory like the buffer's that is written over, where they can lie there."""
    if not groups:
        return
    fresh = [each.numel for each in groups if spare is None or each.begin is None]
    memory = torch.empty(max(fresh, default=0), dtype=torch.float32, device=like.device)
    for group in groups:
        own = memory if spare is None or group.begin is None else spare[group.begin :]
        yield Room(group, own[: group.numel], block)


def apart(spare: Tensor | None, x: Tensor) -> Tensor | None:
    """What may be written over while x is still read."""
    same = spare is not None and spare.untyped_storage()._cdata == x.untyped_storage()._cdata
    return None if same else spare


def rotate_round(
    room: Room, x: Tensor, step: Tensor, ends: tuple[float, float, float], signs: Tensor, keys: Tensor, out: Tensor,
    lost: Tensor | None,
) -> None:  # fmt: skip
    room.fill(x, signs)
    how = (step, *ends, room.group.of(keys), room.group.counters_there)
    room.run(_round, room.memory, *room.where, *how, out, LOST=lost is not None)
    if lost is not None:
        room.give(signs, lost, x)


def unrotate_sum(room: Room, total: Tensor, scale: Tensor, offset: float, signs: Tensor, out: Tensor) -> None:
    room.run(_unround, total, *room.where, scale, offset, room.memory)
    room.give(signs, out)


def rotate_quantize(
    room: Room, x: Tensor, levels: Tensor, bits: int, signs: Tensor, scale: Tensor, out: Tensor, lost: Tensor | None
) -> None:
    room.fill(x, signs)
    tiles = room.group.tiles
    sums = torch.empty(2 * tiles, dtype=torch.float64, device=x.device)
    room.run(_square, room.memory, sums)
    room.run(_weigh, sums, tiles, *room.where, scale, ESTIMATE=False, PARTS=PARTS)
    room.run(_code, room.memory, *room.where, levels, scale, out, sums, tiles, BITS=bits)
    room.run(_weigh, sums, tiles, *room.where, scale, ESTIMATE=True, PARTS=PARTS)
    if lost is not None:
        room.run(_uncode, out, *room.where, levels, scale, room.memory, BITS=bits)
        room.give(signs, lost, x)


def unrotate_levels_sum(
    room: Room, codes: Sequence[Tensor], levels: Tensor, bits: int, scale: Sequence[Tensor], weight: float,
    signs: Tensor, out: Tensor, add: bool,
) -> None:  # fmt: skip
    for number, (each, own) in enumerate(zip(codes, scale, strict=True)):
        room.run(_uncode, each, *room.where, levels, own, room.memory, BITS=bits)
        room.give(signs[number], out, weight=weight, add=add or number > 0)
