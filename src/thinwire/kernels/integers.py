"""Packed narrow integers: pack, add, add with saturation. Meaning: `reference.integers`."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.backends import implementation, reference

INTEGERS = (torch.int8, torch.int16, torch.int32)


def packed_int_bytes(count: int, width: int) -> int:
    """The size of `count` packed integers of `width` bits."""
    check.within("width", width, 1, 32)
    return (count * width + 7) // 8


def pack_ints(values: Tensor, width: int, out: Tensor) -> None:
    """The values (int8, int16, int32) as `width` bits each, two's complement, into `out` (uint8).

    ValueError if one does not fit.
    """
    _check(out, width, values)
    implementation(reference.pack_ints, values.device)(values, width, out)


def add_packed(data: Tensor, width: int, out: Tensor) -> None:
    """out (int8, int16, int32) += the integers; sums wrap."""
    _check(data, width, out)
    implementation(reference.add_packed, data.device)(data, width, out)


def add_packed_saturating(data: Tensor, width: int, out: Tensor) -> None:
    """out (int8, int16, int32) += the integers, clipped to +-(2^(width-1) - 1): call it once per addend, in order."""
    _check(data, width, out)
    check.within("width", width, 2, 32)
    implementation(reference.add_packed_saturating, data.device)(data, width, out)


def _check(data: Tensor, width: int, values: Tensor) -> None:
    check.flat("integers", values, dtypes=INTEGERS)
    check.within("width", width, 1, 8 * values.element_size())
    check.flat("packed", data, dtypes=(torch.uint8,), like=values, numel=packed_int_bytes(values.numel(), width))
