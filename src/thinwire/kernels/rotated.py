"""Rotate and quantise, decode and rotate back, a block at a time in the cache. Meaning: `reference.rotated`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.backends import implementation, reference
from thinwire.kernels.backends.reference.rotated import SMALLEST
from thinwire.kernels.hadamard import LARGEST_BLOCK
from thinwire.kernels.integers import INTEGERS
from thinwire.kernels.levels import Levels

_WORKING = (torch.float32, torch.float64)


def padded_numel(starts: Tensor, block: int) -> int:
    """How many elements all blocks have when they are padded."""
    _check_block(block)
    return sum(check.padded(end - begin, block, SMALLEST) for begin, end in check.bounds(starts))


def rotate_round(
    x: Tensor, starts: Tensor, block: int, step: Tensor, offset: float, low: int, high: int, *,
    signs: Tensor, keys: Tensor, counters: Tensor, out: Tensor, lost: Tensor | None = None,
) -> None:  # fmt: skip
    """Rotate every padded block; round it at random to integers q in low..high that stand for step_j * (q + offset).

    `signs`: keys of the rotation, one per stretch; `keys`: those of the draws. `out`: int8, int16 or int32, one per
    padded element. `lost`, where given, gets x - what the integers stand for, rotated back.
    """
    check.flat("x", x, dtypes=_WORKING)
    count = _check_blocks(starts, block, x.numel())
    check.flat("step", step, dtypes=_WORKING, like=x, numel=count)
    check.flat("out", out, dtypes=INTEGERS, like=x, numel=padded_numel(starts, block))
    ends = torch.iinfo(out.dtype)
    check.within("low", low, max(ends.min, -(1 << 20)), min(ends.max, 1 << 20))
    check.within("high", high, low, min(ends.max, 1 << 20))
    check.optional("lost", lost, dtypes=(x.dtype,), like=x, numel=x.numel())
    for each in (signs, keys):
        check.draws(each, counters, starts, len(check.bounds(starts)), x)
    implementation(reference.rotate_round, x.device, x.dtype, step.dtype)(
        x, starts, block, step, offset, low, high, signs=signs, keys=keys, counters=counters, out=out, lost=lost
    )


def unrotate_sum(
    total: Tensor, starts: Tensor, block: int, scale: Tensor, offset: float, *,
    signs: Tensor, counters: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """out = scale_j * (total + offset), rotated back: what a sum of `rotate_round`'s integers stands for."""
    check.flat("out", out, dtypes=_WORKING)
    count = _check_blocks(starts, block, out.numel())
    check.flat("scale", scale, dtypes=_WORKING, like=out, numel=count)
    check.flat("total", total, dtypes=INTEGERS, like=out, numel=padded_numel(starts, block))
    check.draws(signs, counters, starts, len(check.bounds(starts)), out)
    implementation(reference.unrotate_sum, out.device, out.dtype, scale.dtype)(
        total, starts, block, scale, offset, signs=signs, counters=counters, out=out
    )


def rotate_quantize(
    x: Tensor, starts: Tensor, block: int, levels: Levels, *,
    signs: Tensor, counters: Tensor, scale: Tensor, out: Tensor, lost: Tensor | None = None,
) -> None:  # fmt: skip
    """Rotate every padded block, send each element to the nearest of the levels times the block's deviation, pack.

    `scale` gets a number for each block: times the levels, rotated back, it is an unbiased estimate of the block.
    `out`: `levels.bits` bits per padded element. `lost`, where given, gets x - that estimate.
    """
    check.flat("x", x, dtypes=_WORKING)
    count = _check_blocks(starts, block, x.numel())
    check.flat("scale", scale, dtypes=_WORKING, like=x, numel=count)
    check.flat("out", out, dtypes=(torch.uint8,), like=x, numel=padded_numel(starts, block) * levels.bits // 8)
    check.optional("lost", lost, dtypes=(x.dtype,), like=x, numel=x.numel())
    check.draws(signs, counters, starts, len(check.bounds(starts)), x)
    implementation(reference.rotate_quantize, x.device, x.dtype, scale.dtype)(
        x, starts, block, levels, signs=signs, counters=counters, scale=scale, out=out, lost=lost
    )


def unrotate_levels_sum(
    codes: Sequence[Tensor], starts: Tensor, block: int, levels: Levels, scale: Sequence[Tensor], weight: float, *,
    signs: Sequence[Tensor], counters: Tensor, out: Tensor, add: bool = False,
) -> None:  # fmt: skip
    """out = weight * the sum, in order, of what several `rotate_quantize` made, each with its own signs; or += it."""
    check.flat("out", out, dtypes=_WORKING)
    count = _check_blocks(starts, block, out.numel())
    size, stretches = padded_numel(starts, block) * levels.bits // 8, len(check.bounds(starts))
    for each_codes, each_scale, each_signs in zip(codes, scale, signs, strict=True):
        check.flat("codes", each_codes, dtypes=(torch.uint8,), like=out, numel=size)
        check.flat("scale", each_scale, dtypes=_WORKING, like=out, numel=count)
        check.draws(each_signs, counters, starts, stretches, out)
    implementation(reference.unrotate_levels_sum, out.device, out.dtype, *(each.dtype for each in scale))(
        codes, starts, block, levels, scale, weight, signs=signs, counters=counters, out=out, add=add
    )


def _check_block(block: int) -> None:
    check.within("block", block, SMALLEST, LARGEST_BLOCK)
    if block & (block - 1):
        raise ValueError(f"block must be a power of two, got {block}")


def _check_blocks(starts: Tensor, block: int, numel: int) -> int:
    """The number of blocks."""
    _check_block(block)
    return check.blocks(starts, block, numel=numel).count
