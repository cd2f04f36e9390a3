"""Quantisation of every block to 2^bits levels: even ones over [-radius, radius], or a table times a scale.

The range of a block is its own number: a radius or scale below 2^-120 counts as 0 (the levels would be denormal), and
one that is not finite makes the whole block decode to NaN, which is how non-finite gradients reach the optimizer. A NaN
in a block whose range is finite gets code 0: ranges must come from the data, as `block_statistics` makes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.backends.reference.bits import get_bits, put_bits
from thinwire.kernels.backends.reference.blocks import Blocks
from thinwire.kernels.backends.reference.draws import stretch_draws
from thinwire.kernels.levels import Levels

SMALLEST = 2.0**-120


def quantize_uniform(
    x: Tensor, starts: Tensor, block: int, bits: int, radius: Tensor, *,
    keys: Tensor | None, counters: Tensor, out: Tensor, lost: Tensor | None = None,
) -> None:  # fmt: skip
    """Quantise to s + 1 = 2^bits even levels over [-radius_j, radius_j] per block, pack into `out`.

    Position u = x * ((s/2) / radius) + s/2; the code is floor(u + draw) clipped to 0..s, with draw =
    random_unit(key, counter), or 1/2 where keys is None: nearest. The code c stands for radius * (c * (2/s) - 1).
    `lost`, where given, gets x - that value; it may be x's own memory. Without a finite radius above 0, codes are 0.
    """
    levels = (1 << bits) - 1
    blocks = Blocks.of(starts, block, x.device)
    x = blocks.take(x)
    number, r = blocks.of_element, effective(radius.to(working(x)))
    half = torch.tensor(levels / 2, dtype=r.dtype, device=x.device)
    slope = torch.where(r > 0, half / r, 0.0)[number]
    u = x * slope + half + stretch_draws(blocks, keys, counters)
    codes = torch.where((u > 0) & (slope > 0), u.clamp(max=levels), 0.0).to(torch.int64)
    if lost is not None:
        blocks.put(x - r[number] * _uniform(codes, bits, r.dtype), lost)
    _pack(codes, blocks, bits, out)


def dequantize_uniform_add(
    codes: Tensor, starts: Tensor, block: int, bits: int, radius: Tensor, weight: float, *, out: Tensor
) -> None:
    """out += (weight * radius) * (c * (2/s) - 1), for codes c made by `quantize_uniform`."""
    blocks = Blocks.of(starts, block, out.device)
    r = effective(radius.to(working(out)))
    c = get_bits(codes, bits, blocks.bit_positions(bits))
    blocks.add((weight * r)[blocks.of_element] * _uniform(c, bits, r.dtype), out)


def quantize_levels(
    x: Tensor, starts: Tensor, block: int, levels: Levels, scale: Tensor, *,
    keys: Tensor | None, counters: Tensor, out: Tensor, lost: Tensor | None = None,
) -> None:  # fmt: skip
    """Quantise to the values table[c] * scale_j per block, with the levels' table; pack into `out`.

    y = x * (1 / scale); j is the interval with table[j] <= y < table[j + 1], clipped to the table. The code is j + 1
    where draw < (y - table[j]) * (1 / (table[j + 1] - table[j])), else j, with draws as in `quantize_uniform`:
    unbiased between the first and the last level, the nearer end outside. `lost`, where given, gets x - value. Blocks
    whose scale is 0 or not finite get codes 0.
    """
    blocks = Blocks.of(starts, block, x.device)
    x = blocks.take(x)
    number, r = blocks.of_element, effective(scale.to(working(x)))
    table = levels.table.to(r)
    inverse = torch.where(r > 0, 1.0 / r, 0.0)[number]
    y = x * inverse
    below = torch.searchsorted(
        table[1:-1].contiguous(), y.nan_to_num(float("-inf"), float("inf"), float("-inf")), right=True
    )
    share = (y - table[below]) * (1.0 / torch.diff(table))[below]
    codes = below + (stretch_draws(blocks, keys, counters) < share)
    codes = torch.where(inverse > 0, codes, 0)
    if lost is not None:
        blocks.put(x - r[number] * table[codes], lost)
    _pack(codes, blocks, levels.bits, out)


def dequantize_uniform_sum(
    codes: Sequence[Tensor], starts: Tensor, block: int, bits: int, radius: Sequence[Tensor], weight: float, *,
    out: Tensor,
) -> bool:  # fmt: skip
    """out = 0, then `dequantize_uniform_add` of each, in order.

    Surely finite: ranges as they count leave room for the sum.
    """
    Blocks.of(starts, block, out.device).clear(out)
    for each_codes, each_radius in zip(codes, radius, strict=True):
        dequantize_uniform_add(each_codes, starts, block, bits, each_radius, weight, out=out)
    return surely_finite(radius, weight, 1.0)


def dequantize_levels_sum(
    codes: Sequence[Tensor], starts: Tensor, block: int, levels: Levels, scale: Sequence[Tensor], weight: float, *,
    out: Tensor,
) -> bool:  # fmt: skip
    """out = 0, then `dequantize_levels_add` of each, in order.

    Surely finite: ranges as they count leave room for the sum.
    """
    Blocks.of(starts, block, out.device).clear(out)
    for each_codes, each_scale in zip(codes, scale, strict=True):
        dequantize_levels_add(each_codes, starts, block, levels, each_scale, weight, out=out)
    return surely_finite(scale, weight, float(levels.table.abs().max()))


def dequantize_levels_add(
    codes: Tensor, starts: Tensor, block: int, levels: Levels, scale: Tensor, weight: float, *, out: Tensor
) -> None:
    """out += (weight * scale) * table[c], for codes c made by `quantize_levels`."""
    blocks = Blocks.of(starts, block, out.device)
    r = effective(scale.to(working(out)))
    c = get_bits(codes, levels.bits, blocks.bit_positions(levels.bits))
    blocks.add((weight * r)[blocks.of_element] * levels.table.to(r)[c], out)


def surely_finite(ranges: Sequence[Tensor], weight: float, largest: float) -> bool:
    """Whether sums of so many ranges, times `weight` and at most `largest`, stay below 2^126, block by block."""
    reach = torch.stack([effective(each).abs().double() for each in ranges]).sum(0) * abs(weight) * largest
    return bool((reach < 2.0**126).all())


def working(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def effective(ranges: Tensor) -> Tensor:
    """The ranges as they count: 0 where too small, NaN where not finite."""
    kept = torch.where(ranges < SMALLEST, 0.0, ranges)
    return torch.where(torch.isfinite(ranges), kept, torch.nan)


def _uniform(codes: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    return codes.to(dtype) * (2.0 / ((1 << bits) - 1)) - 1.0


def _pack(codes: Tensor, blocks: Blocks, bits: int, out: Tensor) -> None:
    size = int(blocks.bytes(bits).sum())
    out[:size].copy_(put_bits(codes, bits, blocks.bit_positions(bits), size))
