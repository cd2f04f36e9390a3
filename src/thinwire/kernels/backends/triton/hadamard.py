"""The rotation. Pairs up to half a tile apart mix inside a program; those further apart in passes over memory, each of
which mixes elements that lie a stride apart. Blocks begin at multiples of their size."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.backends.memory import carried
from thinwire.kernels.backends.triton.launch import launch
from thinwire.kernels.backends.triton.pieces import place, random_sign, scrambled
from thinwire.kernels.backends.triton.places import kept, places

TILE = 4096
RADIX = 64  # elements a stride apart that one pass mixes, at most


@triton.jit
def butterflies(y, reach, STRIDE: tl.constexpr, STAGES: tl.constexpr):
    """Along the rows, whose elements lie STRIDE apart. A pair mixes where twice its distance is within its reach."""
    ROWS: tl.constexpr = y.shape[0]
    WIDTH: tl.constexpr = y.shape[1]
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(y, (ROWS * WIDTH // (2 << stage), 2, 1 << stage))
        a, b = tl.split(tl.permute(pairs, (0, 2, 1)))
        mixed = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (ROWS, WIDTH))
        y = tl.where(reach >= ((2 * STRIDE) << stage), mixed, y)
    return y


@triton.jit
def scale_of(reach, LOG: tl.constexpr):
    """1 / sqrt(block), of blocks as long as the greatest power of two within reach, which is 2^LOG at most."""
    scale = tl.where(reach >= 2, 0.7071067811865475, 1.0)
    power = 1.0
    for stage in tl.static_range(1, LOG + 1):
        if stage % 2 == 0:
            power = power * 0.5
            scale = tl.where(reach >= (1 << stage), power, scale)
        else:
            scale = tl.where(reach >= (1 << stage), power * 0.7071067811865475, scale)
    return scale


@triton.jit
def reach_of(at, length, BLOCK: tl.constexpr):
    """What its greatest power of two is the size of: the block of an element of a stretch.

    In what is left over blocks halve: an element's is the highest bit in which its place and the rest's length differ.
    """
    tail = length & (BLOCK - 1)
    return tl.where(at < length - tail, BLOCK, tail ^ (at & (BLOCK - 1)))


@triton.jit
def _pass(
    x, table, stretch_of, keys, counters,
    STRIDE: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
    BLOCK: tl.constexpr, LOG: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    SPLIT: tl.constexpr = STRIDE // COLS
    program = tl.program_id(0).to(tl.int64)
    tile = program // SPLIT
    stretch = tl.load(stretch_of + tile)
    length = place(table, stretch, 1)
    corner = (tile - place(table, stretch, 2)) * (WIDTH * STRIDE) + (program - tile * SPLIT) * COLS
    at = corner + tl.arange(0, COLS)[:, None] + tl.arange(0, WIDTH)[None, :] * STRIDE
    reach = reach_of(at, length, BLOCK)
    entries = x + place(table, stretch, 0) + at
    y = tl.load(entries, mask=at < length, other=0.0)
    diagonal = y
    if BEFORE or AFTER:
        sign = random_sign(scrambled(tl.load(keys + stretch)), tl.load(counters + stretch) + at)
        diagonal = sign * scale_of(reach, LOG)
    if BEFORE:
        y = y * diagonal
    y = butterflies(y, reach, STRIDE, STAGES)
    if AFTER:
        y = y * diagonal
    tl.store(entries, y, mask=at < length)


def hadamard_(x: Tensor, starts: Tensor, block: int, *, keys: Tensor, counters: Tensor, inverse: bool = False) -> None:
    longest = int((starts[1:] - starts[:-1]).max()) if starts.numel() > 1 else 0
    block = min(block, 1 << max(0, longest - 1).bit_length())  # a larger one has the same meaning
    log, strides = block.bit_length() - 1, [1]
    while strides[-1] * (TILE if len(strides) == 1 else RADIX) < block:
        strides.append(strides[-1] * (TILE if len(strides) == 1 else RADIX))
    signs, first = carried(keys, x.device), kept(counters, x.device)
    for number, stride in enumerate(strides):
        width = TILE if stride == 1 else min(RADIX, block // stride)
        cols = TILE // width
        where = places(starts, 0, x.device, width=width * stride, rows=1)
        launch(
            _pass, where.tiles * (stride // cols), x, where.table, where.stretch, signs, first,
            STRIDE=stride, COLS=cols, WIDTH=width, STAGES=min(width.bit_length() - 1, log - (stride.bit_length() - 1)),
            BLOCK=block, LOG=log, BEFORE=not inverse and number == 0, AFTER=inverse and number == len(strides) - 1,
            warps=8,
        )  # fmt: skip
