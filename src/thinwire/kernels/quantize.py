"""Quantise and pack, unpack and add: one call for all blocks of a bucket. Meaning: `reference.quantize`."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.backends.reference import quantize as reference
from thinwire.kernels.backends.reference.draws import COUNTERS
from thinwire.kernels.levels import Levels
from thinwire.kernels.native import address, for_tensors, threads

_WORKING = (torch.float32, torch.float64)


def packed_bytes(starts: Tensor, block: int, bits: int) -> int:
    """The size of the packed codes of all blocks."""
    check.within("bits", bits, 1, 8)
    return check.blocks(starts, block, bits=bits).packed


def quantize_uniform(
    x: Tensor,
    starts: Tensor,
    block: int,
    bits: int,
    radius: Tensor,
    *,
    keys: Tensor | None,
    counters: Tensor,
    out: Tensor,
    lost: Tensor | None = None,
) -> None:
    """Quantise to 2^bits even levels over [-radius_j, radius_j] per block, pack into `out`.

    Stochastic, by a draw that depends on the element's stretch's key and on its counter; nearest where keys
    is None. `lost`, where given, gets x - decoded value; it may be x's own memory. Blocks whose radius is
    not finite decode to NaN.
    """
    check.within("bits", bits, 1, 8)
    _check_encode(x, starts, block, bits, radius, keys, counters, out, lost)
    native = _native_for(x, radius, out, lost)
    if native is None:
        return reference.quantize_uniform(
            x, starts, block, bits, radius, keys=keys, counters=counters, out=out, lost=lost
        )
    native.quantize_uniform(
        x.data_ptr(),
        x.numel(),
        starts.data_ptr(),
        starts.numel() - 1,
        block,
        bits,
        radius.data_ptr(),
        radius.numel(),
        address(keys),
        counters.data_ptr(),
        out.data_ptr(),
        out.numel(),
        address(lost),
        threads(),
    )


def quantize_levels(
    x: Tensor,
    starts: Tensor,
    block: int,
    levels: Levels,
    scale: Tensor,
    *,
    keys: Tensor | None,
    counters: Tensor,
    out: Tensor,
    lost: Tensor | None = None,
) -> None:
    """Quantise to levels.table * scale_j per block, pack into `out`: see `quantize_uniform` for the rest.

    Stochastic in the value domain between the two neighbouring levels; the nearer end beyond the table.
    """
    _check_encode(x, starts, block, levels.bits, scale, keys, counters, out, lost)
    native = _native_for(x, scale, out, lost)
    if native is None:
        return reference.quantize_levels(
            x,
            starts,
            block,
            levels.table.to(x.device),
            scale,
            keys=keys,
            counters=counters,
            out=out,
            lost=lost,
        )
    native.quantize_levels(
        x.data_ptr(),
        x.numel(),
        starts.data_ptr(),
        starts.numel() - 1,
        block,
        levels.bits,
        levels.table.data_ptr(),
        levels.next.data_ptr(),
        levels.interval.data_ptr(),
        levels.cell.data_ptr(),
        levels.cells,
        levels.crowd,
        levels.cells_per_unit,
        scale.data_ptr(),
        scale.numel(),
        address(keys),
        counters.data_ptr(),
        out.data_ptr(),
        out.numel(),
        address(lost),
        threads(),
    )


def dequantize_uniform_add(
    codes: Tensor, starts: Tensor, block: int, bits: int, radius: Tensor, weight: float, *, out: Tensor
) -> None:
    """out += weight * value, for codes made by `quantize_uniform`."""
    check.within("bits", bits, 1, 8)
    _check_decode(codes, starts, block, bits, radius, out)
    native = _native_for(out, radius, codes, None)
    if native is None:
        return reference.dequantize_uniform_add(codes, starts, block, bits, radius, weight, out=out)
    native.dequantize_uniform_add(
        codes.data_ptr(),
        codes.numel(),
        starts.data_ptr(),
        starts.numel() - 1,
        block,
        bits,
        radius.data_ptr(),
        radius.numel(),
        weight,
        out.data_ptr(),
        out.numel(),
        threads(),
    )


def dequantize_levels(
    codes: Tensor, starts: Tensor, block: int, levels: Levels, scale: Tensor, weight: float, *, out: Tensor
) -> None:
    """out = weight * value, for codes made by `quantize_levels`."""
    _dequantize_levels(codes, starts, block, levels, scale, weight, out, add=False)


def dequantize_levels_add(
    codes: Tensor, starts: Tensor, block: int, levels: Levels, scale: Tensor, weight: float, *, out: Tensor
) -> None:
    """out += weight * value, for codes made by `quantize_levels`."""
    _dequantize_levels(codes, starts, block, levels, scale, weight, out, add=True)


def _dequantize_levels(codes, starts, block, levels, scale, weight, out, *, add: bool) -> None:
    _check_decode(codes, starts, block, levels.bits, scale, out)
    native = _native_for(out, scale, codes, None)
    if native is None:
        meaning = reference.dequantize_levels_add if add else reference.dequantize_levels
        return meaning(codes, starts, block, levels.table.to(out.device), scale, weight, out=out)
    native.dequantize_levels(
        codes.data_ptr(),
        codes.numel(),
        starts.data_ptr(),
        starts.numel() - 1,
        block,
        levels.bits,
        levels.table.data_ptr(),
        scale.data_ptr(),
        scale.numel(),
        weight,
        add,
        out.data_ptr(),
        out.numel(),
        threads(),
    )


def _check_encode(x, starts, block, bits, ranges, keys, counters, out, lost) -> None:
    check.flat("x", x, dtypes=_WORKING)
    blocks = check.blocks(starts, block, bits=bits, numel=x.numel())
    check.flat("radius or scale", ranges, dtypes=_WORKING, like=x, numel=blocks.count)
    check.flat("out", out, dtypes=(torch.uint8,), like=x, numel=blocks.packed)
    if lost is not None:
        check.flat("lost", lost, dtypes=(x.dtype,), like=x, numel=x.numel())
    if keys is not None:
        check.flat("keys", keys, dtypes=(torch.int64,), like=starts, numel=blocks.stretches)
        check.flat("counters", counters, dtypes=(torch.int64,), like=starts, numel=blocks.stretches)
        if max(counters.tolist(), default=0) + x.numel() > COUNTERS or min(counters.tolist(), default=0) < 0:
            raise ValueError(f"counters must stay in 0..2^32 to the end of the buffer, got {counters.tolist()[:8]}")


def _check_decode(codes, starts, block, bits, ranges, out) -> None:
    check.flat("out", out, dtypes=_WORKING)
    blocks = check.blocks(starts, block, bits=bits, numel=out.numel())
    check.flat("radius or scale", ranges, dtypes=_WORKING, like=out, numel=blocks.count)
    check.flat("codes", codes, dtypes=(torch.uint8,), like=out, numel=blocks.packed)


def _native_for(x: Tensor, ranges: Tensor, packed: Tensor, lost: Tensor | None):
    if x.dtype is torch.float32 and ranges.dtype is torch.float32:
        return for_tensors(x, ranges, packed, lost)
    return None
