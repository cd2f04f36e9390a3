"""Signed integers of `width` bits, two's complement, packed little-endian without gaps."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.backends.reference.bits import get_bits, put_bits


def pack_ints(values: Tensor, width: int, out: Tensor) -> None:
    """The values (int8, int16, int32), `width` bits each, into `out` (uint8). ValueError if one does not fit."""
    limit, wide = 1 << (width - 1), values.to(torch.int64)
    if bool(((wide < -limit) | (wide >= limit)).any()):
        raise ValueError(f"a value does not fit into {width} bits")
    codes = wide & ((1 << width) - 1)
    out.copy_(put_bits(codes, width, _positions(values.numel(), width, values), out.numel()))


def add_packed(data: Tensor, width: int, out: Tensor) -> None:
    """out (int8, int16, int32) += the integers; sums wrap."""
    out.add_(_signed(data, width, out).to(out.dtype))


def add_packed_saturating(data: Tensor, width: int, out: Tensor) -> None:
    """out (int8, int16, int32) += the integers, then clipped to +-(2^(width-1) - 1)."""
    most = (1 << (width - 1)) - 1
    out.copy_((out.to(torch.int64) + _signed(data, width, out)).clamp(-most, most))


def _positions(count: int, width: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device=like.device) * width


def _signed(data: Tensor, width: int, like: Tensor) -> Tensor:
    codes = get_bits(data, width, _positions(like.numel(), width, like))
    return codes - ((codes >> (width - 1)) << width)
