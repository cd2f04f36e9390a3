"""Quantise and pack, unpack and add: one call for all blocks of a bucket. Meaning: `reference.quantize`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.backends import implementation, reference
from thinwire.kernels.levels import Levels

_WORKING = (torch.float32, torch.float64)
LONGEST = 4096  # elements of a block that is held in the cache while it is looked at and quantised


def packed_bytes(starts: Tensor, block: int, bits: int) -> int:
    """The size of the packed codes of all blocks."""
    check.within("bits", bits, 1, 8)
    return check.blocks(starts, block, bits=bits).packed


def quantize_uniform(
    x: Tensor, starts: Tensor, block: int, bits: int, radius: Tensor, *,
    keys: Tensor | None, counters: Tensor, out: Tensor, lost: Tensor | None = None,
) -> None:  # fmt: skip
    """Quantise to 2^bits even levels over [-radius_j, radius_j] per block, pack into `out`.

    Stochastic, by a draw from the key of the element's stretch and its counter; nearest where keys is None. `lost`,
    where given, gets x - decoded value; it may be x's own memory. Blocks whose radius is not finite decode to NaN.
    """
    check.within("bits", bits, 1, 8)
    _check_encode(x, starts, block, bits, radius, keys, counters, out, lost)
    implementation(reference.quantize_uniform, x.device, x.dtype, radius.dtype)(
        x, starts, block, bits, radius, keys=keys, counters=counters, out=out, lost=lost
    )


def quantize_levels(
    x: Tensor, starts: Tensor, block: int, levels: Levels, scale: Tensor, *,
    keys: Tensor | None, counters: Tensor, out: Tensor, lost: Tensor | None = None,
) -> None:  # fmt: skip
    """Quantise to levels.table * scale_j per block, pack into `out`: see `quantize_uniform` for the rest.

    Stochastic in the value domain between the two neighbouring levels; the nearer end beyond the table.
    """
    _check_encode(x, starts, block, levels.bits, scale, keys, counters, out, lost)
    implementation(reference.quantize_levels, x.device, x.dtype, scale.dtype)(
        x, starts, block, levels, scale, keys=keys, counters=counters, out=out, lost=lost
    )


def quantize_laplace(
    x: Tensor, starts: Tensor, block: int, levels: Levels, threshold: float, *,
    moments: bool, radius: Tensor, keys: Tensor | None, counters: Tensor, out: Tensor,
    owed: Tensor | None = None, lost: Tensor | None = None,
) -> None:  # fmt: skip
    """`quantize_levels` of x + owed, truncated where each block's Laplace fit says, which is written to `radius`.

    Blocks of 1 to LONGEST elements. In one pass: what was two, and the sum between them. See `reference.laplace`.
    """
    check.within("block", block, 1, LONGEST)
    _check_encode(x, starts, block, levels.bits, radius, keys, counters, out, lost)
    check.optional("owed", owed, dtypes=(x.dtype,), like=x, numel=x.numel())
    implementation(reference.quantize_laplace, x.device, x.dtype, radius.dtype)(
        x, starts, block, levels, threshold,
        moments=moments, radius=radius, keys=keys, counters=counters, out=out, owed=owed, lost=lost,
    )  # fmt: skip


def dequantize_uniform_add(
    codes: Tensor, starts: Tensor, block: int, bits: int, radius: Tensor, weight: float, *, out: Tensor
) -> None:
    """out += weight * value, for codes made by `quantize_uniform`."""
    check.within("bits", bits, 1, 8)
    _check_decode([codes], starts, block, bits, [radius], out)
    implementation(reference.dequantize_uniform_add, out.device, out.dtype, radius.dtype)(
        codes, starts, block, bits, radius, weight, out=out
    )


def dequantize_uniform_sum(
    codes: Sequence[Tensor], starts: Tensor, block: int, bits: int, radius: Sequence[Tensor], weight: float, *,
    out: Tensor,
) -> bool:  # fmt: skip
    """out = weight * the sum of values, in order, for several codes made by `quantize_uniform`.

    Whether it is surely finite.
    """
    check.within("bits", bits, 1, 8)
    _check_decode(codes, starts, block, bits, radius, out)
    return implementation(reference.dequantize_uniform_sum, out.device, out.dtype, *(each.dtype for each in radius))(
        codes, starts, block, bits, radius, weight, out=out
    )


def dequantize_levels_sum(
    codes: Sequence[Tensor], starts: Tensor, block: int, levels: Levels, scale: Sequence[Tensor], weight: float, *,
    out: Tensor,
) -> bool:  # fmt: skip
    """out = weight * the sum of values, in order, for several codes made by `quantize_levels`.

    Whether it is surely finite.
    """
    _check_decode(codes, starts, block, levels.bits, scale, out)
    return implementation(reference.dequantize_levels_sum, out.device, out.dtype, *(each.dtype for each in scale))(
        codes, starts, block, levels, scale, weight, out=out
    )


def dequantize_levels_add(
    codes: Tensor, starts: Tensor, block: int, levels: Levels, scale: Tensor, weight: float, *, out: Tensor
) -> None:
    """out += weight * value, for codes made by `quantize_levels`."""
    _check_decode([codes], starts, block, levels.bits, [scale], out)
    implementation(reference.dequantize_levels_add, out.device, out.dtype, scale.dtype)(
        codes, starts, block, levels, scale, weight, out=out
    )


def _check_encode(x, starts, block, bits, ranges, keys, counters, out, lost) -> None:
    check.flat("x", x, dtypes=_WORKING)
    blocks = check.blocks(starts, block, bits=bits, numel=x.numel())
    check.flat("radius or scale", ranges, dtypes=_WORKING, like=x, numel=blocks.count)
    check.flat("out", out, dtypes=(torch.uint8,), like=x, numel=blocks.packed)
    check.optional("lost", lost, dtypes=(x.dtype,), like=x, numel=x.numel())
    if keys is not None:
        check.draws(keys, counters, starts, blocks.stretches, x)


def _check_decode(codes, starts, block, bits, ranges, out) -> None:
    """Of several messages, each with its codes and its radius or scale."""
    check.flat("out", out, dtypes=_WORKING)
    blocks = check.blocks(starts, block, bits=bits, numel=out.numel())
    for each_codes, each_ranges in zip(codes, ranges, strict=True):
        check.flat("radius or scale", each_ranges, dtypes=_WORKING, like=out, numel=blocks.count)
        check.flat("codes", each_codes, dtypes=(torch.uint8,), like=out, numel=blocks.packed)
